"""Estimates over a few runs on several tasks, as rliable defines them, and how sure they are.

Agarwal et al. 2021, "Deep reinforcement learning at the edge of the statistical precipice", arXiv 2108.13264. Scores
are f[runs, tasks]; resamples are of runs, for each task on its own, and say nothing of other tasks.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

RESAMPLES = 4000
LEVEL = 0.95
MOST_SPLITS = 20000  # of a permutation test; more are drawn by lot


class Estimate(NamedTuple):
    """A point estimate and the interval around it, which is NaN where one run alone says nothing of others."""

    value: float
    low: float
    high: float


def interquartile_mean(scores) -> np.ndarray:
    """The mean of the middle half of all runs x tasks, f[...] from f[..., runs, tasks].

    A quarter of the numbers, rounded down, is left out at each end (scipy's `trim_mean` at 0.25).
    """
    scores = np.asarray(scores, np.float64)
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    count = ordered.shape[-1]
    out = count // 4
    return ordered[..., out : count - out].mean(axis=-1)


def improvement(x, y) -> float:
    """P(X > Y): the chance that a run of x beats one of y on a task, ties half, averaged over tasks.

    From x f[runs, tasks] and y f[other runs, tasks]: Mann and Whitney's U over the number of pairs.
    """
    return float(_wins(x, y).mean())


def _wins(x, y) -> np.ndarray:
    """1, ½ or 0 for each pair of runs, f[tasks, runs, other runs]."""
    x, y = np.asarray(x, np.float64).T[:, :, None], np.asarray(y, np.float64).T[:, None]
    return (x > y) + 0.5 * (x == y)


def resampled(scores, random, count=RESAMPLES) -> np.ndarray:
    """Stratified bootstrap: f[count, runs, tasks], the runs of each task drawn anew with replacement."""
    scores = np.asarray(scores, np.float64)
    rows = random.integers(len(scores), size=(count, *scores.shape))
    return np.take_along_axis(scores[None], rows, axis=1)


def iqm_estimate(scores, seed=0) -> Estimate:
    """The interquartile mean with its 95 % stratified percentile bootstrap interval."""
    return _estimate(
        interquartile_mean(scores), interquartile_mean(resampled(scores, np.random.default_rng(seed))), len(scores)
    )


def improvement_estimate(x, y, seed=0) -> Estimate:
    """P(X > Y) with its 95 % stratified bootstrap interval, x and y resampled independently."""
    wins, random = _wins(x, y), np.random.default_rng(seed)
    tasks, *runs = wins.shape
    times_x, times_y = (_times(tasks, count, random) for count in runs)
    return _estimate(improvement(x, y), ((times_x @ wins) * times_y).sum(axis=(0, 2)) / wins.size, min(runs))


def _times(tasks, runs, random) -> np.ndarray:
    """How often each resample, as `resampled` draws them, has each run: f[tasks, RESAMPLES, runs]."""
    drawn = random.integers(runs, size=(RESAMPLES, runs, tasks)).transpose(2, 0, 1)
    cells = drawn + runs * np.arange(tasks * RESAMPLES).reshape(tasks, RESAMPLES, 1)
    return np.bincount(cells.ravel(), minlength=cells.size).reshape(cells.shape).astype(np.float64)


def _estimate(value, resamples, runs) -> Estimate:
    if runs < 2:
        return Estimate(float(value), math.nan, math.nan)
    low, high = np.quantile(resamples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high))


def permutation_p(x, y, seed=0) -> float:
    """How often chance alone divides the runs into two groups whose mean scores differ at least as much: two-sided.

    A run is the unit, with its mean over tasks, for its tasks were learned together. All divisions are counted where
    there are at most `MOST_SPLITS`; beyond, that many are drawn, and the given one counts as one of them.
    """
    x, y = np.asarray(x, np.float64).mean(axis=-1), np.asarray(y, np.float64).mean(axis=-1)
    both, total = np.concatenate([x, y]), len(x) + len(y)
    if math.comb(total, len(x)) <= MOST_SPLITS:
        chosen = np.array(list(itertools.combinations(range(total), len(x))))
    else:
        random = np.random.default_rng(seed)
        chosen = random.permuted(np.tile(np.arange(total), (MOST_SPLITS, 1)), axis=1)[:, : len(x)]
        chosen[0] = np.arange(len(x))
    sums = both[chosen].sum(axis=1)
    gaps = np.abs(sums / len(x) - (both.sum() - sums) / len(y))
    return float(np.mean(gaps >= abs(x.mean() - y.mean()) - 1e-12))


def holm(p) -> np.ndarray:
    """p-values [tests] as Holm (1979) corrects them: one in 20 times at most is any of them below 5 % by chance."""
    p = np.asarray(p, np.float64)
    order, left = np.argsort(p, kind="stable"), np.arange(len(p), 0, -1)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(left * p[order]), 1.0)
    return corrected


def least_p(runs_x: int, runs_y: int) -> float:
    """The smallest p that `permutation_p` can give for so many runs."""
    both_ways = 2 if runs_x == runs_y else 1
    return min(1.0, both_ways / math.comb(runs_x + runs_y, runs_x))
