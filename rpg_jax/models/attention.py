"""Attention functions to inject into the model: arrays to arrays, queries grouped by the KV head that they share."""

import jax
import jax.numpy as jnp


def weighted_values(query, key, value, visible):
    """Softmax attention with the division delayed until after the value product.

    Exponentials, weighted sum, then one division of a [.., D] array instead of one of the [.., T, S] weights: the same
    number, and on CPU about half the time of the backward pass.

    Args:
      query: [B, T, H, D]; key, value: [B, S, K, D] with H a multiple of K.
      visible: bool, broadcastable to [B, T, S]. A query that sees nothing gets zeros.

    Returns:
      [B, T, H, D] in query's dtype; scores and sums are at least float32.
    """
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=wide) * dim**-0.5
    visible = jnp.broadcast_to(visible, (batch, length, key.shape[1]))[:, None, None]
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=visible, initial=-1e30))
    weights = jnp.where(visible, jnp.exp(scores - largest), 0.0)
    total = weights.sum(-1)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights.astype(value.dtype), value, preferred_element_type=wide)
    total = jnp.transpose(total, (0, 3, 1, 2))[..., None]
    return (mixed / jnp.maximum(total, 1e-30)).reshape(query.shape).astype(query.dtype)


def causal_attention(query, key, value):
    """Each token attends to itself and to those before it. Shapes as in `weighted_values` with S = T."""
    length = query.shape[1]
    return weighted_values(query, key, value, jnp.tril(jnp.ones((length, length), bool)))
