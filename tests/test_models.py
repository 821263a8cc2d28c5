"""The transformer against published parameter counts, and itself cut in other ways.

Its logits are held against numpy in float64 in test_huggingface, and those of a made-up family in test_families;
attention in test_attention.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rpg_jax.models import Model, ModelConfig, named, parameter_count, unstack_layers, with_head
from rpg_jax.models.attention import causal_attention, softmax_mix

FAMILIES = {
    "qwen3": ModelConfig(37, 16, 24, 2, 4, 2, 8, qk_norm=True),
    "llama": ModelConfig(37, 16, 24, 2, 4, 4, 4, rope_theta=5e5, norm_epsilon=1e-5, tied_embeddings=False),
}

# From the model cards and safetensors indices on Hugging Face; tied weights counted once.
PUBLISHED = {
    "m1": 853_376, "m2": 42_043_904,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512,
    "llama3-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
}  # fmt: skip


def randomized(model):
    """Parameters in which no scale is one and no bias is zero, so that a forgotten one shows."""
    rng = np.random.default_rng(0)
    random = lambda path, x: rng.normal("scale" in str(path), 0.3, x.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map_with_path(random, model.shapes)


def some_tokens(shape=(2, 9), seed=0):
    return np.random.default_rng(seed).integers(0, 37, shape).astype(np.int32)


@partial(jax.jit, static_argnums=0)
def forward(model, params, tokens, positions=None):
    """(hidden states, logits), compiled once for a model and a shape."""
    hidden = model.hidden(params, tokens, positions)
    return hidden, model.logits(params, hidden)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name):
    assert parameter_count(named(name)) == PUBLISHED[name]
    assert {x.dtype for x in jax.tree.leaves(Model(named(name)).shapes)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("family", FAMILIES)
def test_scan_unrolled_unstacked_and_cached_agree(family):
    model = Model(FAMILIES[family])
    params = randomized(model)
    tokens = some_tokens()
    scanned, _ = forward(model, params, tokens)
    unrolled, _ = forward(dataclasses.replace(model, scan=False), params, tokens)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-5, atol=1e-5)
    unstacked = unstack_layers(params)
    assert len(unstacked["layers"]) == model.config.layers
    np.testing.assert_allclose(scanned, forward(model, unstacked, tokens)[0], rtol=1e-5, atol=1e-5)
    positions, traced = np.broadcast_to(np.arange(9), (2, 9)), []

    @jax.jit
    def cached(params):
        def attend(kind, cache, q, k, v):
            traced.append(kind)
            return causal_attention(q, k, v, kind=kind), cache + 0 * k

        caches = list(jnp.arange(model.config.layers))
        hidden, kept, _ = model.cached(params, tokens, model.turns(positions), attend, caches)
        return kept, hidden, *(model.logits(tree, hidden) for tree in (params, with_head(params)))

    kept, hidden, logits, own = cached(unstacked)
    np.testing.assert_allclose(scanned, hidden, rtol=1e-5, atol=1e-5)
    assert traced == [model.kinds[0]] and "@layer" not in cached.lower(unstacked).as_text(), "both, and inlined"
    assert {cache.shape for cache in kept} == {(2, 9, model.config.kv_heads, model.config.head_dim)}
    assert [set(np.asarray(cache).flat) for cache in kept] == [{index} for index in range(model.config.layers)]
    np.testing.assert_allclose(logits, own, rtol=1e-5, atol=1e-5)


@partial(jax.jit, static_argnums=0)
def gradient(model, params, tokens):
    return jax.grad(lambda params: jnp.sum(jnp.sin(model.hidden(params, tokens))))(params)


@pytest.mark.parametrize("remat, scan", [("dots", True), ("offload", True), ("full", True), ("attention", False)])
def test_remat_changes_no_gradient_and_does_recompute(remat, scan):
    plain = Model(FAMILIES["qwen3"], scan=scan)
    saved = dataclasses.replace(plain, remat=remat)
    arguments = randomized(plain), some_tokens()
    for a, b in zip(*(jax.tree.leaves(gradient(m, *arguments)) for m in (plain, saved)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jaxprs = [str(gradient.trace(m, *arguments).jaxpr) for m in (saved, plain)]
    recomputed = "logistic" if remat == "attention" else " exp "  # what this policy does not keep
    assert jaxprs[0].count(recomputed) > jaxprs[1].count(recomputed)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Model(named("m1"), remat="some"), "remat policy 'some'.*none, dots, attention, offload, full"),
    (lambda: named("qwen"), "unknown model size 'qwen'.*qwen3-4b"),
    (lambda: ModelConfig(8, 8, 8, 1, 4, 3, 2), r"heads \(4\) must be a multiple of kv_heads \(3\)"),
    (lambda: ModelConfig(8, 8, 8, 1, 4, 2, 3), r"head_dim \(3\) must be even"),
    (lambda: ModelConfig(8, 8, 8, 0, 4, 2, 2), "layers is 0"),
])  # fmt: skip
def test_unknown_remat_size_and_shapes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_model_is_a_static_argument():
    """Equal models are equal and hash alike, so that jit does not compile again for a rebuilt one."""
    assert len({Model(named("m1")), Model(named("m1")), Model(named("m2"))}) == 2


def test_bfloat16_compute_keeps_logits_in_float32():
    wide = Model(FAMILIES["qwen3"])
    narrow = dataclasses.replace(wide, dtype=jnp.bfloat16)
    params = randomized(wide)
    tokens = some_tokens()
    hidden, logits = map(np.asarray, forward(narrow, params, tokens))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    assert (logits != logits.astype(jnp.bfloat16)).any()  # not a bfloat16 product cast afterwards
    np.testing.assert_allclose(logits, forward(wide, params, tokens)[1], atol=0.5)
    grads = jax.eval_shape(jax.grad(lambda p: jnp.sum(forward(narrow, p, tokens)[1] ** 2)), params)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


@partial(jax.jit, static_argnums=0)
def value_and_gradients(attention, cotangent, *qkv):
    out, back = jax.vjp(attention, *qkv)
    return out, back(cotangent)


def test_attention_survives_scores_that_overflow_exp():
    q = k = np.full((1, 3, 1, 4), 300, np.float32)
    v = some_tokens(q.shape).astype(np.float32)
    out, gradients = value_and_gradients(causal_attention, np.ones_like(q), q, k, v)
    np.testing.assert_allclose(out[0, :, 0], np.cumsum(v[0, :, 0], 0) / np.arange(1, 4)[:, None], rtol=1e-5)
    assert all(np.isfinite(g).all() for g in gradients)


def test_hidden_keys_get_no_gradient_and_change_none():
    """What a query may not see may hold anything finite: neither output nor gradients change."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 1, 3, 4)).astype(np.float32)
    visible = np.array([[True, False, True]] * 3)
    loud_k, loud_v = (np.where(visible[0, :, None], x, loud).astype(np.float32) for x, loud in ((k, 1e4), (v, -1e4)))
    gradients = jax.jit(jax.grad(lambda *qkv: jnp.sum(jnp.sin(softmax_mix(*qkv, visible))), (0, 1, 2)))
    quiet, loud = (jax.device_get(gradients(q, *kv)) for kv in ((k, v), (loud_k, loud_v)))
    for a, b in zip(quiet, loud, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert (quiet[1][:, :, 1] == 0).all() and (quiet[2][:, :, 1] == 0).all()


def test_initial_scales():
    """Kernels have variance 1 / fan-in, layer by layer, and embeddings 1 / hidden; no two layers are the same."""
    params = jax.device_get(jax.jit(Model(named("m1")).init)(jax.random.key(0)))
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        kernel = params["layers"][name]["kernel"]
        np.testing.assert_allclose(kernel.std((1, 2)) * kernel.shape[1] ** 0.5, 1.0, rtol=0.05)
        assert np.abs(kernel[0] - kernel[1]).max() > 0.01
    np.testing.assert_allclose(params["embed"]["embedding"].std(), 128**-0.5, rtol=0.05)
