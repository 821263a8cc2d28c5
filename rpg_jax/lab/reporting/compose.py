"""What a report says, in order."""

from rpg_jax.lab.reporting import figures, published, runs, tables
from rpg_jax.lab.reporting.comparison import compare, verdicts
from rpg_jax.lab.reporting.page import Bullets, Figure, Heading, Text


def document(title: str, read, experiments) -> list:
    """The blocks of the page of some runs; ValueError when there is nothing to compare.

    `experiments` are published ones, to stand beside those of the runs that repeat them.
    """
    variants, twice = runs.variants(read)
    found = compare(variants)
    ours = {variant.name: published.matching(variant.settings, experiments) for variant in found.variants}
    papers = tables.published(found, {name: match for name, match in ours.items() if match})
    dynamics = figures.dynamics(variants)
    return [
        Heading(title, 1),
        Text(tables.summary(found, variants)),
        Bullets(tables.caveats(found, variants, twice)),
        Heading("What is significant"),
        Bullets(verdicts(found)),
        Heading("Training curves"),
        Figure("curves", figures.curves(found), tables.CURVES),
        Heading("Last and best"),
        tables.last_and_best(found),
        Text(tables.LAST_AND_BEST),
        *papers,
        Heading("Interquartile means"),
        Figure("intervals", figures.intervals(tables.iqms(found)), tables.INTERVALS),
        tables.interquartile_means(found),
        Heading("Probability of improvement"),
        tables.improvements(found),
        Text(tables.IMPROVEMENTS),
        *([Heading("Training"), Figure("dynamics", dynamics, tables.DYNAMICS)] if dynamics else []),
        Heading("Cost"),
        tables.costs(variants),
        Text(tables.COSTS),
        Heading("Differences of configs"),
        *tables.config_differences(variants),
        Heading("Runs"),
        tables.runs(found, variants),
        Heading("Definitions"),
        Bullets(tables.DEFINITIONS),
    ]
