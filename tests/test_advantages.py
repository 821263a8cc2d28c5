"""Group baselines: their formulas. tests/test_tradeoff.py enumerates what they do to the gradient."""

import jax
import numpy as np
import pytest

from rpg_jax.objectives import advantages

rng = np.random.default_rng(0)
REWARDS = rng.normal(size=(5, 4)).astype(np.float32)


def compute(function, *arrays):
    return np.asarray(jax.jit(function)(*arrays))


def test_formulas_and_dtypes():
    r, mean = REWARDS.astype(np.float64), REWARDS.mean(1, keepdims=True, dtype=np.float64)
    others = (r.sum(1, keepdims=True) - r) / 3
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(compute(advantages.group_mean, REWARDS), r - mean, **close)
    scaled = (r - mean) / (r.std(1, ddof=1)[:, None] + 1e-6)
    np.testing.assert_allclose(compute(advantages.group_mean_std, REWARDS), scaled, **close)
    np.testing.assert_allclose(compute(advantages.leave_one_out, REWARDS), r - others, **close)
    np.testing.assert_allclose(compute(advantages.batch_mean, REWARDS), r - r.mean(), **close)
    uniform = np.array([[1, 1], [1, -1], [-1, -1], [0.5, 0.5]], np.float32)  # one of four groups tells
    expected = [[0, 0], [4, -4], [0, 0], [0, 0]]
    np.testing.assert_allclose(compute(advantages.rescaled_group_mean, uniform), expected, **close)
    assert compute(advantages.group_mean, np.ones((2, 2), int)).dtype == np.float32
    assert compute(advantages.leave_one_out, np.ones((2, 2), jax.numpy.bfloat16)).dtype == np.float32
    with jax.enable_x64():
        assert compute(advantages.group_mean_std, np.ones((2, 2))).dtype == np.float64


def test_whitening_is_over_valid_tokens_with_bessels_variance():
    mask = np.arange(6) < np.array([[6], [1], [4]])
    values = rng.normal(size=mask.shape) * 5 + 100
    with jax.enable_x64():
        found = compute(advantages.whiten, np.where(mask, values, np.nan), mask)
    valid = values[mask]
    np.testing.assert_allclose(found[mask], (valid - valid.mean()) / valid.std(ddof=1), rtol=1e-9)
    assert not found[~mask].any()
    for constant in (0.1, -1.0, 1e6 / 3):  # rounding must not be blown up by the division
        assert not np.any(compute(advantages.whiten, np.full((64, 50), constant, np.float32), np.ones((64, 50))))
    for few in (0, 1):
        assert not np.any(compute(advantages.whiten, values, np.arange(18).reshape(3, 6) < few))


GROUPED = [advantages.group_mean, advantages.group_mean_std, advantages.leave_one_out, advantages.rescaled_group_mean]


@pytest.mark.parametrize("function", GROUPED)
def test_equal_rewards_get_exactly_zero_and_a_group_of_one_has_no_baseline(function):
    assert not np.any(compute(function, np.full((3, 16), 0.1, np.float32)))
    assert not np.any(compute(function, np.full((3, 7), 1e6 / 3, np.float32)))
    for shape in ((4, 1), (4,), (2, 2, 2)):
        with pytest.raises(ValueError, match=r"\[P, G\]"):
            jax.eval_shape(function, np.ones(shape))
