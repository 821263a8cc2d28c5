"""Causal attention in plain JAX, with grouped queries: B rows, T tokens, H query heads, K KV heads of dimension D."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rpg_jax.models import rope

SAVED = "attention"  # the remat policy of that name saves what the backward pass reads, except q, k and v
MIN_BLOCK, MAX_BLOCKS = 40, 8  # the fewest tokens in a query block, and the most blocks in a sequence


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """How a layer attends. Layers of one model may differ in it; hashable, so it can be a static argument."""

    scale: float | None = None  # of scores; None is head_dim ** -0.5
    soft_cap: float | None = None  # scores are cap * tanh(scores / cap); None leaves them
    window: int | None = None  # tokens that a query sees, itself included; None is all before it
    rope_theta: float = 10000.0  # base of the rotary positions
    rope_scaling: rope.Scaling = None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale


PLAIN = AttentionKind()


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None = None,
    kind: AttentionKind = PLAIN,
) -> jax.Array:  # fmt: skip
    """Attention of each token to itself and to the earlier tokens of its segment, as many as the kind's window holds.

    A block of queries reads only the keys that one of them sees, so most other scores are never computed.

    Args:
      query: [B, T, H, D]; key, value: [B, T, K, D] with H a multiple of K.
      segment_ids: i32[B, T]; a segment's tokens are contiguous. None: each row is one segment.

    Returns [B, T, H, D] in query's dtype; scores and sums are at least float32.
    """
    batch, length, heads, dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    query = query.reshape(batch, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, D]
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)  # [B, K, T, D]
    block = -(-length // min(max(length // MIN_BLOCK, 1), MAX_BLOCKS))
    mixed = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = 0 if kind.window is None else max(start - kind.window + 1, 0)  # of S = stop - first keys
        rows = query[:, :, :, start:stop].reshape(batch, kv_heads, -1, dim)  # [B, K, G * block, D]
        before = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)  # [block, S], how far a key lies back
        visible = before >= 0 if kind.window is None else (before >= 0) & (before < kind.window)
        if segment_ids is not None:  # [B, 1, block, S]
            visible = visible & (segment_ids[:, None, start:stop, None] == segment_ids[:, None, None, first:stop])
        visible = jnp.concatenate([visible] * group, -2)  # [..., G * block, S]
        out = softmax_mix(rows, key[:, :, first:stop], value[:, :, first:stop], visible, kind)
        mixed.append(out.reshape(batch, kv_heads, group, -1, dim))
    return jnp.concatenate(mixed, 3).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)  # [B, T, H, D]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def softmax_mix(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array, kind: AttentionKind = PLAIN
) -> jax.Array:
    """softmax(scale · query keyᵀ) value, divided by the softmax's sum after the product with the values.

    This divides an [X, D] array instead of the [X, S] weights. The gradient is written out to reuse the exponentials
    and to avoid transposing an [X, S] array, which took most of the time of a training step on CPU.

    Args:
      query: [B, K, X, D]; key, value: [B, K, S, D].
      visible: bool[X, S] or [B, 1, X, S]; each row has at least one true entry.
      kind: whose scale and soft cap count; its window is a matter of `visible`.

    Returns [B, K, X, D] in query's dtype.
    """
    return _mix_forward(query, key, value, visible, kind)[0]


def _mix_forward(query, key, value, visible, kind):
    scores = _batched_dot(query, key, 3, 3) * kind.scale_of(query.shape[-1])  # [B, K, X, S]
    slope = None
    if kind.soft_cap is not None:
        bent = jnp.tanh(scores / kind.soft_cap)
        scores, slope = kind.soft_cap * bent, (1 - bent * bent).astype(query.dtype)
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(value.dtype)
    out = (_batched_dot(weights, value, 3, 2) / total).astype(query.dtype)  # [B, K, X, D]
    weights, total, out, slope = checkpoint_name((weights, total, out, slope), SAVED)
    return out, (query, key, value, weights, total, out, slope)


def _mix_backward(kind, saved, d_out):
    query, key, value, weights, total, out, slope = saved
    scale = kind.scale_of(query.shape[-1])
    d_mixed = d_out / total  # [B, K, X, D]
    d_weights = _batched_dot(d_mixed.astype(value.dtype), value, 3, 3) - (d_mixed * out).sum(-1, keepdims=True)
    d_scores = (weights * d_weights).astype(query.dtype)  # [B, K, X, S]; 0 where not visible
    if slope is not None:
        d_scores *= slope
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
