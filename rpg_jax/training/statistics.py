"""Estimates over problems: mean@k, pass@k, maj@k, and bootstrap intervals of their means."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rpg_jax import InputError


def mean_at_k(correct: ArrayLike) -> np.ndarray:
    """The mean score of each problem's k responses, f64[P] from bool or float [P, k] in 0..1; 1 is right."""
    return _responses(correct).mean(axis=1)


def pass_at_k(correct: ArrayLike, k: int) -> np.ndarray:
    """The chance that at least one of k responses is right, unbiased from n >= k of them: f64[P] from [P, n].

    1 - C(n - c, k) / C(n, k) with c right ones, as a product that does not overflow (Chen et al. 2021,
    arXiv 2107.03374, equation 1). A response with partial credit, a score under 1, is not right.

    Raises:
      ValueError: k is not in 1..n.
    """
    correct = _responses(correct)
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise InputError(f"pass@{k} needs from 1 to {n} of the {n} responses a problem; sample at least {k}")
    wrong = n - (correct == 1.0).sum(axis=1, keepdims=True)
    drawn = np.arange(k)
    return 1.0 - np.prod(np.clip((wrong - drawn) / (n - drawn), 0.0, None), axis=1)


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> np.ndarray:
    """The chance that a majority vote over a problem's k responses is right: f64[P] (Wang et al., arXiv 2203.11171).

    Equal answers vote together; the most common one wins and a tie is drawn by lot. An answer is as right as its
    responses are on average.

    Args:
      answers: [P][k], the normalized final answer of each response; None has no vote.
      correct: bool or float [P, k], scores in 0..1.
    """
    correct = _responses(correct)
    return np.array([_vote(*row) for row in zip(answers, correct, strict=True)])


def _vote(answers: Sequence[str | None], correct: np.ndarray) -> float:
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    right: dict[str, list[float]] = {answer: [] for answer, count in votes.items() if count == most}
    for answer, value in zip(answers, correct, strict=True):
        if answer in right:
            right[answer].append(value)
    return float(np.mean([np.mean(values) for values in right.values()])) if right else 0.0


def bootstrap_interval(
    values: ArrayLike, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap interval of the mean of `values` f[P]: problems are redrawn, not responses.

    Raises:
      ValueError: `values` is empty or not one-dimensional, or `level` not in (0, 1).
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or not values.size:
        raise InputError(f"values has shape {values.shape}; one value for each of at least one problem is needed")
    if not 0.0 < level < 1.0:
        raise InputError(f"level is {level}; it must be between 0 and 1, as 0.95")
    random = np.random.default_rng(seed)
    means = values[random.integers(values.size, size=(resamples, values.size))].mean(axis=1)
    low, high = np.quantile(means, [(1.0 - level) / 2, (1.0 + level) / 2])
    return float(low), float(high)


def _responses(correct: ArrayLike) -> np.ndarray:
    correct = np.asarray(correct, np.float64)
    if correct.ndim != 2 or 0 in correct.shape:
        raise InputError(f"correct has shape {correct.shape}; [problems, responses], none of them 0, is needed")
    return correct
