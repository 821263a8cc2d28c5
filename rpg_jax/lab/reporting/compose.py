"""What a report consists of, in order, and the files that it is written to."""

import pathlib
import urllib.parse

from rpg_jax import InputError
from rpg_jax.lab.reporting import figures, runs, tables
from rpg_jax.lab.reporting.comparison import compare, verdict
from rpg_jax.lab.reporting.tables import plain
from rpg_jax.run.target import writable
from rpg_jax.storage.logs import write_text_atomic


def main(options) -> None:
    """Writes the report that the flags of `rpg_jax.report` ask for."""
    folders = options.arguments
    if not folders:
        raise InputError("name folders of runs, such as runs/objectives; see --help")
    out = pathlib.Path(options.out or pathlib.Path(folders[0]) / "report.md")
    if out.suffix != ".md":
        raise InputError(f"--out={out}: expected a name that ends in .md, such as report.md")
    found = [runs.read(path) for path in runs.find(folders)]
    writable("out", out.parent)
    title = f"Report of {', '.join(map(str, map(pathlib.Path, folders)))}"
    text, drawn = document(title, found, out.stem, options.margin)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, svg in drawn.items():
        write_text_atomic(out.with_name(name), svg + "\n")
    write_text_atomic(out, text)
    print(f"runs: {len(found)}; see {out}")


def document(
    title: str, found: list[runs.Run], stem: str = "report", margin: float | None = None
) -> tuple[str, dict[str, str]]:
    """The page of some runs in Markdown, and its figures, {file beside it: SVG}; InputError when none can be shown.

    With a margin, variants are also tested for being equal to within it. Sections that would be empty, such as
    comparisons where there is one variant, are left out.
    """
    drawn: dict[str, str] = {}

    def figure(name, svg, caption):
        drawn[f"{stem}-{name}.svg"] = svg
        return f"![{name}]({urllib.parse.quote(stem)}-{name}.svg)\n\n{plain(caption)}"

    variants = runs.variants(found)
    comparison = compare(variants)
    notes, dynamics = tables.notes(comparison, variants), figures.dynamics(variants)
    several_variants = len(comparison.variants) > 1
    if margin and not several_variants:
        notes.append("one variant alone: there is no pair to test for being equal")
    blocks = [f"# {plain(title)}", plain(tables.summary(comparison, variants))]
    blocks += ["\n".join(f"* {plain(note)}" for note in notes)] if notes else []
    if several_variants:
        text = plain(verdict(comparison))
        blocks += ["## What is significant", text, tables.pairs(comparison), plain(tables.PAIRS)]
        blocks += tables.equal(comparison, variants, margin) if margin else []
    blocks += ["## Training curves", figure("curves", figures.curves(comparison), tables.CURVES)]
    blocks += ["## Last and best", tables.last_and_best(comparison), plain(tables.LAST_AND_BEST)]
    if several_variants or comparison.means["runs"].max() > 1:
        blocks += [figure("intervals", figures.intervals(comparison.means), tables.INTERVALS)]
    blocks += ["## Training", figure("dynamics", dynamics, tables.DYNAMICS)] if dynamics else []
    blocks += tables.costs(variants)
    blocks += tables.config_differences(variants)
    return "\n\n".join([*blocks, "## Runs", tables.runs(comparison, variants)]) + "\n", drawn
