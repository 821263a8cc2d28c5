"""What a report consists of, in order, and the files that it is written to."""

import pathlib

from rpg_jax import InputError
from rpg_jax.lab.reporting import equivalence, figures, frontier, kept, page, published, runs, tables
from rpg_jax.lab.reporting.comparison import compare, verdict
from rpg_jax.lab.reporting.page import Bullets, Figure, Heading, Text
from rpg_jax.run.target import writable
from rpg_jax.storage.logs import write_text_atomic
from rpg_jax.storage.settings import flatten

NAME = "report.html"


def main(options, experiments) -> None:
    """Writes the report that the flags of `rpg_jax.report` ask for.

    Args:
      experiments: published ones, to stand beside the runs that repeat them: (name, config, scores) each.
    """
    folders = options.arguments
    if not folders:
        raise InputError("name folders of runs, such as runs/objectives; see --help")
    first = pathlib.Path(folders[0])
    out = pathlib.Path(options.out or (first.with_suffix(".html") if first.suffix == kept.SUFFIX else first / NAME))
    if out.suffix != ".html":
        raise InputError(f"--out={out}: expected a name that ends in .html, such as report.html")
    writable("out", out.parent)
    read = read_all(folders)
    if options.keep:
        if not options.keep.endswith(kept.SUFFIX):
            raise InputError(f"--keep={options.keep}: expected a name that ends in {kept.SUFFIX}")
        kept.keep(read, pathlib.Path(options.keep))
    title = f"Report of {', '.join(map(str, map(pathlib.Path, folders)))}"
    references = [published.Experiment(name, flatten(config.to_dict()), scores) for name, config, scores in experiments]
    blocks = document(title, read, references, options.margin)
    out.parent.mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Figure):
            write_text_atomic(out.with_name(f"{out.stem}-{block.name}.svg"), block.svg + "\n")
    write_text_atomic(out.with_suffix(".md"), page.to_markdown(blocks, out.stem))
    write_text_atomic(out, page.to_html(title, blocks))
    print(f"runs: {len(read)}; see {out} and {out.with_suffix('.md')}")


def read_all(names: list[str]) -> list[runs.Run]:
    """The runs in or beneath folders, and those of files that `kept` has written."""
    files = [name for name in names if name.endswith(kept.SUFFIX)]
    folders = [name for name in names if name not in files]
    read = [runs.read(path) for path in runs.find(folders)]
    return read + [run for file in files for run in kept.read(pathlib.Path(file))]


def document(title: str, found: list[runs.Run], experiments=(), margin: float | None = None) -> list:
    """The blocks of the page of some runs; ValueError when none of them can be shown.

    With a margin, variants are also tested for being equal to within it. Sections that would be empty, such as
    comparisons where there is one variant, are left out.
    """
    variants, repeated = runs.variants(found)
    comparison = compare(variants)
    settings = {variant.name: variant.settings for variant in variants if variant.name in comparison.variants}
    matches = {name: published.matching(flat, experiments) for name, flat in settings.items()}
    notes, dynamics = tables.notes(comparison, variants), figures.dynamics(variants)
    blocks = [Heading(title, 1), Text(tables.summary(comparison, variants)), *([Bullets(notes)] if notes else [])]
    several_variants = len(comparison.variants) > 1
    if several_variants:
        text = Text(verdict(comparison))
        blocks += [Heading("What is significant"), text, tables.pairs(comparison), Text(tables.PAIRS)]
        blocks += equivalence.section(comparison, variants, margin) if margin else []
    blocks += frontier.section(comparison, variants)
    blocks += [Heading("Training curves"), Figure("curves", figures.curves(comparison), tables.CURVES)]
    blocks += [Heading("Last and best"), tables.last_and_best(comparison), Text(tables.LAST_AND_BEST)]
    blocks += tables.published(comparison, {name: match for name, match in matches.items() if match})
    if several_variants or max(comparison.runs.values()) > 1:
        intervals = figures.intervals(comparison.iqms(comparison.last()))
        blocks += [Heading("Interquartile means"), Figure("intervals", intervals, tables.INTERVALS)]
        blocks += [tables.interquartile_means(comparison)]
    blocks += tables.responses(variants)
    blocks += [Heading("Training"), Figure("dynamics", dynamics, tables.DYNAMICS)] if dynamics else []
    blocks += tables.costs(variants)
    blocks += tables.config_differences(variants)
    return [*blocks, Heading("Runs"), tables.runs(comparison, variants, repeated)]
