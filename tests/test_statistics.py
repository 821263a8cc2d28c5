"""What the bootstrap interval covers, and who wins a vote."""

import numpy as np
import pytest

from rpg_jax.training.evaluation import bootstrap_interval, majority_at_k


def test_bootstrap_interval_of_two_problems_is_exact_and_that_of_many_the_normal_one():
    """Means of two redrawn from {0, 1} are 0, 1/2, 1 with probability 1/4, 1/2, 1/4."""
    assert bootstrap_interval([0.0, 1.0], level=0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)
    values = np.random.default_rng(2).normal(0.4, 0.1, size=400)
    low, high = bootstrap_interval(values, level=0.9, resamples=4000)
    half = 1.645 * values.std() / 20
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=half / 10)


def test_majority_vote():
    answers = [["4", "4", "5"], ["4", "5", None], [None, None, None], ["7", "5", "5"], ["1", "2", "3"]]
    correct = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert majority_at_k(answers, correct) == pytest.approx([1, 0.5, 0, 0, 1 / 3])
