"""The optimizer update: microbatches, the global denominator, skipped updates, schedule-free's two points."""

import dataclasses
import re
import types
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rpg_jax import objectives, parallel
from rpg_jax.models import Model, ModelConfig
from rpg_jax.models.attention import causal_attention
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.training.experience import merge_rows, take_rows
from rpg_jax.training.optimizer import check_offload, layout, make_optimizer
from rpg_jax.training.packing import Plan
from rpg_jax.training.policies import make_policies
from rpg_jax.training.skipped import split_finiteness
from rpg_jax.training.update import check_finite, init_params, init_state, make_update
from rpg_jax.types import TrainBatch

CONFIG = ModelConfig(24, 16, 32, 2, 2, 1, 8, qk_norm=True)
MODEL = Model(CONFIG)
ROWS, LENGTH = 8, 12


@pytest.fixture(scope="module")
def mesh():
    return parallel.make_mesh()


@cache
def drawn():
    return jax.device_get(init_params(MODEL, parallel.make_mesh(), 0))


def initial():
    """The same random parameters in each test, in arrays that may be donated."""
    return jax.device_put(drawn(), may_alias=False)


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    start, stop = rng.integers(1, 4, ROWS), rng.integers(4, LENGTH + 1, ROWS)
    column = np.arange(LENGTH)
    mask = (column >= start[:, None]) & (column < stop[:, None])
    logp = lambda: rng.normal(-3, 0.3, (ROWS, LENGTH)).astype(np.float32)  # noqa: E731
    return TrainBatch(
        tokens=rng.integers(0, 24, (ROWS, LENGTH)).astype(np.int32), length=stop.astype(np.int32), loss_mask=mask,
        behavior_logp=logp(), reference_logp=logp(), advantage=rng.normal(size=(ROWS, 1)).astype(np.float32),
        weight=rng.uniform(0.5, 1, (ROWS, LENGTH)).astype(np.float32),
    )  # fmt: skip


objective_of = cache(objectives.make)
CONSTANT = dict(clip="none", estimator="reinforce", reduction="constant")
ANY = objective_of("rpg", divergence="urkl", estimator="reinforce", clip="none", beta=0.0)  # where it does not matter


@cache
def compiled(objective, *, model=MODEL, rows=4, name="adamw", clip_norm=1.0, denominator=None, offload=False):
    """A first state on the host, where its leaves belong, and the update: once for all tests with these settings."""
    mesh = parallel.make_mesh()
    optimizer = make_optimizer(name, learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, offload=offload)
    state = init_state(optimizer, mesh, initial())
    update = make_update(
        model, objective, optimizer, mesh, state, rows=rows, temperature=0.8, clip_norm=clip_norm, logprob_chunk=5,
        denominator=denominator,
    )  # fmt: skip
    return jax.device_get(state), layout(optimizer, mesh, state), update


def updated(objective, *, count=None, batch=None, times=1, rows=4, name="adamw", **settings):
    state, place, update = compiled(objective, rows=rows, name=name, **settings)
    state = jax.device_put(state, place, may_alias=False)  # updates donate it
    for _ in range(times):
        state, metrics = update(state, batch or make_batch(), Plan(np.int32(count or ROWS // rows), None), {})
    return state, metrics, update


@partial(jax.jit, static_argnums=0)
def plain_update(objective, params, batch, denominator, clip_norm):
    """The whole minibatch at once from full logits: no chunks, no microbatches. (loss, norm, new parameters)."""

    def loss(params):
        logits = MODEL.logits(params, MODEL.hidden(params, batch.tokens)) / 0.8
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], batch.tokens[:, 1:, None], -1)
        logp = jnp.pad(logp[..., 0], ((0, 0), (1, 0)))
        value, _ = objective(
            logp, batch.behavior_logp, batch.advantage, batch.loss_mask,
            reference_logp=batch.reference_logp, weight=batch.weight, denominator=denominator,
        )  # fmt: skip
        return value

    value, grads = jax.value_and_grad(loss)(params)
    norm = optax.tree.norm(grads)
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip_norm / norm), grads)
    optimizer = make_optimizer("adamw", learning_rate=1e-2, warmup_steps=2, weight_decay=0.1).transformation
    steps, _ = optimizer.update(clipped, optimizer.init(params), params)
    return value, norm, optax.apply_updates(params, steps)


def assert_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.parametrize("settings", [
    dict(clip="rpg", estimator="reinforce"), CONSTANT,
    dict(clip="none", estimator="differentiable", reduction="sequence_mean", level="sequence"),
])  # fmt: skip
def test_update_in_microbatches_equals_the_plain_gradient(settings):
    objective = objective_of("rpg", divergence="urkl", beta=0.1, **settings)
    denominator = 50.0 if settings.get("reduction") == "constant" else None
    loss, norm, expected = plain_update(objective, drawn(), make_batch(), denominator, 0.05)
    state, metrics, _ = updated(objective, rows=2, clip_norm=0.05, denominator=denominator)
    np.testing.assert_allclose(metrics["loss"].value(), loss, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["grad_norm"].value(), norm, rtol=2e-5)
    # Adam's first step divides a gradient by its own size: tiny gradients carry their rounding into it.
    assert_close(state.params, expected, atol=3e-4)
    average, weighted = float(state.kl_average), float(metrics["kl_reference_weighted"].value())
    assert average == pytest.approx(0.1 * weighted, rel=1e-5) and weighted > 0


def test_count_is_traced_and_leaves_the_rest_out():
    objective = objective_of("rpg", divergence="urkl", beta=0.1, **CONSTANT)
    batch, settings = make_batch(), dict(rows=2, clip_norm=0.05, denominator=50.0)
    half = dataclasses.replace(batch, loss_mask=np.where(np.arange(ROWS)[:, None] < 4, batch.loss_mask, False))
    state, metrics, update = updated(objective, count=2, **settings)
    expected, same, _ = updated(objective, batch=half, **settings)
    assert_close((state.params, metrics["grad_norm"]), (expected.params, same["grad_norm"]), rtol=1e-6)
    for count in (1, 2, 3, 4):
        state, _ = update(state, batch, Plan(np.int32(count), None), {})
    # Two: the first call's state came from another program and carries no donated layout.
    assert update._cache_size() <= 2


def test_a_loss_is_traced_once_for_shapes_and_its_loop_and_so_is_a_layer_for_all():
    traced = []
    attention = lambda *given, **named: traced.append(1) or causal_attention(*given, **named)  # noqa: E731
    state, _, update = compiled(ANY, model=dataclasses.replace(MODEL, scan=False, attention=attention))
    jax.eval_shape(update, state, make_batch(), Plan(np.int32(2), None), {})
    assert len(traced) == 1


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_a_non_finite_update_changes_nothing_and_is_counted(name):
    good, count = make_batch(), Plan(np.int32(2), None)
    bad = dataclasses.replace(good, advantage=np.full((ROWS, 1), np.inf, np.float32))
    state, _, update = updated(ANY, name=name)
    before = jax.tree.map(np.array, state)
    state, metrics = update(state, bad, count, {})
    state, _ = update(state, bad, count, {})
    logged, reason = split_finiteness(metrics)
    assert not np.isfinite(metrics["loss"].value())
    assert re.match("the loss is (NaN|-?inf): of its inputs, advantages are not", reason)
    assert {"loss", "grad_norm"} < logged.keys() < metrics.keys()
    assert state.skipped.tolist() == [2, 2]
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), (before.params, before.opt_state))
    state, metrics = update(state, good, count, {})
    assert state.skipped.tolist() == [2, 0] and int(state.step) == 2 and split_finiteness(metrics)[1] is None
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan if x.dtype == np.float32 else x), state.opt_state)
    broken = jax.device_put(broken, jax.tree.map(lambda x: x.sharding, state.opt_state))
    state, metrics = update(dataclasses.replace(state, opt_state=broken), good, count, {})
    assert np.isfinite(metrics["loss"].value()) and np.isfinite(metrics["grad_norm"].value())
    assert state.skipped.tolist() == [3, 1], "a step that is not a number is not taken"
    assert split_finiteness(metrics)[1].startswith("the optimizer's step is not finite")
    check_finite(state.params, "step 2", "")


def test_parameters_that_are_not_finite_are_named():
    good, bad = {"a": np.ones(3), "b": np.ones(2)}, {"a": np.ones(3), "b": np.array([1.0, np.inf])}
    check_finite(good, "here", "")
    with pytest.raises(ValueError, match=r"parameters are NaN or infinite \(1 of 2 leaves, the first is b\); mend"):
        check_finite(bad, "here", "mend")


def test_schedule_free_samples_at_x_and_trains_at_y_and_ema_follows_x(mesh):
    optimizer = make_optimizer("schedule_free_adamw", learning_rate=1e-2, warmup_steps=2, weight_decay=0.1)
    state = init_state(optimizer, mesh, initial())
    policies = make_policies(MODEL, optimizer, mesh, state, decay=0.75)
    reference = policies.reference(policies.current(state))
    update = make_update(
        MODEL, objectives.make("rpg", kl="full", divergence="rkl", beta=0.1), optimizer, mesh, state, rows=4,
        temperature=0.8, clip_norm=1.0, logprob_chunk=5,
    )  # fmt: skip
    expected = jax.tree.map(np.array, reference.params)
    for _ in range(3):
        state, metrics = update(state, make_batch(), Plan(np.int32(2), None), {"reference": reference})
        reference = policies.moved(reference, state)
        y, z = jax.device_get((state.params, state.opt_state.z))
        x = jax.tree.map(lambda y, z: (y - 0.1 * z) / 0.9, y, z)  # y = 0.9 x + 0.1 z
        expected = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, expected, x)
    assert 0 < metrics["kl_reference_full"].value() < 1  # the first update's would be 0, the reference its own policy
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), reference.params, expected)
    unmoved = jax.tree.map(np.array, reference.params)  # by an update that was skipped
    jax.tree.map(np.testing.assert_array_equal, policies.moved(reference, state).params, unmoved)
    sampled = policies.sampling_params(policies.current(state), {})
    np.testing.assert_allclose(sampled["embed"]["embedding"], x["embed"]["embedding"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sampled["layers"][1]["q"]["kernel"], x["layers"]["q"]["kernel"][1], rtol=1e-5, atol=1e-6)
    assert np.abs(x["embed"]["embedding"] - state.params["embed"]["embedding"]).max() > 1e-4


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_an_offloaded_optimizer_takes_the_same_steps(mesh, tmp_path):
    """Its state is in the hosts' memory before and after, the policy and a checkpoint are made from there."""
    name = "schedule_free_adamw"  # which draws from its state
    run = lambda **more: updated(ANY, name=name, times=2, **more)  # noqa: E731
    (plain, metrics, _), (state, same, update) = run(), run(offload=True)
    assert kinds(state.opt_state) == {"pinned_host"} and "pinned_host" not in kinds((state.params, plain))
    assert_close((plain, metrics), (state, same), rtol=1e-6)
    assert update._cache_size() <= 2
    optimizer, on_device = (make_optimizer(name, learning_rate=1e-2, offload=offload) for offload in (True, False))
    there, here = (make_policies(MODEL, x, mesh, state) for x in (optimizer, on_device))
    sampled, expected = (x.sampling_params(x.current(s), {}) for x, s in ((there, state), (here, plain)))
    assert_close(sampled, expected, rtol=1e-6)
    shaped = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    shapes = jax.tree.map(shaped, state, layout(optimizer, mesh, state))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(shapes) is None
        checkpoints.save(2, state, {})
        saved = jax.tree.map(np.array, state)
        state, _ = update(state, make_batch(), Plan(np.int32(2), None), {})  # donates what is being saved
        _, restored, _ = checkpoints.restore(shapes)
    assert kinds(restored.opt_state) == {"pinned_host"}
    jax.tree.map(np.testing.assert_array_equal, saved, restored)


def test_a_state_that_cannot_be_offloaded_is_refused():
    memories = [types.SimpleNamespace(kind="device")]
    device = types.SimpleNamespace(addressable_memories=lambda: memories, device_kind="Abacus")
    mesh = types.SimpleNamespace(devices=np.array([device]))
    check_offload(make_optimizer("adamw", learning_rate=1.0), mesh)
    with pytest.raises(ValueError, match="Abacus devices know device only; set optimizer.offload=False"):
        check_offload(make_optimizer("adamw", learning_rate=1.0, offload=True), mesh)


def test_merging_rows():
    kept, fresh = {"a": np.arange(4), "b": np.zeros((4, 2))}, {"a": np.arange(10, 16), "b": np.ones((6, 2))}
    kept, fresh = jax.device_put((kept, fresh), may_alias=False)
    merged = jax.device_get(merge_rows(kept, fresh, np.array([-1, 5, -1, 0])))
    assert merged["a"].tolist() == [0, 15, 2, 10]
    assert merged["b"][:, 0].tolist() == [0, 1, 0, 1]
    assert take_rows(fresh, np.array([3, 3]))["a"].tolist() == [13, 13]
