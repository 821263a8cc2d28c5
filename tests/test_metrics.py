"""Metrics: values by hand in numpy, and merging the parts of a batch gives the whole's; those of an evaluation."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.objectives import make, metrics
from rpg_jax.training.evaluation import bootstrap_interval, majority_at_k

RPG = make("rpg", clip="rpg", beta=0.3, clip_low=0.1, clip_high=0.2, clip_c=1.5)
KEYS = {"clip_fraction", "clip_fraction_high", "clip_fraction_low", "clip_fraction_ceiling", "ratio_mean", "ratio_max"}
KEYS |= {"effective_sample_size", "kl_reference_weighted", "off_policy_gap"}
KEYS |= {f"kl_{to}_k{i}" for to in ("behavior", "reference") for i in (1, 2, 3)}


def sample(rows=8, seed=0):
    rng = np.random.default_rng(seed)
    logp = -rng.exponential(size=(rows, 5))
    mu, ref = logp + 0.5 * rng.normal(size=(2, rows, 5))
    mask = rng.random((rows, 5)) < 0.6
    mask[0] = False
    return logp, mu, rng.normal(size=(rows, 5)), mask, ref


compiled = jax.jit(lambda objective, *arrays: objective(*arrays)[1], static_argnums=0)


def measure(objective, *arrays):
    with jax.enable_x64():
        return compiled(objective, *arrays)


def numbers(tree):
    with jax.enable_x64():
        return {key: float(value) for key, value in metrics.values(tree).items()}


def test_values_at_token_level():
    logp, mu, advantage, mask, ref = sample()
    got = numbers(measure(RPG, logp, mu, advantage, mask, ref))
    assert set(got) == KEYS
    lw, ly, lb = (x[mask] for x in (logp - mu, ref - logp, mu - logp))
    w, shaped = np.exp(lw), advantage[mask] - 0.3 * -ly
    high, low, ceiling = (shaped >= 0) & (w >= 1.2), (shaped < 0) & (w <= 0.9), (shaped < 0) & (w >= 1.5)
    assert high.any() and low.any() and ceiling.any()
    expected = {
        "clip_fraction": (high | low | ceiling).mean(), "clip_fraction_high": high.mean(), "ratio_max": w.max(),
        "clip_fraction_low": low.mean(), "clip_fraction_ceiling": ceiling.mean(), "ratio_mean": w.mean(),
        "off_policy_gap": np.abs(lb).mean(), "effective_sample_size": w.sum() ** 2 / (w**2).sum() / len(w),
        "kl_reference_weighted": (w * (np.exp(ly) - 1 - ly)).mean(),
    }  # fmt: skip
    for to, x in (("behavior", lb), ("reference", ly)):
        for i, k in ((1, -x), (2, x**2 / 2), (3, np.exp(x) - 1 - x)):
            expected[f"kl_{to}_k{i}"] = k.mean()
    for key, value in expected.items():
        np.testing.assert_allclose(got[key], value, rtol=1e-11, err_msg=key)


def test_values_at_sequence_level_count_rows():
    logp, mu, advantage, mask, ref = sample()
    got = numbers(measure(make("rpg", level="sequence", clip="truncate"), logp, mu, advantage, mask, ref))
    rows = mask.any(1)
    w = np.exp(np.where(mask, logp - mu, 0).sum(1))[rows]
    np.testing.assert_allclose(got["clip_fraction_high"], (w > 1.28).mean(), rtol=1e-12)
    np.testing.assert_allclose(got["clip_fraction_low"], (w < 0.8).mean(), rtol=1e-12)
    np.testing.assert_allclose(got["ratio_mean"], w.mean(), rtol=1e-12)
    np.testing.assert_allclose(got["kl_behavior_k1"], (logp - mu)[mask].mean(), rtol=1e-12)  # tokens, at any level


def test_no_clip_no_fraction_and_ppo_clips_by_the_sign_of_the_advantage():
    logp, mu, advantage, mask, ref = sample()
    w, a = np.exp(logp - mu)[mask], advantage[mask]
    given = {"cispo": dict(clip_high=0.28)}
    by_sign = (((a > 0) & (w > 1.2)).mean(), ((a < 0) & (w < 0.8)).mean())
    fractions = {"rpg": (0, 0), "gpg": (0, 0), "rloo": (0, 0), "grpo": by_sign, "reinforce_pp": by_sign}
    for name, expected in (fractions | {"cispo": ((w > 1.28).mean(), 0)}).items():
        got = numbers(measure(make(name, **given.get(name, {})), logp, mu, advantage, mask, ref))
        found = [got[f"clip_fraction{which}"] for which in ("_high", "_low", "", "_ceiling")]
        np.testing.assert_allclose(found, [*expected, sum(expected), 0], rtol=1e-12, err_msg=name)


@settings(max_examples=10)
@given(st.sampled_from([1, 4]), st.integers(0, 100))
def test_parts_merge_to_the_whole(cut, seed):
    arrays = sample(seed=seed)
    a, b = (measure(RPG, *(x[part] for x in arrays)) for part in (slice(cut), slice(cut, None)))
    whole = numbers(measure(RPG, *arrays))
    with jax.enable_x64():
        merged = metrics.merge(metrics.merge(a, metrics.empty(a)), b)
    for key, value in numbers(merged).items():
        np.testing.assert_allclose(value, whole[key], rtol=1e-11, atol=1e-14, err_msg=key)


def test_effective_sample_size_of_ratios_that_overflow():
    log_ratio = np.array([900.0, 900.0, -900.0, 100.0, np.nan], np.float32)
    mask = np.array([True, True, True, True, False])
    measured = jax.jit(metrics.effective_sample_size)
    whole = measured(log_ratio, mask)
    assert float(whole.value()) == 0.5
    a, b = (measured(log_ratio[i], mask[i]) for i in (slice(0, 1), slice(1, 5)))
    assert float(a.merge(b).value()) == float(b.merge(a).value()) == 0.5
    assert float(measured(np.full(5, -500, np.float32), np.ones(5, bool)).value()) == 1
    rounded = metrics.EffectiveSampleSize(*np.array([0, 3, 2.999999, 3], np.float32))
    assert float(rounded.value()) == 1 < rounded.first**2 / (rounded.count * rounded.second)


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
