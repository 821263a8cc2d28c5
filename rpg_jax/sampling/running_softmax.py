"""Attention to sequences that lie in pages, by a running softmax whose time follows the tokens that there are.

Token t of row i is at offset t mod page_size of page table[i, t // page_size] of a pool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rpg_jax.models.attention import AttentionKind

BLOCK = 128  # tokens that `running_softmax` reads in a turn, whatever the page size: so results do not depend on it
SHORT, ROUND = 256, 32  # sequences of at most SHORT tokens are read in one turn, of a multiple of ROUND
TILE = 32  # rows of similar length, which take their turns together


def block_of(capacity: int) -> int:
    """Tokens that `running_softmax` reads in a turn for sequences of at most `capacity`."""
    return BLOCK if capacity > SHORT else -(-capacity // ROUND) * ROUND


def table_width(capacity: int, page_size: int) -> int:
    """Pages of a row of a table for sequences of at most `capacity` tokens: whole blocks."""
    return -(-capacity // block_of(capacity)) * block_of(capacity) // page_size


def capped(scores: jax.Array, dim: int, kind: AttentionKind) -> jax.Array:
    """Products of queries and keys of `dim` numbers, scaled, and soft-capped if the kind has a cap."""
    scores = scores * kind.scale_of(dim)
    return scores if kind.soft_cap is None else kind.soft_cap * jnp.tanh(scores / kind.soft_cap)


def sees(query: jax.Array, key: jax.Array, kind: AttentionKind) -> jax.Array:
    """Whether queries at these positions see keys at those."""
    visible = key <= query
    return visible if kind.window is None else visible & (key > query - kind.window)


def running_softmax(
    q: jax.Array, fetch: Callable, table: jax.Array, first: jax.Array, page_size: int, kind: AttentionKind,
    block: int | None = None,
) -> jax.Array:  # fmt: skip
    """Attention by a running softmax over blocks of pages.

    Rows are sorted by length, and a tile of them takes turns until its longest row is through. A row's result depends
    on its own sequence alone, and not on the page size: in each turn its columns are the same tokens, and a turn beyond
    its end changes nothing.

    Args:
      q: [R, C, heads, head_dim], queries of the tokens first[r] + c; a row with first < 0 is idle, its result means
        nothing.
      fetch: pages i32[T, n] -> (k [T, kv_heads, head_dim, n * page_size], v [T, kv_heads, n * page_size, head_dim]).
      table: i32[R, W], with W pages a multiple of those of a block; first: i32[R].
      block: tokens that are read in a turn; `block_of` what W pages hold if None.

    Returns [R, C, heads, head_dim]; scores and sums are at least float32.
    """
    rows, count, heads, dim = q.shape
    block = block or block_of(table.shape[1] * page_size)
    pages = block // page_size  # of a turn
    wide = jnp.promote_types(q.dtype, jnp.float32)
    kv_heads = jax.eval_shape(fetch, table[:, :1])[0].shape[1]
    group = heads // kv_heads
    last = jnp.tile(first[:, None] + jnp.arange(count), (1, group))  # [R, G * C], the token of each query
    turns = jnp.where(first < 0, 0, -(-(first + count) // block))  # [R]
    # Blocks before those that a query of the row sees.
    skipped = jnp.zeros_like(turns) if kind.window is None else jnp.maximum(first - kind.window + 1, 0) // block
    q = q.reshape(rows, count, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)

    def attention(tile):
        q, table, last, begin, end = tile  # [T, K, G * C, D], [T, W], [T, G * C], [T], [T]

        def turn(index, carry):
            largest, total, mixed = carry
            k, v = fetch(jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1))
            scores = capped(jnp.einsum("tkqd,tkdc->tkqc", q, k, preferred_element_type=wide), dim, kind)
            visible = sees(last[..., None], index * block + jnp.arange(block), kind)[:, None]  # [T, 1, G * C, block]
            scores = jnp.where(visible, scores, -1e30)
            peak = jnp.maximum(largest, scores.max(-1))  # [T, K, G * C]
            weights, scale = jnp.exp(scores - peak[..., None]), jnp.exp(largest - peak)
            new = jnp.einsum("tkqc,tkcd->tkqd", weights.astype(v.dtype), v, preferred_element_type=wide)
            return peak, total * scale + weights.sum(-1), mixed * scale[..., None] + new

        zeros = jnp.zeros(q.shape[:3], wide)
        carry = zeros - 1e30, zeros, jnp.zeros(q.shape, wide)
        if table.shape[1] == pages:
            _, total, mixed = turn(0, carry)
        else:
            _, total, mixed = jax.lax.fori_loop(begin.min(), end.max(), turn, carry)
        return mixed / jnp.maximum(total, 1e-30)[..., None]

    tile = q, table, last, skipped, turns
    if table.shape[1] == pages or rows <= TILE:
        out = attention(tile)  # [R, K, G * C, D]
    else:
        order = jnp.argsort(-turns, stable=True)  # [R], longest first; zeros fill up the last tile
        index = jnp.pad(order, (0, -rows % TILE), constant_values=rows).reshape(-1, TILE)
        out = jax.lax.map(attention, jax.tree.map(lambda x: x.at[index].get(mode="fill", fill_value=0), tile))
        out = out.reshape(-1, *out.shape[2:])[jnp.argsort(order)]
    out = out.reshape(rows, kv_heads, group, count, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, dim).astype(q.dtype)
