"""Attention by setting: every kernel against the definition, which of them is chosen where, and what is refused."""

import types
from functools import partial
from importlib.util import find_spec

import emulated_cudnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import child

from rpg_jax import parallel
from rpg_jax.models import attention_kernels, cudnn
from rpg_jax.models.attention import PLAIN, AttentionKind, causal_attention
from rpg_jax.models.attention_kernels import cudnn_or_blockwise, make_attention, splash

HEADS = parallel.sharding.ACTIVATIONS["heads"]
ENDS = [40, 41, 100]  # where one segment of a row ends and the next begins


def naive(query, key, value, segment_ids, kind=PLAIN):
    """The definition, in float64: softmax over tokens of the same segment that are not later, nor before the window."""
    length, group = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, group, axis=2) for x in (key, value))
    visible = np.tril(np.ones((length, length), bool)) & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    visible &= np.subtract.outer(np.arange(length), np.arange(length)) < (kind.window or length)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * kind.scale_of(query.shape[-1])
    scores = kind.soft_cap * np.tanh(scores / kind.soft_cap) if kind.soft_cap else scores
    weights = np.exp(np.where(visible, scores, -np.inf) - np.where(visible, scores, -np.inf).max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)


KERNELS = {"splash": partial(splash, interpret=True), "cudnn": cudnn.attention, "blocks": causal_attention}
# 150 tokens, which the first two kernels pad, in grouped heads; the blocks of the third have other ends.
CASES = [("splash", 150, 1, False, PLAIN), ("splash", 150, 1, True, AttentionKind(0.4, 1.5, 30))]
CASES += [("cudnn", 150, 1, False, AttentionKind(0.4, None, 5))]
CASES += [("cudnn", 150, 1, True, kind) for kind in (PLAIN, AttentionKind(0.4, None, 30))]
CASES += [("blocks", length, kv, True, AttentionKind(0.3, 2.0, 5)) for length, kv in ((79, 1), (130, 2))]
CASES += [("blocks", 1, 1, False, PLAIN), ("blocks", 80, 2, False, AttentionKind(3.0, None, 64))]
CASES += [("blocks", 200, 1, True, AttentionKind(window=1)), ("blocks", 515, 1, False, AttentionKind(soft_cap=50.0))]


@pytest.fixture(autouse=True)
def without_cudnn(monkeypatch):
    """JAX's functions without the library, which is not here: plain rows as on any device, packed ones emulated."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **k: plain(*a, **k))
    monkeypatch.setattr(cudnn.wrapper, "dot_product_attention", emulated_cudnn.dot_product_attention)


@pytest.mark.parametrize(("name", "length", "kv_heads", "segments", "kind"), CASES)
def test_a_kernel_computes_the_definition_with_its_gradient(name, length, kv_heads, segments, kind):
    """The gradient, along a random direction, by differences. In blocks, in float64."""
    rng, wide = np.random.default_rng(0), name == "blocks"
    arrays = [rng.normal(size=(1, length, heads, 16)) for heads in (4, kv_heads, kv_heads)]
    direction, weight = [rng.normal(size=x.shape) for x in arrays], rng.normal(size=(1, length, 4, 16))
    ids = np.searchsorted(ENDS, np.arange(length), side="right")[None].astype(np.int32) * segments

    @jax.jit
    def value_and_gradient(weight, *qkv):
        out, back = jax.vjp(lambda *qkv: KERNELS[name](*qkv, *[ids] * segments, kind=kind), *qkv)
        return out, back(weight)

    with jax.enable_x64(wide):
        out, gradient = value_and_gradient(*(x.astype(float if wide else np.float32) for x in (weight, *arrays)))
    np.testing.assert_allclose(out, naive(*arrays, ids, kind), rtol=1e-7, atol=1e-9 if wide else 1e-5)
    slope = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(gradient, direction, strict=True))
    ahead, behind = (
        (naive(*(x + e * d for x, d in zip(arrays, direction, strict=True)), ids, kind) * weight).sum()
        for e in (1e-5, -1e-5)
    )
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-5, rtol=1e-6 if wide else 1e-4, atol=1e-7 * wide)


def test_rows_of_as_many_segments_as_cudnn_has_places_for():
    """One and two segments, all padding, as many as there may be beside padding, and, not a number, one more."""
    most, length = cudnn.SEQUENCES, 2 * cudnn.SEQUENCES + 5
    rows = [0], [0] * 7 + [4], [-1], [*range(most), -1], [*range(most + 1), -1]
    ids = np.array([[*row, *[row[-1]] * (length - len(row))] for row in rows], np.int32)
    q, k, v = (np.random.default_rng(0).normal(size=(5, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    out = np.asarray(jax.jit(cudnn.attention)(q, k, v, ids))
    np.testing.assert_allclose(out[:4], naive(q, k, v, ids)[:4], atol=1e-5)
    assert np.isnan(out[4]).all()
    large = (jax.ShapeDtypeStruct((32, 16384, 32, 128), jnp.bfloat16),) * 3  # cuDNN's offsets would overflow
    with pytest.raises(ValueError, match="2147483648 numbers .* lower learner.microbatch_rows and learner.scoring_ro"):
        jax.eval_shape(cudnn.attention, *large, jax.ShapeDtypeStruct((32, 16384), jnp.int32))


def test_a_layer_that_caps_its_scores_is_computed_in_blocks():
    q, ids = np.random.default_rng(0).normal(size=(1, 20, 2, 8)).astype(np.float32), np.zeros((1, 20), int)
    kind = AttentionKind(soft_cap=2.0)
    np.testing.assert_allclose(cudnn_or_blockwise(q, q, q, kind=kind), naive(q, q, q, ids, kind), atol=1e-5)


def chosen(platform, name="auto", dtype=jnp.bfloat16, head_dim=128, capability="9.0", **more):
    """The kernel that `make_attention` takes on devices of a platform."""
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    function, on_mesh = [], attention_kernels.on_mesh
    attention_kernels.on_mesh = lambda kernel, mesh, spec: function.append(kernel)
    try:
        return make_attention(name, mesh, HEADS, dtype=dtype, head_dim=head_dim, **more) or function[0]
    finally:
        attention_kernels.on_mesh = on_mesh


def test_which_kernel_runs_where():
    old = partial(chosen, "gpu", capability="8.0")
    assert chosen("tpu") is chosen("tpu", "splash") is splash
    assert {chosen("gpu", pack=True), chosen("gpu", head_dim=256), old()} == {cudnn_or_blockwise}
    assert chosen("gpu", "cudnn", pack=True) is old("cudnn") is cudnn.attention
    plain = chosen("cpu"), chosen("gpu", dtype=jnp.float32), chosen("gpu", head_dim=260), chosen("tpu", "blockwise")
    plain += old(pack=True), old(head_dim=256), chosen("gpu", head_dim=256, capability="10.0")
    plain += chosen("gpu", capability="7.5"), chosen("gpu", pack=True, capability="gfx942")
    plain += (chosen("gpu", kinds=[AttentionKind(soft_cap=4.0)] * 2),)
    assert set(plain) == {causal_attention}
    mesh = parallel.make_mesh()
    setting = partial(make_attention, "auto", mesh, HEADS, dtype=jnp.float32, head_dim=8)
    assert setting() is setting()


@pytest.mark.parametrize(("platform", "name", "more", "words"), [
    ("cpu", "splash", {}, "model.attention=splash runs on TPU devices and this mesh has CPU ones.*auto"),
    ("cpu", "flash", {}, "unknown model.attention 'flash'; known: auto, blockwise, splash"),
    ("gpu", "pallas_gpu", {}, "unknown model.attention 'pallas_gpu'; known: auto, blockwise, splash, cudnn"),
    ("gpu", "cudnn", dict(pack=True, capability="8.9"), "packs rows from .* 9.0 on and this GPU's is 8.9.*pack=False"),
    ("gpu", "cudnn", dict(capability="7.5"), "at most 0 numbers on a GPU of compute capability 7.5 .none before 8.0"),
    ("gpu", "cudnn", dict(dtype=jnp.float32), "16 bits.* at most 256 .*128 in float32"),
    ("gpu", "cudnn", dict(kinds=[AttentionKind(soft_cap=4.0)]), "cudnn cannot do this model's soft_cap"),
])  # fmt: skip
def test_a_choice_that_cannot_be_is_refused(platform, name, more, words):
    with pytest.raises(ValueError, match=words):
        chosen(platform, name, **more)


FOR_TPUS = """
import os
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from rpg_jax import parallel
from rpg_jax.models.attention_kernels import make_attention
from rpg_jax.lab.planning.command import ENVIRONMENT

os.environ.update(ENVIRONMENT)
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = parallel.make_mesh(1, 2, 2, devices=devices)
spec = parallel.sharding.ACTIVATIONS["heads"]
attention = make_attention("auto", mesh, spec, dtype=jnp.bfloat16, head_dim=128)

def array(spec, dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

q, k = (array(spec, jnp.bfloat16, 4, 640, heads, 128) for heads in (8, 2))
rows = array(PartitionSpec(spec[0]), jnp.int32, 4, 640)
gradient = jax.grad(lambda *args: attention(*args).astype(jnp.float32).sum(), (0, 1, 2))
text = jax.jit(gradient).lower(q, k, k, rows).compile().as_text()
print(text.count('"tpu_custom_call"'), text.count("all-gather(") + text.count("all-reduce("))
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu")
def test_splash_compiles_for_a_mesh_of_tpus():
    """Forward and two backward kernels, each on its own rows and heads: nothing is sent."""
    assert child("-c", FOR_TPUS).split() == ["3", "0"]
