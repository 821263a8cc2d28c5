"""Drawing tokens: two uniform numbers a token, whatever the vocabulary, and a two-level inverse CDF.

Logits are [V, B] here, vocabulary first: the projection streams its table once in that order, and reductions over the
vocabulary run over whole rows of B (a fifth of a decode step's time at V = 151,936 on CPU).
"""

import jax
import jax.numpy as jnp

CHUNKS = 128  # contiguous parts of the vocabulary for the first of the two draws: 151,936 = 128 x 1,187


def request_key(key: jax.Array, step: jax.Array, problem: jax.Array, sample: jax.Array) -> jax.Array:
    """The key of one response's noise, uint32[2], from the run's key and three i32[]; it depends on nothing else."""
    for number in (step, problem, sample):
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def token_uniforms(keys: jax.Array, counts: jax.Array) -> jax.Array:
    """Two numbers in (0, 1) for the counts[b]-th token of the request of keys[b].

    Args:
      keys: uint32[B, 2], from `request_key`; counts: i32[B].

    Returns:
      f32[2, B], midpoints of 2^23 equal intervals: never 0, which would draw a first token of any mass, and never 1.
    """

    def bits(key, count):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, count), (2,))

    return ((jax.vmap(bits, out_axes=1)(keys, counts) >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def inverse_cdf(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws index i with probability mass[i, b] / sum(mass[:, b]).

    The uniform number is scaled by the largest value that the cumulative sum reaches at an entry with mass. So an entry
    with mass always qualifies however the sum was rounded, and an entry without mass never does.

    Args:
      mass: f32[N, B], at least one positive entry a column; uniform: f32[B] in (0, 1).

    Returns:
      i32[B].
    """
    cumulative = jnp.cumsum(mass, axis=0)
    total = jnp.max(cumulative, axis=0, where=mass > 0, initial=0.0)
    return jnp.argmax((cumulative > uniform * total) & (mass > 0), axis=0).astype(jnp.int32)


def draw(
    logits: jax.Array, temperature: jax.Array, threshold: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a column from softmax(logits / temperature) restricted to logits >= threshold.

    A first inverse CDF picks a chunk of the vocabulary by its mass, and a second one a token inside it. Each takes a
    uniform number of its own: the bits that one number has left after the first choice are too few for the second.

    Args:
      logits: f32[V, B]; temperature: f32[], positive.
      threshold: f32[B], at most the column's largest logit; uniforms: f32[2, B].

    Returns:
      token i32[B] and its log-probability f32[B] under the restricted distribution.
    """
    vocab, batch = logits.shape
    width = -(-vocab // CHUNKS)
    padded = jnp.pad(logits, ((0, CHUNKS * width - vocab), (0, 0)), constant_values=-jnp.inf)
    chunks = padded.reshape(CHUNKS, width, batch)
    largest = jnp.max(jnp.max(chunks, axis=1), axis=0)  # [B]

    def mass(x):
        return jnp.where(x >= threshold, jnp.exp((x - largest) / temperature), 0.0)

    totals = jnp.sum(mass(chunks), axis=1)  # [CHUNKS, B]
    chunk = inverse_cdf(totals, uniforms[0])  # [B]
    inside = jnp.take_along_axis(chunks, chunk[None, None], axis=0)[0]  # [width, B], the logits of the chosen chunk
    index = inverse_cdf(mass(inside), uniforms[1])  # [B]
    drawn = jnp.take_along_axis(inside, index[None], axis=0)[0]  # [B]
    return chunk * width + index, (drawn - largest) / temperature - jnp.log(jnp.sum(totals, axis=0))


def token_logp(logits: jax.Array, token: jax.Array) -> jax.Array:
    """log softmax(logits)[token[b], b]: f32[V, B], i32[B] -> f32[B]."""
    return jnp.take_along_axis(logits, token[None], axis=0)[0] - jax.nn.logsumexp(logits, axis=0)
