"""On an NVIDIA GPU, and skipped elsewhere: JAX_PLATFORMS=cuda python -m pytest tests/test_gpu.py

The kernels that a GPU alone runs against the path that every device runs, the sampler against the trainer in bfloat16,
and one RL step whose rows are packed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stepping import make_experienced

from rpg_jax import objectives, parallel
from rpg_jax.models import Model, ModelConfig
from rpg_jax.models.attention import causal_attention
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.sampling import Decoding, Sampling, generate, prompts_to_answer
from rpg_jax.training import packing
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.policies import make_policies
from rpg_jax.training.update import init_params, init_state, make_update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.devices()[0].platform != "gpu", reason="needs an NVIDIA GPU and JAX_PLATFORMS=cuda"),
]
CONFIG = ModelConfig(128, 256, 512, 2, 4, 2, 64, qk_norm=True, max_length=512)
HEADS = parallel.sharding.ACTIVATIONS["heads"]
PROMPTS, SAMPLES, COLUMNS, NEW, ROWS = 8, 4, 16, 48, 8


def one_device():
    return parallel.make_mesh(1, devices=jax.devices()[:1])


def settings(mesh, name="auto", **more):
    return make_attention(name, mesh, HEADS, dtype=jnp.bfloat16, head_dim=CONFIG.head_dim, **more)


@pytest.mark.parametrize(("name", "segments"), [("cudnn", False), ("pallas_gpu", False), ("pallas_gpu", True)])
def test_kernels_compute_what_the_blockwise_path_does(name, segments):
    """In bfloat16, whose numbers have 8 bits, against float32; output and gradients, relative to the largest."""
    rng, length = np.random.default_rng(0), 300
    query, key, value = (jnp.asarray(rng.normal(size=(2, length, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2))
    weight = jnp.asarray(rng.normal(size=query.shape), jnp.float32)
    ids = np.searchsorted([40, 41, 190], np.arange(length), side="right")[None].repeat(2, 0).astype(np.int32)
    more = dict(segment_ids=jnp.asarray(ids)) if segments else {}

    def outcome(attention, *arrays):
        loss = lambda *qkv: (attention(*qkv, **more).astype(jnp.float32) * weight).sum()  # noqa: E731
        return attention(*arrays, **more), jax.grad(loss, (0, 1, 2))(*arrays)

    ours = jax.jit(partial(outcome, settings(one_device(), name)))(query, key, value)
    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(partial(outcome, causal_attention))(*wide)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert np.abs(np.asarray(a, np.float32) - b).max() < 0.02 * np.abs(b).max()


@pytest.fixture(scope="module")
def setup():
    """A model in bfloat16 and its state, and a rollout of it with responses of various lengths."""
    mesh = one_device()
    functions = dict(constrain=parallel.make_constrain(mesh), per_shard=parallel.make_per_shard(mesh))
    model = Model(CONFIG, dtype=jnp.bfloat16, attention=settings(mesh, pack=True), **functions)
    optimizer = make_optimizer("adamw", learning_rate=1e-3)
    state = init_state(optimizer, mesh, init_params(model, mesh, 0))
    rng = np.random.default_rng(0)
    mask = np.arange(COLUMNS) < rng.integers(1, COLUMNS + 1, (PROMPTS, 1))
    tokens = np.where(mask, rng.integers(8, CONFIG.vocab_size, mask.shape), 0).astype(np.int32)
    arrays = tokens, mask.sum(-1, dtype=np.int32), np.arange(PROMPTS, dtype=np.int32)
    sizes = dict(samples=SAMPLES, max_new=NEW)
    rows = prompts_to_answer(*parallel.to_global(mesh, parallel.ROWS, arrays), **sizes)
    policies = make_policies(model, optimizer, mesh, state)
    policy = policies.sampling_params(policies.current(state), {})
    key = jax.random.key(0, impl="threefry2x32")
    rollout = generate(
        model, policy, rows, key=key, step=0, sampling=Sampling.make(stop_ids=range(8)), decoding=Decoding(16), **sizes
    )  # fmt: skip
    return mesh, model, optimizer, jax.device_get(state), jax.device_get(rollout)


def rl_step(setup, columns=None):
    """(TrainBatch, metrics of both passes, parameters, microbatches) of one RL step from the fixture's rollout."""
    mesh, model, optimizer, state, rollout = setup
    objective = objectives.make("rpg", divergence="urkl", estimator="reinforce", clip="rpg", beta=0.01)
    state = jax.device_put(state, parallel.shardings(mesh, state))
    rollout = parallel.to_global(mesh, parallel.ROWS, rollout)
    reward = np.cos(np.arange(PROMPTS * SAMPLES, dtype=np.float32)).reshape(PROMPTS, SAMPLES)
    plan = packing.plan(packing.on_host(rollout.length), ROWS, columns)
    scoring = dict(rows=ROWS, temperature=1.0, logprob_chunk=32, packed_columns=columns)
    batch, before = make_experienced(model, objective, optimizer, mesh, state, **scoring)(state, rollout, reward, plan)
    batch = jax.device_get(batch)
    update = make_update(model, objective, optimizer, mesh, state, clip_norm=1.0, **scoring)
    state, during = update(state, parallel.to_global(mesh, parallel.ROWS, batch), plan, {})
    metrics = {name: float(metric.value()) for name, metric in (before | during).items()}
    return batch, metrics, jax.device_get(state.params), int(plan[0])


def test_the_sampler_and_the_trainer_agree_in_bfloat16(setup):
    """The log-probs of a response as it was drawn, and recomputed from whole rows by the training attention."""
    batch, metrics, *_ = rl_step(setup)
    rollout = setup[-1]
    lengths = rollout.loss_mask.sum(-1)
    assert lengths.min() < NEW / 2 and len(set(lengths)) > 4
    gap = np.abs(batch.behavior_logp - rollout.model_logp)[rollout.loss_mask]
    assert gap.mean() < 0.02 and gap.max() < 0.3
    assert metrics["sampler_logp_gap"] == pytest.approx(gap.mean(), rel=1e-3)


def test_an_rl_step_learns_the_same_from_packed_rows(setup):
    """To the rounding of bfloat16: other kernels read the rows."""
    plain, one, params, whole = rl_step(setup)
    packed, two, same, count = rl_step(setup, COLUMNS + NEW)
    assert count < whole and np.isfinite(list(two.values())).all()
    assert one["ratio_mean"] == pytest.approx(1.0, abs=0.01) == two["ratio_mean"]  # the policy is the one that sampled
    assert np.abs(plain.behavior_logp - packed.behavior_logp).max() < 0.3
    assert two["loss"] == pytest.approx(one["loss"], abs=0.02)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (params, setup[3].params)), strict=True)]
    apart = [np.abs(a - b).mean() for a, b in zip(*map(jax.tree.leaves, (params, same)), strict=True)]
    assert min(moved) > 0 and max(apart) < 1e-3
