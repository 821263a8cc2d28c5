"""Chunked log-probs of given tokens: against naive log-softmax, and that no [B, T, V] array is ever held."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpg_jax.models import (
    Model,
    ModelConfig,
    token_logprobs,
    token_logprobs_and_divergence,
    token_logprobs_and_entropy,
)
from rpg_jax.objectives import DIVERGENCES
from rpg_jax.objectives.divergences import full_vocabulary

MODEL = Model(ModelConfig(53, 8, 16, 1, 2, 1, 4, qk_norm=True))
PARAMS = jax.tree.map(lambda x: 3 * x, jax.jit(MODEL.init)(jax.random.key(0)))


def naive(model, params, tokens, mask, temperature=1.0):
    """log_softmax over all columns but the last, whose prediction nobody asks for; entropy beside it."""
    logits = model.logits(params, model.hidden(params, tokens))[:, :-1] / temperature
    logp = jax.nn.log_softmax(logits, -1)
    picked = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    first = jnp.zeros((tokens.shape[0], 1))
    picked, entropy = (jnp.concatenate([first, x], 1) for x in (picked, entropy))
    mask = mask.at[:, 0].set(False)
    return jnp.where(mask, picked, 0.0), jnp.where(mask, entropy, 0.0)


@settings(max_examples=8, deadline=None)
@given(
    length=st.sampled_from([1, 2, 7, 12]),
    chunk=st.sampled_from([1, 3, 4, 100]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    density=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    seed=st.integers(0, 1000),
)
def test_equals_naive_in_value_and_gradient(length, chunk, temperature, density, seed):
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(0, 53, (3, length)), jnp.int32)
    mask = jnp.asarray(rng.random((3, length)) < density)
    cotangents = tuple(jnp.asarray(rng.normal(size=(3, length)), jnp.float32) for _ in range(2))

    def chunked(params):
        return token_logprobs_and_entropy(MODEL, params, tokens, mask, temperature=temperature, chunk=chunk)

    @partial(jax.jit, static_argnums=0)
    def value_and_gradient(function, cotangents):
        values, back = jax.vjp(function, PARAMS)
        return values, back(cotangents)

    ours, gradient = value_and_gradient(chunked, cotangents)
    plain, plain_gradient = value_and_gradient(lambda p: naive(MODEL, p, tokens, mask, temperature), cotangents)
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == jnp.float32 and a.shape == (3, length)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(plain_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
    alone = jax.jit(partial(token_logprobs, MODEL, temperature=temperature, chunk=chunk))(PARAMS, tokens, mask)
    forward, _ = jax.jit(chunked)(PARAMS)  # the program of a gradient rounds logits of 100 in another way
    np.testing.assert_allclose(alone, forward, rtol=1e-5, atol=1e-5)


def test_column_t_describes_token_t():
    """The value at column t moves with token t, never with a later one, and column 0 is zero."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 53, (1, 10)), jnp.int32)
    mask = jnp.ones((1, 10), bool)
    before = token_logprobs(MODEL, PARAMS, tokens, mask, chunk=4)
    after = token_logprobs(MODEL, PARAMS, tokens.at[0, 6].set((tokens[0, 6] + 1) % 53), mask, chunk=4)
    assert before[0, 0] == 0 and (before[0, 1:] < 0).all()
    np.testing.assert_array_equal(before[0, :6], after[0, :6])
    assert (before[0, 6:] != after[0, 6:]).all()


def test_chunks_without_response_tokens_are_skipped_under_jit_and_grad():
    """A NaN in the vocabulary projection reaches only chunks that are computed: none when the mask is empty."""
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, tied_embeddings=False))
    params = model.init(jax.random.key(0))
    params["head"]["kernel"] = jnp.full_like(params["head"]["kernel"], jnp.nan)
    tokens = jnp.zeros((2, 12), jnp.int32)

    @jax.jit
    def gradient(mask):
        return jax.grad(lambda p: token_logprobs(model, p, tokens, mask, chunk=4).sum())(params)

    nothing = gradient(jnp.zeros((2, 12), bool))
    assert all((x == 0).all() for x in jax.tree.leaves(nothing))
    something = gradient(jnp.zeros((2, 12), bool).at[1, 9].set(True))
    assert jnp.isnan(something["layers"]["q"]["kernel"]).any()
    hlo = gradient.lower(jnp.zeros((2, 12), bool)).compile().as_text()
    assert "conditional(" in hlo  # a select would compute both branches


def test_prompts_and_padding_do_not_change_response_values():
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 53, (2, 12)), jnp.int32)
    mask = jnp.zeros((2, 12), bool).at[:, 5:9].set(True)
    padded = tokens.at[:, 9:].set(7)
    whole, cut = (token_logprobs(MODEL, PARAMS, t, mask, chunk=5) for t in (tokens, padded))
    np.testing.assert_array_equal(whole, cut)
    assert (whole[:, :5] == 0).all() and (whole[:, 9:] == 0).all() and (whole[:, 5:9] < 0).all()


def test_temperature_may_be_traced_and_extreme_logits_stay_finite():
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 53, (2, 6)), jnp.int32)
    mask = jnp.ones((2, 6), bool)
    traced = jax.jit(lambda t: token_logprobs(MODEL, PARAMS, tokens, mask, temperature=t))
    np.testing.assert_allclose(traced(0.7), token_logprobs(MODEL, PARAMS, tokens, mask, temperature=0.7), rtol=1e-5)
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda p: sum(x.sum() for x in token_logprobs_and_entropy(MODEL, p, tokens, mask, temperature=1e-4))
        )
    )(PARAMS)
    assert jnp.isfinite(value) and all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))


def test_bfloat16_compute_gives_float32_logprobs():
    narrow = dataclasses.replace(MODEL, dtype=jnp.bfloat16)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 53, (2, 9)), jnp.int32)
    mask = jnp.ones((2, 9), bool)
    logp, entropy = token_logprobs_and_entropy(narrow, PARAMS, tokens, mask)
    assert logp.dtype == entropy.dtype == jnp.float32
    assert (logp != logp.astype(jnp.bfloat16)).any()
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    assert token_logprobs(narrow, params, tokens, mask).dtype == jnp.float32


def test_memory_at_a_real_vocabulary():
    """Temporaries of the gradient at V = 151,936 and T = 8,192: at most 5 % of the naive form's; nothing is run."""
    model = Model(ModelConfig(151936, 16, 16, 1, 1, 1, 16))
    params = jax.eval_shape(model.init, jax.random.key(0))
    # Hidden states are the tokens' embeddings, so that the vocabulary is all there is to measure.
    model = dataclasses.replace(model, attention=lambda q, k, v: v)
    tokens = jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 8192), bool)

    def temporaries(logprobs):
        gradient = jax.jit(jax.grad(lambda p, t, m: logprobs(model, p, t, m).sum()))
        return gradient.lower(params, tokens, mask).compile().memory_analysis().temp_size_in_bytes

    ours, theirs = temporaries(token_logprobs), temporaries(lambda *args: naive(*args)[0])
    assert theirs > 8192 * 151936 * 4
    assert ours <= 0.05 * theirs, f"{ours / 2**20:,.0f} MiB against {theirs / 2**20:,.0f} MiB"


@pytest.mark.parametrize("shape", [(1, 1), (3, 1)])
def test_one_column_has_nothing_to_predict(shape):
    logp = token_logprobs(MODEL, PARAMS, jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool))
    assert logp.shape == shape and (logp == 0).all()


def test_divergences_of_whole_distributions():
    """Value and gradient against both tables of logits at once; the reference gets no gradient."""
    rng = np.random.default_rng(0)
    tokens, mask = jnp.asarray(rng.integers(0, 53, (3, 7)), jnp.int32), jnp.asarray(rng.random((3, 7)) < 0.7)
    reference = jax.tree.map(lambda x: 0.8 * x, PARAMS)
    divergence = partial(full_vocabulary, DIVERGENCES["rkl"])

    def chunked(params, reference):
        values = token_logprobs_and_divergence(
            MODEL, params, reference, divergence, tokens, mask, temperature=0.7, chunk=3
        )
        return sum(jnp.sum(x * x) for x in values), values

    def plain(params, reference):
        logits = [MODEL.logits(p, MODEL.hidden(p, tokens))[:, :-1] / 0.7 for p in (params, reference)]
        log_p, log_q = map(jax.nn.log_softmax, (logits[0], jax.lax.stop_gradient(logits[1])))
        kl = jnp.pad(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1), ((0, 0), (1, 0)))
        logp = jnp.pad(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0], ((0, 0), (1, 0)))
        values = tuple(jnp.where(mask.at[:, 0].set(False), x, 0) for x in (logp, kl))
        return sum(jnp.sum(x * x) for x in values), values

    both = [jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(PARAMS, reference) for f in (chunked, plain)]
    (_, ours), (gradient, of_reference) = both[0]
    (_, expected), (expected_gradient, _) = both[1]
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
    assert not any(leaf.any() for leaf in jax.tree.leaves(of_reference))
