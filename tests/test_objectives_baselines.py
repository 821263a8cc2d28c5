"""Every baseline against its formula entry by entry, and its advantages and weights by hand."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequences import sequences
from stepping import make_experienced
from test_objectives import BETA, LOW, ppo_bound, run, sample

from rpg_jax import parallel
from rpg_jax.models import Model, ModelConfig
from rpg_jax.objectives import RECIPES, make
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.update import init_params, init_state

HIGH = {"dapo": 0.28, "cispo": 0.28}
REQUIRED = {"cispo": dict(clip_high=0.28)}


def settings(name):
    regularized = name in ("grpo", "grpo_corrected", "reinforce_pp_baseline")
    return REQUIRED.get(name, {}) | (dict(beta=BETA) if regularized else {})


def expected_token(name, logp, mu, ref, a):
    """(loss, dloss/dlogp) of one token, from the formulas of docs/method.md 7."""
    w, y = math.exp(logp - mu), math.exp(ref - logp)
    if name in ("reinforce", "gpg"):
        return -a * logp, -a
    if name == "cispo":
        return -min(w, 1.28) * a * logp, -min(w, 1.28) * a
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        p = 1 / (1 + math.exp(-tau * (w - 1)))
        return -4 / tau * p * a, -4 * p * (1 - p) * w * a
    bound = ppo_bound(w, a, LOW, HIGH.get(name, 0.2))
    loss, gradient = -(bound or w) * a, 0.0 if bound else -w * a
    k3 = y - 1 - math.log(y)
    if name == "grpo":
        return loss + BETA * k3, gradient + BETA * (1 - y)
    if name == "grpo_corrected":
        return loss + BETA * w * k3, gradient + BETA * (w * k3 + w * (1 - y))
    if name == "reinforce_pp_baseline":
        return loss + BETA * (logp - ref) ** 2 / 2, gradient + BETA * (logp - ref)
    return loss, gradient


def expected_row(name, logp, mu, a):
    """(loss, dloss/dlogp of each of its tokens) of one response."""
    if name == "rloo":
        w = math.exp((logp - mu).sum())
        return -w * a * logp.sum(), -w * a
    s = math.exp((logp - mu).mean())
    bound = ppo_bound(s, a, 3e-4, 4e-4)
    return -(bound or s) * a, 0.0 if bound else -s * a / len(logp)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "rpg"])
def test_baselines_are_what_their_papers_say(name):
    logp, mu, ref, advantage, mask = sample(rows=20, seed=1)
    rest = dict(denominator=33.0) if name == "dr_grpo" else {}
    loss, gradient = run(make(name, **settings(name)), logp, mu, ref, advantage, mask, **rest)
    expected, slopes = 0.0, np.zeros(mask.shape)
    for b in np.flatnonzero(mask.any(1)):
        valid, rows = mask[b], mask.any(1).sum()
        if name in ("rloo", "gspo"):
            value, slope = expected_row(name, logp[b, valid], mu[b, valid], advantage[b, valid].mean())
            scale = 1 / rows
        else:
            tokens = zip(*(x[b, valid] for x in (logp, mu, ref, advantage)), strict=True)
            value, slope = np.array([expected_token(name, *token) for token in tokens]).T
            value = value.sum()
            scale = 1 / valid.sum() / rows if name in ("grpo", "grpo_corrected", "sapo") else 1 / mask.sum()
            scale = 1 / 33 if name == "dr_grpo" else scale
        expected += value * scale
        slopes[b, valid] = slope * scale
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-11, atol=1e-15)


def test_advantages_of_each_objective_by_hand():
    mask = np.array([[1, 1], [1, 0]])
    reference = np.zeros((2, 2))
    behavior = np.array([[0.2, 0.4], [-0.6, np.nan]])  # log behavior − log reference, beta 0.5: 0.3 and −0.3 a response
    rewards = np.array([[1.0, 0.0]])

    def advantages(name, **given):
        with jax.enable_x64():
            return np.asarray(jax.jit(make(name, **given).advantages)(rewards, behavior, reference, mask))

    close = dict(rtol=1e-6)
    np.testing.assert_allclose(advantages("rloo", beta=0.5, advantage="group_mean"), [[0.2], [-0.2]], **close)
    # returns 0.7, 0.8 and 0.3: mean 0.6, variance 0.07
    expected = [[0.377964473, 0.755928946], [-1.13389342, 0]]
    np.testing.assert_allclose(advantages("reinforce_pp", beta=0.5), expected, **close)
    # 0.5, 0.5 and −0.5: mean 1/6, variance 1/3; its KL is in the loss
    expected = [[0.577350269, 0.577350269], [-1.15470054, 0]]
    np.testing.assert_allclose(advantages("reinforce_pp_baseline", beta=0.5), expected, **close)
    for name in ("grpo", "dapo", "gspo"):
        np.testing.assert_allclose(advantages(name), [[0.70710578], [-0.70710578]], rtol=1e-5)
    for name in ("rpg", "dr_grpo", "reinforce", "ppo_clip", "gpg"):
        np.testing.assert_array_equal(advantages(name), [[0.5], [-0.5]])


BEHAVIOR = np.log([[0.4, 0.5], [0.6, 1.0]])  # two responses, of 2 tokens and of 1
SAMPLED = np.log([[0.5, 0.25], [0.6, 1.0]])  # behavior / sampler 0.8, 2 and 1; 1.6 and 1 a response


def test_sampler_correction_truncates_per_token_or_per_response():
    mask = np.array([[1, 1], [1, 0]], bool)
    with jax.enable_x64():
        weight, metrics = jax.jit(make("rpg", sampler_correction=1.5).corrections)(BEHAVIOR, SAMPLED, mask)
        np.testing.assert_allclose(np.asarray(weight)[mask], [0.8, 1.5, 1], rtol=1e-12)
        assert metrics["sampler_correction_clip_fraction"].value() == pytest.approx(1 / 3)
        assert metrics["sampler_correction"].value() == pytest.approx(1.1)
        for name in ("rloo", "gspo"):
            weight, metrics = jax.jit(make(name, sampler_correction=1.5).corrections)(BEHAVIOR, SAMPLED, mask)
            np.testing.assert_allclose(np.asarray(weight)[mask], [1.5, 1.5, 1], rtol=1e-12)
            assert metrics["sampler_correction_clip_fraction"].value() == pytest.approx(2 / 3)
        weight, metrics = jax.jit(make("rpg").corrections)(BEHAVIOR, SAMPLED, mask)
        assert (np.asarray(weight) == 1).all() and not metrics
    far = np.where(mask, SAMPLED - 200, np.nan).astype("f")  # the ratio itself would overflow
    weight, _ = jax.jit(make("rpg", sampler_correction=2.0).corrections)(BEHAVIOR.astype("f"), far, mask)
    assert (np.asarray(weight)[mask] == 2).all()


@pytest.mark.parametrize("name", ["reinforce_pp", "rloo"])
def test_a_training_batch_carries_the_objectives_advantages_and_weights(name):
    """Of the model's own log-probs: a sampler that was off by log 3 on one token, a reference with other parameters."""
    rng, mesh = np.random.default_rng(0), parallel.make_mesh()
    model, optimizer = Model(ModelConfig(24, 16, 32, 2, 2, 1, 8)), make_optimizer("adamw", learning_rate=1e-3)
    state = init_state(optimizer, mesh, init_params(model, mesh, 0))
    other = jax.jit(lambda tree: jax.tree.map(lambda x: 1.5 * x, tree))(state.params)
    mask = (np.arange(7) >= 2) & (np.arange(7) < np.array([[7], [4], [5], [6]]))
    zeros, ids = np.zeros((4, 7), np.float32), np.zeros(4, np.int32)
    rollout = sequences(rng.integers(0, 24, (4, 7)), mask, finished=ids == 0)
    objective = make(name, beta=0.3, sampler_correction=2.0)
    settings = dict(rows=2, temperature=1.0, logprob_chunk=4)
    build = partial(make_experienced(model, objective, optimizer, mesh, state, **settings), reference=other)
    rewards = jnp.asarray(rng.normal(size=(2, 2)).astype(np.float32))
    behavior = build(state, rollout, rewards)[0].behavior_logp
    sampled = np.asarray(behavior) - np.where(np.arange(7) == 3, math.log(3), 0).astype(np.float32)
    batch, metrics = build(state, dataclasses.replace(rollout, sampler_logp=sampled), rewards)
    penalty = np.where(mask, 0.3 * np.subtract(batch.behavior_logp, batch.reference_logp), 0)
    assert np.abs(penalty).max() > 1e-3
    if name == "rloo":
        left = np.asarray(rewards) - penalty.sum(1).reshape(2, 2)
        np.testing.assert_allclose(np.asarray(batch.advantage).reshape(2, 2), left - left[:, ::-1], rtol=1e-4)
        expected = 2.0 * np.ones_like(zeros)
    else:
        returns = np.asarray(rewards).reshape(-1, 1) - penalty[:, ::-1].cumsum(1)[:, ::-1]
        whitened = (returns - returns[mask].mean()) / returns[mask].std(ddof=1)
        np.testing.assert_allclose(np.asarray(batch.advantage)[mask], whitened[mask], rtol=1e-3, atol=1e-5)
        expected = np.where(np.arange(7) == 3, 2.0, 1.0) * np.ones_like(zeros)
    np.testing.assert_allclose(np.asarray(batch.weight)[mask], expected[mask], rtol=1e-4)
    assert metrics["sampler_correction_clip_fraction"].value() == pytest.approx((expected[mask] == 2).mean())
