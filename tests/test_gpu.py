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
from rpg_jax.models import Model, ModelConfig, cudnn
from rpg_jax.models.attention import PLAIN, AttentionKind, causal_attention
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.sampling import Decoding, Sampling, generate, paged_attention, prompts_to_answer
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


def settings(mesh, name="auto", head_dim=CONFIG.head_dim, **more):
    return make_attention(name, mesh, HEADS, dtype=jnp.bfloat16, head_dim=head_dim, **more)


@pytest.mark.parametrize("kind", [PLAIN, AttentionKind(0.2, None, 50)], ids=["all", "window"])
@pytest.mark.parametrize("segments", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_kernels_compute_what_the_blockwise_path_does(dim, segments, kind):
    """In bfloat16, whose numbers have 8 bits, against float32; output and gradients, relative to the largest. Of packed
    rows one has as many segments as it may, and padding, and one a single segment."""
    rng, length = np.random.default_rng(0), 300
    query, key, value = (jnp.asarray(rng.normal(size=(3, length, heads, dim)), jnp.bfloat16) for heads in (4, 2, 2))
    weight = jnp.asarray(rng.normal(size=query.shape), jnp.float32)
    ends = [40, 41, 190], [3, 4, 20, 90, 120, 219, 280, 299], []
    ids = np.array([np.searchsorted(row, np.arange(length), side="right") for row in ends], np.int32)
    ids[0, 190:], ids[1, 299:] = -1, -1
    more = dict(segment_ids=jnp.asarray(ids)) if segments else {}

    def outcome(attention, *arrays):
        attend = partial(attention, **more, kind=kind)
        loss = lambda *qkv: (attend(*qkv).astype(jnp.float32) * weight).sum()  # noqa: E731
        return attend(*arrays), jax.grad(loss, (0, 1, 2))(*arrays)

    ours = jax.jit(partial(outcome, settings(one_device(), "cudnn", dim)))(query, key, value)
    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(partial(outcome, causal_attention))(*wide)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert np.abs(np.asarray(a, np.float32) - b).max() < 0.02 * np.abs(b).max()


@pytest.mark.parametrize("kind", [PLAIN, AttentionKind(0.2, None, 50)], ids=["all", "window"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_single_queries_read_the_pages_of_their_rows(dim, kind):
    """In bfloat16 against every device's path in float32, from pages in any order, fewer than tables name."""
    rng, config = np.random.default_rng(0), ModelConfig(64, 64, 64, 1, 4, 2, dim)
    kernel = paged_attention.choose(one_device(), config, 32)
    rows, pages, first = 5, 19, np.array([0, 31, 32, 255, -1], np.int32)
    k, v = (jnp.asarray(rng.normal(size=(pages * 32, 2, dim)), jnp.bfloat16) for _ in "kv")
    page, offset = np.divmod(np.arange(pages * 32), 32)
    table = rng.integers(0, pages, (rows, 8)).astype(np.int32)
    q = jnp.asarray(rng.normal(size=(rows, 1, 4, dim)), jnp.bfloat16)

    @partial(jax.jit, static_argnums=0)
    def outcome(kernel, q, k, v):
        pool = kernel.write(kernel.empty(config, k.dtype, pages, 32), k, v, page, offset)
        return kernel.attend(q, pool, table, first, 32, kind)

    ours = np.asarray(outcome(kernel, q, k, v), np.float32)
    with jax.default_matmul_precision("highest"):
        exact = np.asarray(outcome(paged_attention.BLOCKS, *(x.astype(jnp.float32) for x in (q, k, v))))
    assert kernel is paged_attention.CUDNN and np.isfinite(ours).all()
    assert np.abs(ours - exact)[:4].max() < 0.02 * np.abs(exact[:4]).max()


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
    plan = packing.plan(packing.on_host(rollout.length), ROWS, columns, cudnn.SEQUENCES)
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
