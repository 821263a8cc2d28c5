"""What a report compares: which runs, on which tasks, at which step; which differ, and which are equal."""

import dataclasses
import functools
import itertools

import numpy as np
import pandas as pd
from scipy import stats

from rpg_jax import InputError
from rpg_jax.lab.reporting.estimates import difference, holm, least_p, over_runs, permutation_p
from rpg_jax.lab.reporting.runs import Variant

SIGNIFICANT = 0.05


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Variants at one step: the last that every finished run, and at least one run of each variant, has reached.

    Unfinished runs that did not come so far are shown, but not averaged with the others. A variant none of whose runs
    came half as far as the finished ones is `behind` and does not hold up the others.
    """

    variants: list[str]  # with a run that came to the step
    behind: list[str]  # evaluated, but without such a run
    partial: list[str]  # tasks that only some runs were evaluated on
    step: int
    scores: pd.DataFrame  # mean@k: index (variant, run's path, step), a column a task
    horizon: pd.Series  # the last step that each run was evaluated at: index (variant, run)

    def last(self) -> pd.DataFrame:
        """Scores at the step, of the runs that have reached it: index (variant, run), a column a task."""
        return self.until_step().last()

    def until_step(self, reached=True):
        """Scores until the step by (variant, run), of the runs that have reached it or, if not `reached`, of others."""
        horizon = self.scores.index.droplevel("step").map(self.horizon)
        chosen = (self.scores.index.get_level_values("step") <= self.step) & ((horizon >= self.step) == reached)
        return self.scores[chosen].groupby(level=["variant", "run"], sort=False)

    @functools.cached_property
    def means(self) -> pd.DataFrame:
        """The mean of each variant over its runs that reached the step, as `over_runs`."""
        return over_runs(self.last().mean(axis=1), "variant")

    @functools.cached_property
    def pairs(self) -> pd.DataFrame:
        """Every two variants, index (variant, other), the one with the higher mean first.

        Columns: `gap` of the means with its interval, `low` and `high`; `p` of a permutation test, `holm` as corrected
        for all pairs, `least` that so many runs can give.
        """
        scores = self.last().mean(axis=1)
        rows = {}
        for pair in itertools.combinations(self.means["value"].sort_values(ascending=False, kind="stable").index, 2):
            x, y = (scores[name].to_numpy() for name in pair)
            gap, low, high = difference(x, y)
            rows[pair] = dict(gap=gap, low=low, high=high, p=permutation_p(x, y), least=least_p(len(x), len(y)))
        table = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
        return table.assign(holm=holm(table["p"])) if rows else table


def compare(variants: list[Variant]) -> Comparison:
    """InputError when nothing was evaluated, or the variants have no held-out task in common."""
    evaluated = {variant.name: [run for run in variant.runs if run.tasks] for variant in variants}
    evaluated = {name: runs for name, runs in evaluated.items() if runs}
    if not evaluated:
        raise InputError("none of these runs has logged an evaluation (eval/TASK/mean@k) yet; wait, or name others")
    every = list(itertools.chain(*evaluated.values()))
    tasks = [task for task in every[0].tasks if all(task in run.tasks for run in every)]
    if not tasks:
        listed = "; ".join(f"{name}: {', '.join(runs[0].tasks)}" for name, runs in evaluated.items())
        raise InputError(f"these runs have no held-out task in common ({listed}); make a report of each")
    scores = {(name, str(run.path)): run.scores[tasks].dropna() for name, runs in evaluated.items() for run in runs}
    if any(table.empty for table in scores.values()):
        raise InputError(f"a run has no evaluation that has all of {', '.join(tasks)}; make a report without it")
    scores = pd.concat(scores, names=["variant", "run"])
    horizon = scores.reset_index("step")["step"].groupby(level=["variant", "run"], sort=False).max()
    farthest = horizon.groupby(level="variant", sort=False).max()
    ends = [horizon[name, str(run.path)] for name, runs in evaluated.items() for run in runs if run.is_finished]
    behind = farthest.index[farthest < min(ends, default=0) / 2]
    return Comparison(
        variants=[name for name in evaluated if name not in behind],
        behind=list(behind),
        partial=[task for task in dict.fromkeys(task for run in every for task in run.tasks) if task not in tasks],
        step=int(min([*ends, *farthest.drop(behind)])),
        scores=scores,
        horizon=horizon,
    )


def verdict(comparison: Comparison) -> str:
    """How many pairs of variants differ significantly, and how many still do after Holm's correction."""
    pairs = comparison.pairs
    found, corrected, least = (pairs["p"] < SIGNIFICANT).sum(), (pairs["holm"] < SIGNIFICANT).sum(), pairs["least"]
    text = (
        f"{found} of {len(pairs)} pair{'s' * (len(pairs) != 1)} of variants differ significantly (p < {SIGNIFICANT}, "
        f"two-sided permutation test on the runs' mean scores)."
    )
    if least.min() >= SIGNIFICANT:
        runs = sorted(set(comparison.means["runs"]))
        return (
            f"{text} With {' or '.join(map(str, runs))} run{'s' * (runs != [1])} a variant nothing can be significant "
            f"at 5 %: p is {spelled(least.min())} at the least."
        )
    if found and len(pairs) > 1:
        text += f" Holm's correction for all {len(pairs)} pairs leaves {corrected}"
        if least.min() * len(pairs) >= SIGNIFICANT:
            level = f"{SIGNIFICANT / len(pairs):.2g}"
            text += f": it needs p < {level}, and so few runs give {spelled(least.min())} at the least"
        text += "."
    return text


def spelled(p: float) -> str:
    """p with two digits, or with as many more as keep it on its side of 5 %."""
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in texts if (float(text) < SIGNIFICANT) == (p < SIGNIFICANT))


def equivalence(differences, margin: float) -> dict[str, float]:
    """Whether paired differences f[pairs], at least two, are 0 to within a margin: two one-sided t-tests.

    "Not significantly different" is not "equal": few runs show no difference at all. Here equality is what is to be
    shown (Schuirmann 1987): `p`, the larger of the two, is the chance of a mean difference so small if the variants did
    differ by the margin. `low` and `high` are the 90 % interval, which lies within the margin where p is below 5 %;
    `deviation` is that of a pair, `p_different` of the two-sided paired t-test.
    """
    d = np.asarray(differences, np.float64)
    mean, deviation = d.mean(), d.std(ddof=1)
    if deviation == 0:  # the very same runs
        p, p_different, low, high = float(abs(mean) >= margin), float(mean == 0), mean, mean
    else:
        two_sided = stats.ttest_1samp(d, 0.0)
        above = stats.ttest_1samp(d, -margin, alternative="greater").pvalue
        p, p_different = max(above, stats.ttest_1samp(d, margin, alternative="less").pvalue), two_sided.pvalue
        low, high = two_sided.confidence_interval(0.9)
    return dict(difference=mean, deviation=deviation, low=low, high=high, p=p, p_different=p_different)


def equal_pairs(comparison: Comparison, variants: list[Variant], margin: float) -> pd.DataFrame:
    """Every two variants by name, index (variant, other): what `equivalence` gives, and both p after Holm; InputError
    where two have fewer than two seeds in common, so that nothing is paired."""
    seeds = {str(run.path): run.seed for variant in variants for run in variant.runs}
    scores = comparison.last().mean(axis=1).rename(index=seeds, level="run").groupby(level=["run", "variant"]).last()
    scores, rows = scores.unstack().reindex(columns=comparison.variants), {}
    for pair in itertools.combinations(comparison.variants, 2):
        gaps = (scores[pair[0]] - scores[pair[1]]).dropna()  # of the seeds that both have
        if len(gaps) < 2:
            raise InputError(
                f"--margin compares runs of the same seeds, and {pair[0]} and {pair[1]} share fewer than 2"
            )
        rows[pair] = equivalence(gaps, margin)
    found = pd.DataFrame.from_dict(rows, orient="index", dtype=float)
    return found.assign(holm=holm(found["p"]), holm_different=holm(found["p_different"])) if rows else found
