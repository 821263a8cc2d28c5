"""The KV cache of the slots: a prompt's columns, then a ring of response columns that all slots write together.

Attention masks by the position stored with a column, never by the column itself. So a step's keys and values go to one
shared column, in place (a scatter to a column per slot would copy the cache on TPU), and a slot that is refilled only
has its row of positions reset. The ring is as long as the longest response, so no request overwrites its own entries.
Keys are kept transposed, columns last: both products of attention then read the cache as it lies.
"""

import jax
import jax.numpy as jnp

from rpg_jax.models import Model
from rpg_jax.types import pytree


@pytree
class KVCache:
    """Keys and values of each layer. capacity = prompt columns + ring columns."""

    k: list[jax.Array]  # [slots, kv_heads, head_dim, capacity] each
    v: list[jax.Array]  # [slots, kv_heads, capacity, head_dim] each
    position: jax.Array  # i32[slots, capacity], token index in the row; -1 where the column is empty for this slot


@pytree
class Prefix:
    """Keys and values of P prompts without their last tokens, which are the first inputs of decoding."""

    k: list[jax.Array]  # [P, kv_heads, head_dim, Tp] each
    v: list[jax.Array]  # [P, kv_heads, Tp, head_dim] each
    length: jax.Array  # i32[P], prompt length in tokens
    last: jax.Array  # i32[P], last prompt token


def empty_cache(model: Model, slots: int, capacity: int) -> KVCache:
    """A cache in the model's dtype with nothing in it."""
    config = model.config
    k_shape = (slots, config.kv_heads, config.head_dim, capacity)
    v_shape = (slots, config.kv_heads, capacity, config.head_dim)
    return KVCache(
        k=[jnp.zeros(k_shape, model.dtype) for _ in range(config.layers)],
        v=[jnp.zeros(v_shape, model.dtype) for _ in range(config.layers)],
        position=jnp.full((slots, capacity), -1, jnp.int32),
    )


def insert(cache: KVCache, prefix: Prefix, prompt: jax.Array, slot: jax.Array) -> KVCache:
    """Makes slot i32[] hold the prefix of prompt i32[] and nothing else."""

    def put(cached, rows):  # [slots, kv_heads, ...], [P, kv_heads, ...]
        row = jax.lax.dynamic_slice_in_dim(rows, prompt, 1)  # [1, kv_heads, ...]
        return jax.lax.dynamic_update_slice(cached, row, (slot, 0, 0, 0))

    columns = jnp.arange(cache.position.shape[1])
    position = jnp.where(columns < prefix.length[prompt] - 1, columns, -1)  # [capacity]
    return KVCache(
        k=jax.tree.map(put, cache.k, prefix.k),
        v=jax.tree.map(put, cache.v, prefix.v),
        position=cache.position.at[slot].set(position),
    )


def write(
    cached_k: jax.Array, cached_v: jax.Array, k: jax.Array, v: jax.Array, column: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One layer's cache with k, v [slots, 1, kv_heads, head_dim] written to the shared column i32[]."""
    return (
        jax.lax.dynamic_update_slice(cached_k, jnp.moveaxis(k, 1, 3), (0, 0, 0, column)),
        jax.lax.dynamic_update_slice(cached_v, jnp.moveaxis(v, 1, 2), (0, 0, column, 0)),
    )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention of one query a slot over the cache.

    Args:
      q: [slots, 1, heads, head_dim].
      k: [slots, kv_heads, head_dim, capacity]; v: [slots, kv_heads, capacity, head_dim].
      visible: bool[slots, capacity]; an idle slot sees nothing and gets the average of all values.

    Returns:
      [slots, 1, heads, head_dim].
    """
    slots, kv_heads, dim, _ = k.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = q.reshape(slots, kv_heads, -1, dim)  # [slots, kv_heads, heads / kv_heads, head_dim]
    scores = jnp.einsum("bkgd,bkdc->bkgc", grouped, k, preferred_element_type=wide) * dim**-0.5
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))  # [slots, kv_heads, heads / kv_heads, capacity]
    mixed = jnp.einsum("bkgc,bkcd->bkgd", weights.astype(v.dtype), v, preferred_element_type=wide)
    return (mixed / weights.sum(-1, keepdims=True)).reshape(q.shape).astype(q.dtype)
