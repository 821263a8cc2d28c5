"""Drawing one token: the two-level inverse CDF, its noise, and top-k / top-p as thresholds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rpg_jax.sampling.draw import draw, inverse_cdf, lane_sums, request_key, token_logp, token_uniforms
from rpg_jax.sampling.filters import filter_threshold, top_k_threshold, top_p_threshold

KEEP_ALL = -np.inf
top_k_of, threshold_of, inverse_cdf_of = jax.jit(top_k_threshold), jax.jit(filter_threshold), jax.jit(inverse_cdf)
uniforms_of, keys_of = jax.jit(token_uniforms), jax.jit(jax.vmap(request_key, in_axes=(None, None, 0, 0)))


def draw_many(logits, count, threshold=KEEP_ALL, temperature=1.0, batch=16, seed=0):
    """`count` tokens from one row of logits f32[V], with noise that is not the sampler's own."""

    def block(key):
        uniforms = jax.random.uniform(key, (2, batch), minval=2.0**-24, maxval=1 - 2.0**-24)
        rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (batch, len(logits)))
        return draw(rows, temperature, jnp.full(batch, threshold), uniforms)

    keys = jax.random.split(jax.random.key(seed), -(-count // batch))
    tokens, logp = jax.jit(lambda keys: jax.lax.map(block, keys))(keys)
    return np.asarray(tokens).reshape(-1), np.asarray(logp).reshape(-1)


def softmax64(logits):
    return scipy.special.softmax(np.asarray(logits, np.float64))


def chi_square(tokens, probability, bins):
    """p-value of drawn tokens against probability [V], after merging tokens by bins [V]."""
    expected = np.bincount(bins, probability) * len(tokens)
    observed = np.bincount(bins[tokens], minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    used = expected > 0
    assert expected[used].min() >= 5, "too few expected draws in a bin"
    return scipy.stats.chisquare(observed[used], expected[used]).pvalue


@pytest.mark.parametrize("vocab", [3, 130, 512])
def test_every_token_is_drawn_with_its_probability(vocab):
    logits, temperature = np.random.default_rng(vocab).normal(size=vocab), 1.3
    tokens, logp = draw_many(logits, 200_000, temperature=temperature, batch=4096)
    probability = softmax64(logits / temperature)
    assert chi_square(tokens, probability, np.arange(vocab)) > 1e-3
    np.testing.assert_allclose(logp, np.log(probability)[tokens], rtol=0, atol=3e-6)


def test_large_vocabulary_is_drawn_evenly_between_and_inside_lanes_to_its_tail():
    """One token holds half of the mass; 151,935 share the rest, and the last ones have more of it than others."""
    vocab = 151_936
    logits = np.random.default_rng(0).normal(size=vocab)
    logits[-99:] += np.log(50.0)
    logits[70_000] = np.log(np.exp(logits).sum())
    tokens, logp = draw_many(logits, 12_000)
    index, probability = np.arange(vocab), softmax64(logits)
    stretches = index * 40 // vocab
    stretches[70_000], stretches[-99:] = 40, 41
    for bins in (index % 128, index // 128 % 97, index % 16, index * 4 // vocab, stretches):
        assert chi_square(tokens, probability, bins) > 1e-3
    np.testing.assert_allclose(logp, np.log(probability)[tokens], rtol=0, atol=2e-5)
    assert len(np.unique(tokens[stretches[tokens] < 40])) > 0.9 * (stretches[tokens] < 40).sum()


def test_a_single_token_left_is_drawn_for_certain():
    logits = np.full(151_936, -5.0)
    logits[151_935] = 4.0
    tokens, logp = draw_many(logits, 512, threshold=4.0)
    assert (tokens == 151_935).all() and (logp == 0).all()


def test_extreme_uniform_numbers_draw_entries_with_mass_however_sums_round():
    """Blocked cumulative sums are not monotone to the last bit, so an entry without mass can look like the crossing."""
    generator = np.random.default_rng(0)
    mass = generator.exponential(size=(1187, 4096)).astype(np.float32) ** 4
    mass[generator.random(mass.shape) < 0.7] = 0
    mass[generator.integers(600, 1187) :, ::2] = 0
    mass[:, ::8] *= 10.0 ** -generator.choice([0, 3, 8, 30], size=mass[:, ::8].shape)
    share = mass / mass.sum(axis=0, dtype=np.float64)
    cumulative = share.cumsum(axis=0)
    for uniform in (2.0**-24, 0.5, 1 - 2.0**-24):
        index = np.asarray(inverse_cdf_of(mass, np.full(4096, uniform, np.float32)))
        drawn, after = (np.take_along_axis(values, index[None], axis=0)[0] for values in (share, cumulative))
        assert (drawn > 0).all()
        assert (after >= uniform - 1e-5).all() and (after - drawn <= uniform + 1e-5).all()


def test_uniforms_are_the_bits_of_jax_random_for_key_and_count_alone():
    key, requests = jax.random.key(7, impl="threefry2x32"), np.divmod(np.arange(64), 4)
    keys, counts = keys_of(key, 1, *requests), np.arange(64) ** 4  # up to 15.8 million
    assert len(np.unique(keys, axis=0)) == 64
    assert (np.asarray(keys_of(key, 2, *requests)) != np.asarray(keys)).any(axis=1).all()

    def bits(key, count):
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), count)
        return jax.random.bits(key, (2,))

    drawn = np.asarray(jax.jit(jax.vmap(bits, out_axes=1))(keys, counts))
    np.testing.assert_array_equal(np.asarray(uniforms_of(keys, counts), np.float64), ((drawn >> 9) + 0.5) / 2**23)


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_token_logp_against_float64(vocab):
    logits = np.random.default_rng(1).normal(scale=20, size=(5, vocab)).astype(np.float32)
    token = np.array([0, vocab - 1, 7, 100, int(logits[4].argmin())])
    expected = [np.log(softmax64(logits[b])[t]) for b, t in enumerate(token)]
    np.testing.assert_allclose(jax.jit(token_logp)(logits, token), expected, rtol=1e-5, atol=1e-5)


def normals(seed):
    return np.random.default_rng(seed).normal(scale=4, size=(3, 23)).astype(np.float32)


# Few distinct values make ties; normals make none.
few = st.sampled_from([-40.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.25, 2.0, 9.0])
logits_arrays = hnp.arrays(np.float32, (3, 23), elements=few) | st.integers(0, 2**31).map(normals)


@settings(max_examples=100)
@given(logits=logits_arrays, k=st.integers(1, 30))
def test_top_k_keeps_what_sorting_keeps(logits, k):
    threshold = np.asarray(top_k_of(logits, k))
    expected = np.sort(logits, axis=1)[:, -min(k, 23)]
    np.testing.assert_array_equal(logits >= threshold[:, None], logits >= expected[:, None])


@settings(max_examples=100)
@given(logits=logits_arrays, p=st.floats(0.01, 0.999), k=st.integers(0, 30), temperature=st.sampled_from([0.5, 1, 3]))
def test_top_p_keeps_the_fewest_that_hold_p_of_what_top_k_left(logits, p, k, temperature):
    threshold = np.asarray(threshold_of(logits, np.float32(temperature), np.int32(k), np.float32(p)))
    for row, least in zip(logits, threshold, strict=True):
        left = row >= np.sort(row)[-min(k, 23)] if k else np.ones(23, bool)
        probability = softmax64(np.where(left, row, -np.inf) / temperature)
        kept = row >= least
        assert kept.any() and not (kept & ~left).any()
        assert probability[kept].sum() >= p - 1e-6
        without_the_smallest = kept & (row > row[kept].min())
        assert probability[without_the_smallest].sum() < p + 1e-6


def test_filters_at_a_large_vocabulary_against_sorting():
    logits = np.random.default_rng(0).normal(scale=3, size=(2, 151_936)).astype(np.float32)
    top_k = np.asarray(top_k_of(logits, 1000))
    np.testing.assert_array_equal(top_k, np.sort(logits, axis=1)[:, -1000])
    settings = np.float32(1), np.float32(0.9), np.full(2, KEEP_ALL, np.float32)
    top_p = np.asarray(jax.jit(top_p_threshold)(logits, *settings))
    for row, least in zip(logits, top_p, strict=True):
        descending = np.sort(row)[::-1]
        needed = np.searchsorted(np.cumsum(softmax64(descending)), 0.9) + 1
        assert abs((row >= least).sum() - needed) <= 2  # float32 sums


def test_the_sum_over_the_vocabulary_is_a_product_on_cpu_alone():
    """It is faster there; elsewhere a product may round its factors, to 8 bits on TPU."""
    traced = jax.jit(lane_sums).trace(jnp.zeros((4, 40, 128)))
    cpu, tpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    assert "dot_general" in cpu and "stablehlo.reduce" in tpu and "dot_general" not in tpu
