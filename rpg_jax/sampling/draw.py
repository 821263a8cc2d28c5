"""Drawing tokens: two uniform numbers a token, whatever the vocabulary, and a two-level inverse CDF.

Logits are [B, V], and every sum over a vocabulary is one over [B, V / LANES, LANES], first its middle axis and then the
last: processors add along the last axis in vectors of LANES numbers, and in an order that does not depend on B.
"""

import jax
import jax.numpy as jnp
import numpy as np

LANES = 128  # token id = row * LANES + lane
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)  # of Threefry's even and odd turns


def request_key(key: jax.Array, step: jax.Array, problem: jax.Array, sample: jax.Array) -> jax.Array:
    """The key of one response's noise, uint32[2], from the run's key and three i32[]; it depends on nothing else."""
    for number in (step, problem, sample):
        key = jax.random.fold_in(key, number)
    return jax.random.key_data(key)


def threefry2x32(key: tuple[jax.Array, jax.Array], count: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The two words, uint32, that the cipher Threefry-2x32 (Salmon et al. 2011) makes of two words under a key of two.

    It is that of `jax.random`, which on CPU runs as a loop whose turns cost more than their work for a few rows.
    """
    keys = *key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    x, y = count[0] + keys[0], count[1] + keys[1]
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ (y << rotation | y >> 32 - rotation)
        x, y = x + keys[(turn + 1) % 3], y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def token_uniforms(keys: jax.Array, counts: jax.Array) -> jax.Array:
    """Two numbers in (0, 1) for the counts[b]-th token of the request of keys[b].

    Args:
      keys: uint32[B, 2], from `request_key`; counts: i32[B].

    Returns:
      f32[2, B], midpoints of 2^23 equal intervals: never 0, which would draw a first token of any mass, and never 1.
    """

    zeros = jnp.zeros_like(keys[:, 0])
    folded = threefry2x32((keys[:, 0], keys[:, 1]), (zeros, counts.astype(jnp.uint32)))
    bits = jnp.stack([jnp.bitwise_xor(*threefry2x32(folded, (zeros, zeros + number))) for number in range(2)])
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def inverse_cdf(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws index i with probability mass[i, b] / sum(mass[:, b]).

    The uniform number is scaled by the largest value that the cumulative sum reaches at an entry with mass. So an entry
    with mass always qualifies however the sum was rounded, and an entry without mass never does.

    Args:
      mass: f32[N, B], at least one positive entry a column; uniform: f32[B] in (0, 1).

    Returns i32[B].
    """
    cumulative = jax.lax.associative_scan(jnp.add, mass)
    total = jnp.max(jnp.where(mass > 0, cumulative, 0.0), axis=0)
    index = jnp.arange(mass.shape[0], dtype=jnp.int32)[:, None]
    # 0, as argmax has it, where no entry has mass.
    first = jnp.min(jnp.where((cumulative > uniform * total) & (mass > 0), index, mass.shape[0]), axis=0)
    return first % mass.shape[0]


def fold(logits: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """[B, V] as [B, rows, LANES], with `fill` after the end of the vocabulary."""
    batch, vocab = logits.shape
    rows = -(-vocab // LANES)
    padded = jnp.pad(logits, ((0, 0), (0, rows * LANES - vocab)), constant_values=fill)
    return padded.reshape(batch, rows, LANES)


def lane_sums(folded: jax.Array) -> jax.Array:
    """Sums of [B, rows, LANES] over rows, [B, LANES]; on CPU as a product with ones, which is faster there."""

    def product(folded):
        return jnp.einsum("brl,br->bl", folded, jnp.ones(folded.shape[:2], folded.dtype))

    def sums(folded):  # without a barrier XLA adds up the whole vocabulary again where these are added up
        return jax.lax.optimization_barrier(jnp.sum(folded, axis=1))

    # Elsewhere a product may round its factors: to 8 bits on TPU.
    return jax.lax.platform_dependent(folded, cpu=product, default=sums)


def vocabulary_sum(folded: jax.Array) -> jax.Array:
    """Sums of [B, rows, LANES] over both vocabulary axes: [B]."""
    return jnp.sum(lane_sums(folded), axis=1)


def draw(
    logits: jax.Array, temperature: jax.Array, threshold: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws from softmax(logits / temperature) restricted to logits >= threshold.

    A first inverse CDF picks a lane of the vocabulary by its mass, and a second one a token inside it. Each takes a
    uniform number of its own: the bits that one number has left after the first choice are too few for the second.

    Args:
      logits: f32[B, V]; temperature: f32[], positive.
      threshold: f32[B], at most the row's largest logit; uniforms: f32[2, B].

    Returns token i32[B] and its log-probability f32[B] under the restricted distribution.
    """
    folded, top = fold(logits), logits.max(axis=1)  # [B, rows, LANES], [B]

    def mass(x):  # [B, ...]
        bound, peak = (y.reshape(-1, *(1,) * (x.ndim - 1)) for y in (threshold, top))
        return jnp.where(x >= bound, jnp.exp((x - peak) / temperature), 0.0)

    totals = lane_sums(mass(folded))  # [B, LANES]
    lane = inverse_cdf(totals.T, uniforms[0])  # [B]
    inside = jnp.take_along_axis(folded, lane[:, None, None], axis=2)[:, :, 0]  # [B, rows], the chosen lane's logits
    row = inverse_cdf(mass(inside).T, uniforms[1])  # [B]
    drawn = jnp.take_along_axis(inside, row[:, None], axis=1)[:, 0]  # [B]
    return row * LANES + lane, (drawn - top) / temperature - jnp.log(jnp.sum(totals, axis=1))


def token_logp(logits: jax.Array, token: jax.Array) -> jax.Array:
    """log softmax(logits)[b, token[b]]: f32[B, V], i32[B] -> f32[B]."""
    top = logits.max(axis=1)  # [B]
    total = vocabulary_sum(jnp.exp(fold(logits) - top[:, None, None]))
    return jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0] - top - jnp.log(total)
