"""Estimates from a few runs on several tasks, with intervals and tests. Scores are f[runs, tasks].

The interquartile mean and P(X > Y) are those of Agarwal et al. 2021, "Deep reinforcement learning at the edge of the
statistical precipice", arXiv 2108.13264. Their intervals are not: a run learns its tasks together, so the run is the
unit, and whole runs are resampled. Resampling each task on its own takes the tasks of a run for independent; where they
are not, its 95 % intervals cover the truth in 74 to 77 % of simulated cases with 5 or 10 runs. Whole runs cover it in
87 % with 5 and 94 % with 10, and the t interval of the mean in 93 to 96 %. All speak of other seeds on the same tasks.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

RESAMPLES = 4000
LEVEL = 0.95
MOST_SPLITS = 20000  # of a permutation test; where there are more, so many are drawn at random
MOST_NUMBERS = 4_000_000  # resampled at a time, which bounds memory


class Estimate(NamedTuple):
    """A point estimate and its interval, which is NaN where a single run says nothing about others."""

    value: float | np.ndarray
    low: float | np.ndarray
    high: float | np.ndarray


def interquartile_mean(scores) -> np.ndarray:
    """The mean of the middle half of all runs x tasks, f[...] from f[..., runs, tasks].

    A quarter of the numbers, rounded down, is left out at each end.
    """
    scores = np.asarray(scores, np.float64)
    return stats.trim_mean(scores.reshape(*scores.shape[:-2], -1), 0.25, axis=-1)


def iqm_estimate(scores) -> Estimate:
    """The interquartile mean of f[..., runs, tasks] with its 95 % bootstrap interval over runs, each f[...]."""
    scores = np.asarray(scores, np.float64)
    return _bootstrap([scores], interquartile_mean)


def mean_estimate(scores) -> Estimate:
    """The mean over runs of f[runs, tasks], a run's score being its mean over tasks, with its 95 % t interval."""
    means = np.mean(np.asarray(scores, np.float64), axis=-1)
    if len(means) < 2:
        return Estimate(float(means.mean()), math.nan, math.nan)
    half = stats.t.ppf((1 + LEVEL) / 2, len(means) - 1) * stats.sem(means)
    return Estimate(float(means.mean()), float(means.mean() - half), float(means.mean() + half))


def iqm_curve(scores: pd.DataFrame, bands=True) -> pd.DataFrame:
    """The interquartile mean of each step over the runs that have it: index step, columns runs, value, low, high.

    Args:
      scores: index (run, step), a column a task.
      bands: whether to estimate intervals; they are NaN if not.
    """
    table = scores.unstack("run")  # index step, columns (task, run)
    present, curve = table[scores.columns[0]].notna(), []
    for runs, steps in table.index.groupby(present.apply(tuple, axis=1)).items():
        values = table.loc[steps].to_numpy().reshape(len(steps), -1, len(runs))[..., list(runs)]  # [steps, tasks, runs]
        values = values.swapaxes(1, 2)
        estimate = iqm_estimate(values) if bands else Estimate(interquartile_mean(values), math.nan, math.nan)
        curve.append(pd.DataFrame({"runs": sum(runs), **estimate._asdict()}, index=steps))
    return pd.concat(curve).sort_index()


def improvement_estimate(x, y) -> Estimate:
    """P(X > Y) + P(X = Y) / 2 for a run of x f[runs, tasks] and one of y f[other runs, tasks], averaged over tasks.

    It is Mann and Whitney's U over the number of pairs. The 95 % bootstrap interval resamples the runs of x and of y
    independently.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return _bootstrap([x, y], lambda a, b: np.mean(_wins(np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2)), axis=-1))


def _wins(x, y) -> np.ndarray:
    """The share of pairs that x f[..., runs] wins against y f[..., other runs], ties half."""
    x, y = np.asarray(x)[..., :, None], np.asarray(y)[..., None, :]
    return (np.sign(x - y).mean((-2, -1)) + 1) / 2


def _bootstrap(samples: list[np.ndarray], statistic: Callable) -> Estimate:
    """A percentile bootstrap that redraws the runs of each of `samples` f[..., runs, tasks], all tasks of one at once.

    statistic: the samples, with further leading axes -> f[...].
    """
    value = statistic(*samples)
    runs = [np.arange(sample.shape[-2]) for sample in samples]
    if min(map(len, runs)) < 2:
        return Estimate(value, np.full_like(value, math.nan), np.full_like(value, math.nan))

    def of_runs(*drawn, axis):  # each i[resamples, runs]
        return statistic(*(sample[..., rows, :] for sample, rows in zip(samples, drawn, strict=True)))

    interval = stats.bootstrap(
        runs, of_runs, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", vectorized=True,
        axis=-1, rng=np.random.default_rng(0), batch=max(1, MOST_NUMBERS // sum(map(np.size, samples))),
    ).confidence_interval  # fmt: skip
    return Estimate(value, interval.low, interval.high)


def permutation_p(x, y) -> float:
    """The two-sided p of a permutation test on the difference of mean scores of x and y, f[runs, tasks].

    A run is the unit, with its mean over tasks, because its tasks were learned together. Every division of the runs is
    counted where there are at most `MOST_SPLITS`; otherwise so many are drawn. A single run cannot be tested: p is 1.
    """

    def gap(a, b, axis):  # rounded, because equal gaps summed in another order differ in their last bits
        return np.round(np.abs(a.mean(axis=axis) - b.mean(axis=axis)), 12)

    groups = np.mean(x, axis=-1), np.mean(y, axis=-1)
    if min(map(len, groups)) < 2:
        return 1.0
    result = stats.permutation_test(
        groups, gap, alternative="greater", n_resamples=MOST_SPLITS, vectorized=True, rng=np.random.default_rng(0)
    )
    return float(result.pvalue)


def holm(p) -> np.ndarray:
    """p-values [tests] corrected by Holm (1979): the chance of even one false finding stays below the level."""
    p = np.asarray(p, np.float64)
    order, left = np.argsort(p, kind="stable"), np.arange(len(p), 0, -1)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(left * p[order]), 1.0)
    return corrected


def least_p(runs_x: int, runs_y: int) -> float:
    """The smallest p that `permutation_p` can give for so many runs."""
    if min(runs_x, runs_y) < 2:
        return 1.0
    both_ways = 2 if runs_x == runs_y else 1
    return both_ways / math.comb(runs_x + runs_y, runs_x)
