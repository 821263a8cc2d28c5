"""pass@k against enumeration of every draw, and what the bootstrap interval covers."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpg_jax.training.statistics import bootstrap_interval, majority_at_k, mean_at_k, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(responses, data):
    k = data.draw(st.integers(1, len(responses)))
    draws = list(itertools.combinations(responses, k))
    expected = sum(any(draw) for draw in draws) / len(draws)
    np.testing.assert_allclose(pass_at_k([responses], k), [expected], atol=1e-12)


def test_pass_at_k_of_large_samples_does_not_overflow():
    correct = np.zeros((3, 2000))
    correct[1, :1] = 1
    correct[2] = 1
    np.testing.assert_allclose(pass_at_k(correct, 1000), [0.0, 0.5, 1.0], atol=1e-9)


def test_bootstrap_interval_of_two_problems_is_exact():
    """Means of two redrawn from {0, 1} are 0, 1/2, 1 with probability 1/4, 1/2, 1/4."""
    assert bootstrap_interval([0.0, 1.0], level=0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


def test_bootstrap_interval_agrees_with_the_normal_one():
    values = np.random.default_rng(2).normal(0.4, 0.1, size=400)
    low, high = bootstrap_interval(values, level=0.9, resamples=4000)
    half = 1.645 * values.std() / 20
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=half / 10)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: pass_at_k(np.ones((2, 4)), 0), "pass@0 needs from 1 to 4"),
    (lambda: mean_at_k(np.ones(4)), "problems, responses"), (lambda: mean_at_k(np.ones((0, 4))), "problems, responses"),
    (lambda: bootstrap_interval([]), "values has shape"), (lambda: bootstrap_interval([1.0], level=95), "level is 95"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_majority_vote():
    answers = [["4", "4", "5"], ["4", "5", None], [None, None, None], ["7", "5", "5"], ["1", "2", "3"]]
    correct = [[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert majority_at_k(answers, correct) == pytest.approx([1, 0.5, 0, 0, 1 / 3])
