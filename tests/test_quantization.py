"""Weights, keys and values in 8 bits: their error, and the log-probs of a sampler that draws from them."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rpg_jax import models, parallel
from rpg_jax.models import quantization
from rpg_jax.models.attention import causal_attention
from rpg_jax.sampling import Decoding, Sampling, generate, paged_attention, prompts_to_answer

CONFIG = models.ModelConfig(54, 32, 48, 1, 4, 2, 8, qk_norm=True, qkv_bias=True, max_length=512)
MODEL, UNTIED = (models.Model(dataclasses.replace(CONFIG, tied_embeddings=tied)) for tied in (True, False))
KEY = jax.random.key(0, impl="threefry2x32")
NEW, COLUMNS = 12, 9
DTYPES = sorted(quantization.LARGEST)
quantize, dequantize = (jax.jit(f, static_argnums=(1, 2)) for f in (quantization.quantize, quantization.dequantize))
quantize_params = jax.jit(models.quantize_params, static_argnums=1)
token_logprobs = jax.jit(models.token_logprobs, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def params(model):
    tree = model.init(jax.random.key(1))
    tree["embed"]["embedding"] *= 0.02 * CONFIG.hidden_size**0.5
    return models.unstack_layers(jax.tree.map(lambda leaf: 2.0 * leaf, tree))


def run(model, tree, **changes):
    mask = np.arange(COLUMNS) < np.array([[1], [5], [9]])
    tokens = np.where(mask, np.random.default_rng(0).integers(0, 53, mask.shape), 0)
    sizes = dict(samples=4, max_new=NEW)
    rows = prompts_to_answer(tokens, mask.sum(-1), np.arange(3), **sizes)
    arguments = dict(sampling=Sampling.make(stop_ids=(5,)), decoding=Decoding(**dict(slots=5, page_size=4) | changes))
    return jax.tree.map(np.asarray, generate(model, tree, rows, key=KEY, step=0, **sizes, **arguments))


@settings(max_examples=50)
@given(
    arrays.arrays(np.float32, (4, 6), elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)),
    st.sampled_from(DTYPES),
    st.sampled_from([0, 1, -1]),
)
@example(np.full((4, 6), np.finfo(np.float32).tiny), "int8", 0)
@example(np.full((4, 6), 1e-36, np.float32), "float8_e4m3fn", 1)
def test_numbers_are_the_nearest_under_a_scale_of_their_channel(x, dtype, axis):
    quantized = quantize(x, dtype, axis)
    assert quantized.values.dtype == dtype and quantized.scales.shape == (4, 6)[: axis % 2] + (4, 6)[axis % 2 + 1 :]
    largest = np.abs(x).max(axis, keepdims=True).astype(np.float64)
    error = np.abs(np.asarray(dequantize(quantized, axis, jnp.float32), np.float64) - x)
    if dtype == "int8":
        bound = largest / 127 * 0.50001
    else:  # three bits of mantissa, and steps of 2^-9 below 2^-6
        bound = np.maximum(np.abs(x) * 2.0**-4, largest / 448 * 2.0**-10) * 1.00001
    assert (error <= bound + 1e-37).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_visible(dtype):
    x = np.array([[0.0, 0.0], [1.0, np.nan], [1.0, -np.inf]], np.float32)
    back = np.asarray(dequantize(quantize(x, dtype, 1), 1, jnp.float32))
    np.testing.assert_array_equal(back[0], 0)
    assert not np.isfinite(back[1:]).all(1).any()


@pytest.mark.parametrize("dtype, tied", [("int8", True), ("float8_e4m3fn", False)])
def test_quantized_weights_draw_from_the_policy_of_the_dequantized_ones(dtype, tied):
    model = MODEL if tied else UNTIED
    tree = params(model)
    quantized = quantize_params(tree, dtype)
    plain = jax.jit(quantization.dequantized, static_argnums=1)(quantized, jnp.float32)
    assert jax.tree.structure(plain) == jax.tree.structure(tree)
    assert sum(x.dtype == dtype for x in jax.tree.leaves(quantized)) == 7 + (1 if tied else 2)
    rollout = run(model, quantized)
    tokens, mask = rollout.tokens, rollout.loss_mask
    np.testing.assert_allclose(rollout.sampler_logp, token_logprobs(model, plain, tokens, mask), rtol=0, atol=2e-5)
    difference = np.abs(rollout.sampler_logp - np.asarray(token_logprobs(model, tree, tokens, mask)))
    assert 1e-3 < difference[mask].mean() < 1, "another policy than the trainer's, and near it"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_cache_is_attention_to_rounded_keys_and_values(dtype):
    """And its pages may be others."""
    tree = params(MODEL)

    def attention(q, k, v, kind):
        k, v = (quantization.dequantize(quantization.quantize(x, dtype, -1), -1, jnp.float32) for x in (k, v))
        return causal_attention(q, k, v)

    rollout = run(MODEL, tree, cache_dtype=dtype)
    rounded = dataclasses.replace(MODEL, attention=attention)
    expected = token_logprobs(rounded, tree, rollout.tokens, rollout.loss_mask)
    np.testing.assert_allclose(rollout.sampler_logp, expected, rtol=0, atol=2e-5)
    if dtype == "int8":
        other = run(MODEL, tree, cache_dtype=dtype, page_size=8, cache_pages=6)
        jax.tree.map(np.testing.assert_array_equal, other, rollout)


def test_the_tpu_kernel_converts_float8_and_numbers_beyond_it_are_its_largest():
    config, kernel = models.ModelConfig(64, 64, 64, 1, 4, 2, 128), paged_attention.RAGGED
    k, empty = np.full((1, 2, 128), 1e4, np.float32), kernel.empty(config, "float8_e4m3fn", 2, 16)
    (pool,) = jax.jit(kernel.write)(empty, k, -k, np.array([1]), np.array([3]))
    np.testing.assert_array_equal(np.asarray(pool)[1, 3].astype(np.float32)[:, 0], [448, -448] * 2)


def test_quantized_matrices_are_split_as_their_plain_ones_are():
    tree, mesh = params(UNTIED), jax.sharding.AbstractMesh((1, 1, 2), ("data", "fsdp", "tensor"))
    plain = parallel.shardings(mesh, tree, parallel.SAMPLING)
    quantized = parallel.shardings(mesh, quantize_params(tree, "int8"), parallel.SAMPLING)

    def same(path, sharding, pair):
        if isinstance(pair, quantization.Quantized):
            assert pair.values.spec == sharding.spec
            left = list(sharding.spec) + [None] * (2 - len(sharding.spec))
            left.pop(quantization.CHANNEL_AXES[path[-1].key])
            assert tuple(pair.scales.spec) in (tuple(left), ()) and any(left) == bool(pair.scales.spec)
        else:
            assert pair.spec == sharding.spec

    jax.tree_util.tree_map_with_path(same, plain, quantized)


@pytest.mark.parametrize("platform, capability, dtype, message, names", [
    ("tpu", None, "int8", "the TPU kernel has no scale for each token, so use float8_e4m3fn", {(128, None): "ragged"}),
    ("gpu", "8.0", "float8_e4m3fn", "compute capability is 8.0, and it takes 8.9: use int8",
     {(128, None): "cudnn", (256, None): "blocks", (128, "int8"): "blocks"}),
    ("gpu", "7.5", "float8_e4m3fn", "compute capability is 7.5, and it takes 8.9", {(128, None): "blocks"}),
    ("gpu", "gfx942", "float8_e4m3fn", "compute capability is gfx942, and it takes", {(128, None): "blocks"}),
])  # fmt: skip
def test_types_that_a_kernel_does_not_take_are_refused_or_read_in_blocks(platform, capability, dtype, message, names):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    with pytest.raises(ValueError, match=message):
        paged_attention.choose(mesh, models.ModelConfig(64, 64, 64, 1, 4, 2, 128), 128, dtype)
    for (head_dim, small), name in names.items():
        config = models.ModelConfig(64, 64, 64, 1, 4, 2, head_dim)
        assert paged_attention.choose(mesh, config, 128, small).name == name
        assert platform == "tpu" or paged_attention.choose(mesh, config, 8, small, "float32").name == "blocks"
