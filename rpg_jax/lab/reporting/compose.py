"""What a report consists of, in order, and the files that it is written to."""

import pathlib

from rpg_jax.lab.reporting import figures, page, published, runs, tables
from rpg_jax.lab.reporting.comparison import compare, verdict
from rpg_jax.lab.reporting.page import Bullets, Figure, Heading, Text
from rpg_jax.run import cli
from rpg_jax.storage.logs import write_text_atomic
from rpg_jax.storage.settings import flatten


def main(options, experiments) -> None:
    """Writes the report that the flags of `rpg_jax.report` ask for.

    Args:
      experiments: published ones, to stand beside the runs that repeat them: (name, config, scores) each.
    """
    folders = options.arguments
    with cli.door():
        if not folders:
            raise ValueError("name folders of runs, such as runs/objectives; see --help")
        out = pathlib.Path(options.out or pathlib.Path(folders[0]) / "report.html")
        if out.suffix != ".html":
            raise ValueError(f"--out={out}: expected a name that ends in .html, such as report.html")
        read = [runs.read(path) for path in runs.find(folders)]
        title = f"Report of {', '.join(map(str, map(pathlib.Path, folders)))}"
        references = [
            published.Experiment(name, flatten(config.to_dict()), scores) for name, config, scores in experiments
        ]
        blocks = document(title, read, references)
        out.parent.mkdir(parents=True, exist_ok=True)
        for block in blocks:
            if isinstance(block, Figure):
                write_text_atomic(out.with_name(f"{out.stem}-{block.name}.svg"), block.svg + "\n")
        write_text_atomic(out.with_suffix(".md"), page.to_markdown(blocks, out.stem))
        write_text_atomic(out, page.to_html(title, blocks))
    print(f"runs: {len(read)}; see {out} and {out.with_suffix('.md')}")


def document(title: str, found: list[runs.Run], experiments=()) -> list:
    """The blocks of the page of some runs; ValueError when none of them can be shown.

    Sections that would be empty, such as comparisons where there is one variant, are left out.
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
    blocks += [Heading("Training curves"), Figure("curves", figures.curves(comparison), tables.CURVES)]
    blocks += [Heading("Last and best"), tables.last_and_best(comparison), Text(tables.LAST_AND_BEST)]
    blocks += tables.published(comparison, {name: match for name, match in matches.items() if match})
    if several_variants or max(comparison.runs.values()) > 1:
        intervals = figures.intervals(comparison.iqms(comparison.last()))
        blocks += [Heading("Interquartile means"), Figure("intervals", intervals, tables.INTERVALS)]
        blocks += [tables.interquartile_means(comparison)]
    blocks += tables.responses(variants)
    blocks += [Heading("Training"), Figure("dynamics", dynamics, tables.DYNAMICS)] if dynamics else []
    blocks += [Heading("Cost"), tables.costs(variants), Text(tables.COSTS)]
    blocks += tables.config_differences(variants)
    return [*blocks, Heading("Runs"), tables.runs(comparison, variants, repeated)]
