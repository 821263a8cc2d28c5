"""Estimates over problems: maj@k, and bootstrap intervals of means."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> np.ndarray:
    """The chance that a majority vote over a problem's k responses is right: f64[P] (Wang et al., arXiv 2203.11171).

    Equal answers vote together; the most common one wins and a tie is drawn by lot. An answer is as right as its
    responses are on average.

    Args:
      answers: [P][k], the normalized final answer of each response; None has no vote.
      correct: bool or float [P, k], scores in 0..1.
    """
    chances = []
    for row, scores in zip(answers, np.asarray(correct, np.float64), strict=True):
        votes = Counter(answer for answer in row if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        means = [np.mean([score for vote, score in zip(row, scores, strict=True) if vote == x]) for x in winners]
        chances.append(float(np.mean(means)) if means else 0.0)
    return np.array(chances)


def bootstrap_interval(
    values: ArrayLike, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap interval of the mean of `values` f[P]: problems are redrawn, not responses."""
    values = np.asarray(values, np.float64)
    random = np.random.default_rng(seed)
    means = values[random.integers(values.size, size=(resamples, values.size))].mean(axis=1)
    low, high = np.quantile(means, [(1.0 - level) / 2, (1.0 + level) / 2])
    return float(low), float(high)
