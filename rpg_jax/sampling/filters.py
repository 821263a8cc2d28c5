"""Top-k and top-p as a threshold on the logits, found by bisection instead of sorting the vocabulary.

What is kept is {logits >= threshold}: tokens tied with the last one that is needed are all kept.
"""

import jax
import jax.numpy as jnp


def filter_threshold(logits, top_k, top_p):
    """The smallest logit kept by top-k and then top-p (of what top-k left, renormalized).

    Args:
      logits: f32[B, V], already divided by the temperature.
      top_k: i32[], keep the k largest; 0 is off.
      top_p: f32[], keep the fewest largest whose mass is at least p; 1 is off.

    Returns:
      f32[B]; -inf where nothing is cut. Either filter costs nothing when off.
    """
    nothing = jnp.full(logits.shape[:1], -jnp.inf, logits.dtype)
    threshold = jax.lax.cond(top_k > 0, top_k_threshold, lambda logits, k: nothing, logits, top_k)
    return jax.lax.cond(top_p < 1, top_p_threshold, lambda logits, p, above: above, logits, top_p, threshold)


def top_k_threshold(logits, k):
    """The k-th largest logit of each row, exactly: f32[B, V], i32[] -> f32[B]."""
    ranks = _ordered(logits)

    def enough(candidate):
        return jnp.sum(ranks >= candidate[:, None], axis=-1) >= k

    lowest, highest = jnp.min(ranks, axis=-1), jnp.max(ranks, axis=-1)
    return _unordered(_bisect(enough, lowest, highest))


def top_p_threshold(logits, p, above):
    """The largest threshold, of those at or over `above`, whose kept tokens hold p of the mass at or over `above`.

    Args:
      logits: f32[B, V]; p: f32[]; above: f32[B].

    Returns:
      f32[B].
    """
    mass = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    mass = jnp.where(logits >= above[:, None], mass, 0.0)
    needed = p * mass.sum(-1)
    ranks = _ordered(mass)

    def enough(candidate):
        return jnp.sum(jnp.where(ranks >= candidate[:, None], mass, 0.0), axis=-1) >= needed

    least = _bisect(enough, jnp.zeros_like(ranks[:, 0]), jnp.max(ranks, axis=-1))
    kept = (ranks >= least[:, None]) & (logits >= above[:, None])
    return jnp.min(logits, axis=-1, where=kept, initial=jnp.inf)


def _bisect(enough, lowest, highest):
    """The largest integer of [lowest, highest] with enough(x), given that enough is decreasing and holds at lowest."""

    def halve(_, bounds):
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)  # ceil((low + high) / 2) without overflow
        hold = enough(middle)
        return jnp.where(hold, middle, low), jnp.where(hold, high, middle - 1)

    return jax.lax.fori_loop(0, 32, halve, (lowest, highest))[0]


def _ordered(x):
    """float32 to int32 with the same order: negative floats have their magnitude bits flipped. Its own inverse."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _unordered(ranks):
    bits = jnp.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
