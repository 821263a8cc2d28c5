"""Chunked log-probs of given tokens: against naive log-softmax, and that no [B, T, V] array is ever held."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_models import randomized, some_tokens

from rpg_jax.models import Model, ModelConfig, token_logprobs, token_logprobs_and_divergence, token_logprobs_and_entropy
from rpg_jax.models.logprobs import _by_chunks, _logprob
from rpg_jax.objectives import DIVERGENCES
from rpg_jax.objectives.divergences import full_vocabulary

MODEL = Model(ModelConfig(53, 8, 16, 1, 2, 1, 4, qk_norm=True))
PARAMS = jax.tree.map(lambda x: 3 * x, randomized(MODEL))


@partial(jax.jit, static_argnames=("model", "chunk"))
def forward(params, tokens, mask, temperature=1.0, *, model=MODEL, chunk=5):
    """What `token_logprobs` gives and, beside it, `token_logprobs_and_entropy`; compiled once for a shape."""
    arguments, settings = (model, params, tokens, mask), dict(temperature=temperature, chunk=chunk)
    return token_logprobs(*arguments, **settings), *token_logprobs_and_entropy(*arguments, **settings)


@partial(jax.jit, static_argnames="chunk")
def value_and_gradient(cotangents, tokens, mask, temperature, params, *, chunk):
    """Of `forward`; of `naive` if no chunk is given."""
    function = partial(forward, chunk=chunk) if chunk else partial(naive, MODEL)
    values, back = jax.vjp(lambda p: function(p, tokens, mask, temperature), params)
    return values, back(cotangents)[0]


def naive(model, params, tokens, mask, temperature=1.0):
    """log_softmax over all columns but the last, whose prediction nobody asks for, twice; entropy beside it."""
    logits = model.logits(params, model.hidden(params, tokens))[:, :-1] / temperature
    logp = jax.nn.log_softmax(logits, -1)
    picked = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    first = jnp.zeros((tokens.shape[0], 1))
    picked, entropy = (jnp.concatenate([first, x], 1) for x in (picked, entropy))
    mask = mask.at[:, 0].set(False)
    return *(jnp.where(mask, picked, 0.0),) * 2, jnp.where(mask, entropy, 0.0)


@settings(max_examples=8)
@given(
    lengths=st.sampled_from([(1, 1), (12, 4), (7, 100)]),  # of rows and chunks; each has programs
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    density=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    seed=st.integers(0, 1000),
)
@example(lengths=(12, 4), temperature=0.5, density=0.8, seed=1)
def test_equals_naive_in_value_and_gradient(lengths, temperature, density, seed):
    length, chunk = lengths
    rng = np.random.default_rng(seed)
    tokens, mask = some_tokens((3, length), seed), rng.random((3, length)) < density
    mask &= np.arange(length) >= seed % 2 * length // 2  # every other seed has prompts
    arguments = tuple(rng.normal(size=(3, 3, length)).astype(np.float32)), tokens, mask, temperature, PARAMS
    ours, gradient = value_and_gradient(*arguments, chunk=chunk)
    plain, plain_gradient = value_and_gradient(*arguments, chunk=None)
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == jnp.float32 and a.shape == (3, length)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4), gradient, plain_gradient)
    np.testing.assert_allclose(*ours[:2], rtol=1e-5, atol=1e-5)


def test_chunks_without_response_tokens_are_skipped_under_jit_and_grad():
    """A NaN in the vocabulary projection reaches only chunks that are computed: none when the mask is empty."""
    model = dataclasses.replace(MODEL, config=dataclasses.replace(MODEL.config, tied_embeddings=False))
    params = PARAMS | {"head": {"kernel": np.full((8, 53), np.nan, np.float32)}}
    tokens, mask = np.zeros((2, 12), np.int32), np.zeros((2, 12), bool)

    @jax.jit
    def gradient(mask):
        return jax.grad(lambda p: token_logprobs(model, p, tokens, mask, chunk=4).sum())(params)

    compiled = gradient.lower(mask).compile()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(compiled(mask)))
    mask[1, 9] = True
    assert np.isnan(compiled(mask)["layers"]["q"]["kernel"]).any()
    assert "conditional(" in (text := compiled.as_text())  # a select would compute both branches
    assert "reduce_max" in text and not re.search(r"transpose\(.*reduce_max", text)  # the forward pass has found it


def test_extreme_logits_stay_finite():
    tokens, mask, ones = some_tokens((2, 12), 3), np.arange(24).reshape(2, 12) > 5, np.ones((2, 12), np.float32)
    found = value_and_gradient((ones,) * 3, tokens, mask, 1e-4, PARAMS, chunk=64)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabularys_gradient_is_products_of_bfloat16_numbers_with_float32_sums_without_bias(tied, monkeypatch):
    """Against float64, of the same rounded factors: an error of some 2^-9 of an entry's terms, whose mean over draws is
    within five standard errors of 0. Chunks add up in float32: sums of bfloat16 would err by 2^-9 of them."""
    draws, chunks, chunk, size, vocab = 256, 8, 4, 8, 53
    model = Model(ModelConfig(vocab, size, 16, 1, 2, 1, 4, tied_embeddings=tied), dtype=jnp.bfloat16)
    rng = np.random.default_rng(5)
    matrix = np.asarray(jnp.asarray(rng.normal(size=(vocab, size)), jnp.bfloat16), np.float32)
    hidden = np.asarray(jnp.asarray(rng.normal(size=(draws, 2, chunks * chunk, size)), jnp.bfloat16), np.float64)
    tokens, cotangent = rng.integers(0, vocab, hidden.shape[:-1]), rng.normal(size=hidden.shape[:-1])
    head = {"embed": {"embedding": matrix}} if tied else {"head": {"kernel": matrix.T}}

    def gradient(hidden, tokens, cotangent):
        def value(head, hidden):
            constants = ([], []), tokens, jnp.ones(tokens.shape, bool), 0.7
            return (_by_chunks((model,), _logprob, chunk, head, hidden, constants)[0] * cotangent).sum()

        return jax.grad(value, argnums=(0, 1))(head, hidden.astype(jnp.bfloat16))

    if not tied:  # as GPUs and TPUs pick log-probs
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, cpu, default: default(x))
    arguments = hidden, tokens, cotangent.astype(np.float32)
    program = jax.jit(jax.vmap(gradient)).lower(*arguments)
    products = re.findall(r"dot_general.*: \((.*)\) -> (.*)", program.as_text())
    assert len(products) == 4 and all(a.count("bf16>") == 2 and b.endswith("f32>") for a, b in products), products
    d_head, d_hidden = (np.asarray(jax.tree.leaves(x)[0], np.float64) for x in program.compile()(*arguments))
    logits = hidden @ matrix.T.astype(np.float64) / 0.7
    p = np.exp(logits - logits.max(-1, keepdims=True))
    d_logits = cotangent[..., None] / 0.7 * (np.eye(vocab)[tokens] - p / p.sum(-1, keepdims=True))
    exact = np.einsum("nbtv,nbtd->nvd" if tied else "nbtv,nbtd->ndv", d_logits, hidden), d_logits @ matrix
    terms = np.einsum("nbtv,nbtd->nvd" if tied else "nbtv,nbtd->ndv", abs(d_logits), abs(hidden))
    assert (abs(d_head - exact[0]) <= 2.0**-8 * terms).all()  # half a unit in the last place, and some of float32
    assert (abs(d_hidden - exact[1]) <= 2.0**-7 * (abs(d_logits) @ abs(matrix))).all()  # the result is rounded, too
    for found, right in zip((d_head, d_hidden), exact, strict=True):
        error = (found - right).reshape(draws, -1)
        assert 0 < error.std() < 2.0**-8 * right.std()
        assert abs(error.mean()) < 5 * error.mean(1).std() / draws**0.5, "rounding is to the nearest"


def test_memory_at_a_real_vocabulary():
    """Temporaries of the gradient at V = 151,936 and T = 8,192: at most 5 % of the naive form's; nothing is run."""
    model = Model(ModelConfig(151936, 16, 16, 1, 1, 1, 16))
    params = jax.eval_shape(model.init, jax.random.key(0))
    # Hidden states are the tokens' embeddings, so that the vocabulary is all there is to measure.
    model = dataclasses.replace(model, attention=lambda q, k, v, kind: v)
    tokens, mask = (jax.ShapeDtypeStruct((1, 8192), dtype) for dtype in (jnp.int32, bool))

    def temporaries(logprobs):
        gradient = jax.jit(jax.grad(lambda p, t, m: logprobs(model, p, t, m).sum()))
        return gradient.lower(params, tokens, mask).compile().memory_analysis().temp_size_in_bytes

    ours, theirs = temporaries(token_logprobs), temporaries(lambda *args: naive(*args)[0])
    assert theirs > 8192 * 151936 * 4
    assert ours <= 0.05 * theirs, f"{ours / 2**20:,.0f} MiB against {theirs / 2**20:,.0f} MiB"


def test_divergences_of_whole_distributions():
    """Value and gradient against both tables of logits at once; the reference gets no gradient."""
    rng = np.random.default_rng(0)
    tokens, mask = jnp.asarray(some_tokens((3, 7))), jnp.asarray(rng.random((3, 7)) < 0.7)
    reference = jax.tree.map(lambda x: 0.8 * x, PARAMS)
    divergence = partial(full_vocabulary, DIVERGENCES["rkl"])

    def chunked(params, reference):
        both, settings = (MODEL, params, (MODEL, reference)), dict(temperature=0.7, chunk=3)
        values = token_logprobs_and_divergence(*both, divergence, tokens, mask, **settings)
        return sum(jnp.sum(x * x) for x in values), values

    def plain(params, reference):
        logits = [MODEL.logits(p, MODEL.hidden(p, tokens))[:, :-1] / 0.7 for p in (params, reference)]
        log_p, log_q = map(jax.nn.log_softmax, (logits[0], jax.lax.stop_gradient(logits[1])))
        kl = jnp.pad(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1), ((0, 0), (1, 0)))
        logp = jnp.pad(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0], ((0, 0), (1, 0)))
        values = tuple(jnp.where(mask.at[:, 0].set(False), x, 0) for x in (logp, kl))
        return sum(jnp.sum(x * x) for x in values), values

    both = (jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(PARAMS, reference) for f in (chunked, plain))
    ((_, ours), (gradient, of_reference)), ((_, expected), (expected_gradient, _)) = both
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-3), gradient, expected_gradient)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(of_reference))
