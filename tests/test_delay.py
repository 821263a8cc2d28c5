"""Whose log-probs the behavior policy's are, which earlier policy a rollout is drawn from, and how old it was."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequences import sequences
from stepping import make_experienced
from test_rollout import loop_settings
from test_update import LENGTH, MODEL, ROWS, make_batch

from rpg_jax import objectives, parallel
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.policies import BEHAVIOR, make_policies, scored
from rpg_jax.training.update import init_params, init_state, of_both, policy_age, sample_sizes
from rpg_jax.types import Checkpoint

OBJECTIVE = objectives.make("rpg", beta=0.1)
SETTINGS = dict(rows=4, temperature=0.8, logprob_chunk=5)


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 4, 5, 7, 16, 64])
@pytest.mark.parametrize("prompts, minibatch_prompts, epochs", [(4, 4, 1), (6, 2, 1), (4, 2, 3)])
def test_every_rollout_is_drawn_from_the_policy_of_so_many_updates_ago(prompts, minibatch_prompts, epochs, delay):
    """Policies are their numbers here; the initial one, 0, stands in for those before it."""
    of_step = dict(prompts=prompts, minibatch_prompts=minibatch_prompts, epochs=epochs)
    settings = loop_settings(**of_step, microbatch_rows=4, delay=delay)
    past, taken = (0,) * settings.policies_kept, 0
    for step in range(40):
        assert (past[0] if past else taken) == max(0, taken - delay)
        for number, _ in enumerate(settings.minibatches(step), 1):
            taken += 1
            if settings.is_kept(number):
                past = *past[1:], taken
    assert taken == 40 * settings.updates


def recorded():
    """A rollout whose recorded log-probs are no model's."""
    rng, batch = np.random.default_rng(0), make_batch(0)
    logp = np.where(batch.loss_mask, rng.normal(-3, 0.3, (ROWS, LENGTH)), 0).astype(np.float32)
    ids = np.arange(ROWS, dtype=np.int32)
    version = np.full((ROWS, LENGTH), 3, np.int32)
    return sequences(batch.tokens, batch.loss_mask, logp, logp, ids, ids, ids > 0, version)


@pytest.fixture(scope="module")
def mesh():
    return parallel.make_mesh()


@pytest.fixture(scope="module")
def states(mesh):
    """Two states of other parameters, and those of a reference."""
    optimizer = make_optimizer("adamw", learning_rate=1e-2)
    first, second = (init_state(optimizer, mesh, init_params(MODEL, mesh, seed)) for seed in (0, 1))
    scale = jax.jit(lambda params: jax.tree.map(lambda x: 1.5 * x, params))
    return optimizer, first, dataclasses.replace(second, step=second.step + 5), scale(first.params)


def test_the_samplers_log_probs_are_taken_as_they_were_recorded(mesh, states):
    """No forward pass of the behavior policy is made: what would need one is not logged, and a reference is scored."""
    optimizer, first, second, reference = states
    make = partial(make_experienced, MODEL, OBJECTIVE, optimizer, mesh, first, **SETTINGS)
    reward = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS // 4, 4)).astype(np.float32))
    sampler, trainer = make(source="sampler"), make(source="trainer")
    batch, metrics = sampler(first, recorded(), reward)
    np.testing.assert_array_equal(batch.behavior_logp, recorded().sampler_logp)
    np.testing.assert_array_equal(batch.reference_logp, recorded().sampler_logp)
    assert (batch.weight == 1).all() and metrics.keys() == {"response_length", "finished", "surprisal"}
    drawn = recorded().model_logp[recorded().loss_mask]
    np.testing.assert_allclose(metrics["surprisal"].value(), -drawn.mean(), rtol=1e-6)
    theirs, _ = sampler(second, recorded(), reward, reference=reference)
    ours, more = trainer(second, recorded(), reward, reference=reference)
    np.testing.assert_allclose(theirs.reference_logp, ours.reference_logp, atol=1e-6)  # programs of one and of two
    assert np.abs(theirs.behavior_logp - ours.behavior_logp).max() > 0.1
    assert more.keys() == {*metrics, "entropy", "reference_entropy", "sampler_logp_gap", "sampler_logp_gap_max"}
    assert (np.asarray(ours.version) == 3).all()


def test_an_advantage_of_ones_own_sees_lengths_and_the_updates_so_far(mesh, states, tmp_path):
    """A state's step is an argument of the program: no step of a run compiles another one."""
    file = tmp_path / "mine.py"
    file.write_text("def counted(rewards, lengths, step):\n    return rewards + lengths + 100.0 * step\n")
    optimizer, first, second, _ = states
    objective = objectives.make("rpg", advantage=f"{file}:counted")
    experience = make_experienced(MODEL, objective, optimizer, mesh, first, source="sampler", **SETTINGS)
    reward = np.random.default_rng(0).normal(size=(ROWS // 4, 4)).astype(np.float32)
    for state in (first, dataclasses.replace(first, step=first.step + 1), dataclasses.replace(first, step=second.step)):
        step, lengths = int(state.step), recorded().loss_mask.sum(1)
        batch, _ = experience(state, recorded(), jnp.asarray(reward))
        np.testing.assert_allclose(batch.advantage[:, 0], reward.reshape(-1) + lengths + 100 * step, rtol=1e-6)
    assert step == 5 and experience.programs[1]._cache_size() == 1


def test_an_earlier_policy_draws_and_is_scored_as_it_was(mesh, states):
    optimizer, first, second, _ = states
    policies = make_policies(MODEL, optimizer, mesh, first)
    earlier = policies.past(policies.current(first))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(earlier.params)} == {"pinned_host"}
    drawn = policies.sampling_params(earlier, {})
    jax.tree.map(np.testing.assert_array_equal, drawn, policies.sampling_params(policies.current(first), {}))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(drawn)} != {"pinned_host"}
    experience = make_experienced(MODEL, OBJECTIVE, optimizer, mesh, first, **SETTINGS)
    reward = jnp.zeros((ROWS // 4, 4))
    expected, then = experience(first, recorded(), reward)
    batch, metrics = experience(second, recorded(), reward, behavior=earlier)
    np.testing.assert_allclose(batch.behavior_logp, expected.behavior_logp, atol=1e-6)
    np.testing.assert_allclose(metrics["entropy"].value(), then["entropy"].value(), rtol=1e-6)


def test_the_proximal_policy_stands_for_the_one_that_drew_and_weights_make_up_for_it(mesh, states):
    """With a wide cap and no clip the gradient is that of the recorded log-probs, token by token."""
    optimizer, first, second, _ = states
    policies = make_policies(MODEL, optimizer, mesh, first)
    checkpoint = Checkpoint(second, past=(policies.past(policies.current(first)),))
    assert scored(policies, checkpoint, "trainer")[BEHAVIOR] is checkpoint.past[0]
    proximal = scored(policies, checkpoint, "proximal")[BEHAVIOR]
    assert int(proximal.version) == 5 and not scored(policies, checkpoint, "sampler")
    gradients, reward = [], jnp.asarray(np.random.default_rng(0).normal(size=(ROWS // 4, 4)).astype(np.float32))
    for source, cap in (("trainer", 1e6), ("sampler", None)):
        objective = objectives.make("rpg", beta=0.0, sampler_correction=cap)
        experience = make_experienced(MODEL, objective, optimizer, mesh, first, source=source, **SETTINGS)
        batch, _ = experience(second, recorded(), reward, behavior=proximal)

        def loss(logp, batch=batch, objective=objective):
            more = dict(reference_logp=batch.reference_logp, weight=batch.weight)
            return objective(logp, batch.behavior_logp, batch.advantage, batch.loss_mask, **more)[0]

        gradients.append(jax.grad(loss)(recorded().model_logp - 0.1))
    assert np.abs(np.exp(batch.behavior_logp) - 1).max() > 0.1 and np.abs(gradients[1]).max() > 0
    np.testing.assert_allclose(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratios_to_the_proximal_policy_and_to_the_one_that_drew_have_names_of_their_own(level):
    rng, batch = np.random.default_rng(1), make_batch(0)
    logp, drawn = rng.normal(-1, 0.3, (2, *batch.loss_mask.shape))
    batch = dataclasses.replace(batch, drawn_logp=drawn)
    objective = objectives.make("rpg", beta=0.1, level=level)
    arrays = logp, batch.behavior_logp, batch.advantage, batch.loss_mask
    measured = objective(*arrays, batch.reference_logp)[1] | sample_sizes(logp, batch.behavior_logp, batch.loss_mask)
    found = {name: float(x.value()) for name, x in of_both(measured, objective, logp, batch).items()}
    assert {name for name in found if name.startswith("kl_reference_k")} == {f"kl_reference_k{n}" for n in (1, 2, 3)}
    for behavior, suffix in ((batch.drawn_logp, ""), (batch.behavior_logp, "_proximal")):
        log_w = np.where(batch.loss_mask, logp - behavior, 0)
        per = {"token": np.exp(log_w)[batch.loss_mask], "sequence": np.exp(log_w.sum(1))[batch.loss_mask.any(1)]}
        sizes = {f"_{name}": w for name, w in per.items()} | {"": per[level]}
        for name, w in sizes.items():
            expected = w.sum() ** 2 / len(w) / (w**2).sum()
            assert found[f"effective_sample_size{name}{suffix}"] == pytest.approx(expected, rel=1e-4)
        assert found[f"ratio_max{suffix}"] == pytest.approx(per[level].max(), rel=1e-4)
        assert found[f"off_policy_gap{suffix}"] == pytest.approx(np.abs(log_w[batch.loss_mask]).mean(), rel=1e-4)


def test_the_age_is_that_of_trained_tokens():
    """Versions of rows, of tokens, and none."""
    rng, batch, age = np.random.default_rng(0), make_batch(0), jax.jit(policy_age)
    by_token = rng.integers(0, 20, (ROWS, LENGTH)).astype(np.int32)
    for version in (by_token[:, :1], by_token):
        metrics = age(np.int32(20), dataclasses.replace(batch, version=version))
        ages = 20 - np.broadcast_to(version, batch.loss_mask.shape)[batch.loss_mask]
        assert metrics["policy_age"].value() == pytest.approx(ages.mean(), rel=1e-6)
        assert metrics["policy_age_max"].value() == ages.max()
    assert not age(np.int32(20), batch)
