"""Attention functions to inject into the model: arrays to arrays, queries grouped by the KV head that they share."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

SAVED = "attention"  # what the remat policy of that name keeps: all that the backward pass reads but q, k and v
MIN_BLOCK, MAX_BLOCKS = 40, 8  # columns a query block has at least, and blocks a sequence is cut into at most


def causal_attention(query, key, value, segment_ids=None):
    """Each token attends to itself and to those before it, of its own segment where there are several in a row.

    Queries go in blocks, each against its prefix of keys only, so that most of the upper triangle is never computed.

    Args:
      query: [B, T, H, D]; key, value: [B, T, K, D] with H a multiple of K.
      segment_ids: i32[B, T]; a segment's tokens stand together. None: a row is one segment.

    Returns:
      [B, T, H, D] in query's dtype; scores and sums are at least float32.
    """
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    query = query.reshape(batch, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    block = -(-length // min(max(length // MIN_BLOCK, 1), MAX_BLOCKS))
    mixed = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        rows = query[:, :, :, start:stop].reshape(batch, kv_heads, -1, dim)
        visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        if segment_ids is not None:
            visible = visible & (segment_ids[:, None, start:stop, None] == segment_ids[:, None, None, :stop])
        visible = jnp.concatenate([visible] * group, -2)
        out = softmax_mix(rows, key[:, :, :stop], value[:, :, :stop], visible)
        mixed.append(out.reshape(batch, kv_heads, group, -1, dim))
    return jnp.concatenate(mixed, 3).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


@jax.custom_vjp
def softmax_mix(query, key, value, visible):
    """softmax(query keyᵀ / √D) value with the division delayed until after the value product.

    Exponentials, weighted sum, then one division of an [X, D] array instead of one of the [X, S] weights: the same
    number. The gradient is written out so that it reuses the exponentials and never transposes an [X, S] array, which
    on CPU took most of the time of a training step.

    Args:
      query: [B, K, X, D]; key, value: [B, K, S, D].
      visible: bool[X, S] or [B, 1, X, S]; each row has at least one true entry.

    Returns:
      [B, K, X, D] in query's dtype.
    """
    return _mix_forward(query, key, value, visible)[0]


def _mix_forward(query, key, value, visible):
    scores = _batched_dot(query, key, 3, 3) * query.shape[-1] ** -0.5
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(value.dtype)
    out = (_batched_dot(weights, value, 3, 2) / total).astype(query.dtype)
    weights, total, out = checkpoint_name((weights, total, out), SAVED)
    return out, (query, key, value, weights, total, out)


def _mix_backward(saved, d_out):
    query, key, value, weights, total, out = saved
    scale = query.shape[-1] ** -0.5
    d_mixed = d_out / total
    d_weights = _batched_dot(d_mixed.astype(value.dtype), value, 3, 3) - (d_mixed * out).sum(-1, keepdims=True)
    d_scores = (weights * d_weights).astype(query.dtype)  # hidden entries have weight 0
    d_query = _batched_dot(d_scores, key, 3, 2) * scale
    d_key = _batched_dot(query, d_scores, 2, 2).swapaxes(2, 3) * scale
    d_value = _batched_dot(d_mixed.astype(value.dtype), weights, 2, 2).swapaxes(2, 3)
    return d_query.astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None


def _batched_dot(left, right, left_axis, right_axis):
    """Contracts one axis of two [B, K, ...] arrays, at least in float32."""
    wide = jnp.promote_types(left.dtype, jnp.float32)
    dimensions = (((left_axis,), (right_axis,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=wide)


softmax_mix.defvjp(_mix_forward, _mix_backward)
