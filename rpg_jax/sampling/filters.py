"""Top-k and top-p as a threshold on the logits, found by bisection instead of sorting the vocabulary.

Tokens with logits >= threshold are kept, so all those tied with the last one that is needed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rpg_jax.sampling.draw import fold, vocabulary_sum


def filter_threshold(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array | None = None, top_p: jax.Array | None = None
) -> jax.Array:
    """The smallest logit kept by temperature, then top-k, then top-p (of the tokens that top-k kept, renormalized).

    Args:
      logits: f32[B, V]; temperature: f32[], positive.
      top_k: i32[], keep the k largest; 0 keeps all. None is off, and costs nothing.
      top_p: f32[], keep the fewest largest whose mass is at least p; 1 keeps all. None is off, and costs nothing.

    Returns f32[B]; -inf where every token is kept.
    """
    threshold = jnp.full(logits.shape[:1], -jnp.inf, logits.dtype)
    if top_k is not None:
        threshold = jnp.where(top_k > 0, top_k_threshold(logits, top_k), threshold)
    if top_p is not None:
        threshold = jnp.where(top_p < 1, top_p_threshold(logits, temperature, top_p, threshold), threshold)
    return threshold


def top_k_threshold(logits: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest logit of each row, exactly; the smallest if there are fewer. f32[B, V], i32[] -> f32[B]."""
    ranks, folded = _ordered(logits), _ordered(fold(logits))  # i32[B, V], i32[B, rows, LANES]

    def enough(candidate):  # exact up to 2^24, faster than integers
        return vocabulary_sum(jnp.where(folded >= candidate[:, None, None], 1.0, 0.0)) >= k

    return _unordered(_bisect(enough, ranks.min(axis=1), ranks.max(axis=1)))


def top_p_threshold(logits: jax.Array, temperature: jax.Array, p: jax.Array, above: jax.Array) -> jax.Array:
    """The largest threshold that keeps a share p of the mass of logits >= above.

    Args:
      logits: f32[B, V]; temperature, p: f32[]; above: f32[B], at most the row's largest logit.

    Returns f32[B], at least `above`.
    """
    kept = logits >= above[:, None]
    mass = jnp.where(kept, jnp.exp((logits - logits.max(axis=1, keepdims=True)) / temperature), 0.0)  # [B, V]
    ranks, folded = _ordered(mass), fold(mass, 0.0)
    needed = p * vocabulary_sum(folded)

    def enough(candidate):
        return vocabulary_sum(jnp.where(_ordered(folded) >= candidate[:, None, None], folded, 0.0)) >= needed

    least = _bisect(enough, jnp.zeros(logits.shape[:1], jnp.int32), ranks.max(axis=1))
    return jnp.min(jnp.where((ranks >= least[:, None]) & kept, logits, jnp.inf), axis=1)


def _bisect(enough: Callable[[jax.Array], jax.Array], lowest: jax.Array, highest: jax.Array) -> jax.Array:
    """The largest x in lowest..highest, i32[B] each, with enough(x), which must be decreasing and hold at lowest."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # ceil((low + high) / 2) without overflow
        holds = enough(middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (lowest, highest))[0]


def _ordered(x: jax.Array) -> jax.Array:
    """float32 to int32 in the same order: the magnitude bits of negative numbers are flipped."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(ranks: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks), jnp.float32)
