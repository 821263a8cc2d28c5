"""Drawing tokens: two uniform numbers a token, whatever the vocabulary, and a two-level inverse CDF."""

import jax
import jax.numpy as jnp

CHUNKS = 128  # the vocabulary is cut into so many contiguous chunks: 151,936 = 128 x 1,187


def request_key(key, step, problem, sample):
    """The key of one response's noise: it depends on nothing else, so neither on slots nor on order. uint32[2]."""
    for number in (step, problem, sample):
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def token_uniforms(keys, counts):
    """Two numbers in (0, 1) for the counts[b]-th token of the request of keys[b].

    Args:
      keys: uint32[B, 2], from `request_key`; counts: i32[B].

    Returns:
      f32[B, 2], midpoints of 2^23 equal intervals: never 0 (which would draw a first token of any mass) and never 1.
    """

    def bits(key, count):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, count), (2,))

    return ((jax.vmap(bits)(keys, counts) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def inverse_cdf(mass, uniform):
    """Draws index i with probability mass[b, i] / sum(mass[b]).

    The uniform number is scaled by the largest value that the cumulative sum reaches at an entry with mass, so that one
    entry always qualifies however the sum was rounded; entries without mass never do.

    Args:
      mass: f32[B, N], at least one positive entry a row; uniform: f32[B] in (0, 1).

    Returns:
      i32[B].
    """
    cumulative = jnp.cumsum(mass, axis=-1)
    total = jnp.max(cumulative, axis=-1, where=mass > 0, initial=0.0)
    return jnp.argmax((cumulative > (uniform * total)[:, None]) & (mass > 0), axis=-1).astype(jnp.int32)


def draw(logits, threshold, uniforms):
    """Draws one token a row from softmax(logits) restricted to logits >= threshold and renormalized.

    A first inverse CDF picks a chunk of the vocabulary by its mass and a second one a token inside it. They need a
    uniform number each: what one number has left after the first choice is too coarse for the second.

    Args:
      logits: f32[B, V]; threshold: f32[B], at most the row's largest logit; uniforms: f32[B, 2].

    Returns:
      token i32[B] and its log-probability f32[B] under the restricted distribution.
    """
    width = -(-logits.shape[-1] // CHUNKS)
    padded = jnp.pad(logits, ((0, 0), (0, CHUNKS * width - logits.shape[-1])), constant_values=-jnp.inf)
    chunks = padded.reshape(-1, CHUNKS, width)
    largest = jnp.max(logits, axis=-1)

    def mass(x):
        shape = (-1,) + (1,) * (x.ndim - 1)
        return jnp.where(x >= threshold.reshape(shape), jnp.exp(x - largest.reshape(shape)), 0.0)

    totals = mass(chunks).sum(-1)
    chunk = inverse_cdf(totals, uniforms[:, 0])
    inside = jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0]
    index = inverse_cdf(mass(inside), uniforms[:, 1])
    drawn = jnp.take_along_axis(inside, index[:, None], axis=-1)[:, 0]
    return chunk * width + index, drawn - largest - jnp.log(totals.sum(-1))


def token_logp(logits, token):
    """log softmax(logits)[b, token[b]]: f32[B, V], i32[B] -> f32[B]."""
    return jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)
