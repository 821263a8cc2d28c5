"""Which variants are equal to within a margin: two one-sided tests of every pair, over runs of the same seeds.

"Not significantly different" is not "equal": few runs show no difference at all. Here equality is what is to be shown
(Schuirmann 1987): p is the chance of a mean difference so small if the variants did differ by the margin.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from rpg_jax import InputError
from rpg_jax.lab.reporting.comparison import SIGNIFICANT, Comparison
from rpg_jax.lab.reporting.estimates import holm
from rpg_jax.lab.reporting.page import Cell, plain, table
from rpg_jax.lab.reporting.runs import Variant


class Equivalence(NamedTuple):
    """Of paired differences of scores."""

    difference: float
    deviation: float  # of one pair of runs
    low: float  # ends of the 90 % interval, which lies within the margin where p is below 5 %
    high: float
    p: float  # that of equality to within the margin
    p_different: float  # of the two-sided paired t-test


def equivalence(differences, margin: float) -> Equivalence:
    """Two one-sided t-tests of f[pairs], the larger p; at least two differences."""
    d = np.asarray(differences, np.float64)
    mean, error = d.mean(), stats.sem(d)
    if error == 0:  # the very same runs
        return Equivalence(mean, 0.0, mean, mean, float(abs(mean) >= margin), float(mean == 0))
    half = stats.t.ppf(0.95, len(d) - 1) * error
    above = stats.ttest_1samp(d, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(d, margin, alternative="less").pvalue
    different = stats.ttest_1samp(d, 0.0).pvalue
    return Equivalence(mean, d.std(ddof=1), mean - half, mean + half, float(max(above, below)), float(different))


def pairs(comparison: Comparison, variants: list[Variant], margin: float) -> pd.DataFrame:
    """Every two variants by name, index (variant, other): the fields of `Equivalence`, and both p after Holm.

    Raises:
      ValueError: two variants have fewer than two seeds in common, so that nothing is paired.
    """
    seeds = {str(run.path): run.seed for variant in variants for run in variant.runs}
    means = comparison.last().mean(axis=1)
    scores = {name: {seeds[run]: score for run, score in means[name].items()} for name in comparison.variants}
    rows = {}
    for pair in itertools.combinations(comparison.variants, 2):
        x, y = (scores[name] for name in pair)
        common = sorted(x.keys() & y.keys() - {None})
        if len(common) < 2:
            raise InputError(
                f"--margin compares runs of the same seeds, and {pair[0]} and {pair[1]} share fewer than 2"
            )
        rows[pair] = equivalence([x[seed] - y[seed] for seed in common], margin)._asdict() | {"seeds": len(common)}
    found = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    return found.assign(holm=holm(found["p"]), holm_different=holm(found["p_different"])) if rows else found


def section(comparison: Comparison, variants: list[Variant], margin: float) -> list:
    """The blocks of a report about it; none for a single variant."""
    found = pairs(comparison, variants, margin)
    if found.empty:
        return []
    equal, different = ((found[key] < SIGNIFICANT).sum() for key in ("holm", "holm_different"))
    text = (
        f"Of {len(found)} pairs {equal} are equal to within {margin:.3g} and {different} differ, after Holm's "
        f"correction for all {len(found)} pairs; of the others nothing is known. Runs of the same seed are paired and "
        f"a run's score is its mean over tasks. Equality: two one-sided t-tests; difference: a paired t-test."
    )
    rows = [
        [*names, f"{pair.difference:+.4f}", f"{pair.low:+.4f} – {pair.high:+.4f}", f"{pair.deviation:.4f}"]
        + [Cell(f"{p:.2g}", "best" if p < SIGNIFICANT else "") for p in (pair.p, pair.holm)]
        + [Cell(f"{p:.2g}", "best" if p < SIGNIFICANT else "") for p in (pair.p_different, pair.holm_different)]
        for names, pair in found.sort_values("p", kind="stable").iterrows()
    ]
    header = ["variant", "other", "mean difference", "90 % interval", "deviation of a pair", "p equal"]
    header += ["after Holm", "p different", "after Holm"]
    return ["## What is equal", plain(text), table(header, rows)]
