"""Attention to sequences that lie in pages, by a running softmax whose time follows the tokens that there are.

Token t of row i is at offset t mod page_size of page table[i, t // page_size] of a pool.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rpg_jax.sampling import extremes

BLOCK = 128  # tokens that `running_softmax` reads in a turn, whatever the page size: so results do not depend on it
SHORT, ROUND = 256, 32  # sequences of at most SHORT tokens are read in one turn, of a multiple of ROUND
TILE, FEW = 32, 8  # rows that it works on together while most of them need another turn, and when few still do


def block_of(capacity: int) -> int:
    """Tokens that `running_softmax` reads in a turn for sequences of at most `capacity`."""
    return BLOCK if capacity > SHORT else -(-capacity // ROUND) * ROUND


def table_width(capacity: int, page_size: int) -> int:
    """Pages of a row of a table for sequences of at most `capacity` tokens: whole blocks."""
    return -(-capacity // block_of(capacity)) * block_of(capacity) // page_size


def tiled(x: jax.Array, most: int) -> jax.Array:
    """[R, ...] as [tiles, T, ...]: as few tiles as hold at most `most` rows each; zeros fill up the last one."""
    tiles = -(-x.shape[0] // most)
    padded = jnp.pad(x, ((0, -x.shape[0] % tiles),) + ((0, 0),) * (x.ndim - 1))
    return padded.reshape(tiles, -1, *x.shape[1:])


def reference(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, first: jax.Array) -> jax.Array:
    """What every kernel computes, in a few lines: the whole sequence of each row is gathered.

    Args:
      q: [R, C, heads, head_dim]; k, v: [pages, page_size, kv_heads, head_dim]; table: i32[R, W]; first: i32[R].

    Returns:
      [R, C, heads, head_dim].
    """
    rows, count, _, dim = q.shape
    k, v = (x[table].reshape(rows, -1, *x.shape[2:]) for x in (k, v))  # [R, W * page_size, kv_heads, head_dim]
    position = first[:, None] + jnp.arange(count)  # [R, C]
    visible = jnp.arange(k.shape[1]) <= position[..., None]  # [R, C, W * page_size]
    grouped = q.reshape(rows, count, k.shape[2], -1, dim)
    scores = jnp.einsum("rckgd,rtkd->rckgt", grouped, k) * dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rckgt,rtkd->rckgd", weights, v).reshape(q.shape)


def running_softmax(q: jax.Array, fetch: Callable, table: jax.Array, first: jax.Array, page_size: int) -> jax.Array:
    """Attention with a running softmax over blocks of pages, whose work follows the tokens that there are.

    Tables of one block are read in one turn. Of longer ones, rows are sorted by length: a tile of them takes turns
    together until half of them are through, and what is left goes on in tiles of a few. A row's result depends on its
    own sequence alone, and not on the page size: in each turn its columns are the same tokens.

    Args:
      q: [R, C, heads, head_dim], queries of the tokens first[r] + c; a row with first < 0 is idle, its result means
        nothing.
      fetch: pages i32[T, n] -> (k [T, kv_heads, head_dim, n * page_size], v [T, kv_heads, n * page_size, head_dim]).
      table: i32[R, W], with W pages a multiple of those of a block; first: i32[R].

    Returns:
      [R, C, heads, head_dim]; scores and sums are at least float32.
    """
    rows, count, heads, dim = q.shape
    width = table.shape[1] * page_size
    block = block_of(width)
    pages = block // page_size  # of a turn
    wide = jnp.promote_types(q.dtype, jnp.float32)
    kv_heads = jax.eval_shape(fetch, table[:, :1])[0].shape[1]
    group = heads // kv_heads
    last = jnp.tile(first[:, None] + jnp.arange(count), (1, group))  # [R, G * C], the last token that each query sees
    live = jnp.where(first < 0, 0, first + count)  # [R], tokens that the row's last query sees
    q = q.reshape(rows, count, kv_heads, group, dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, dim)

    def turns(row, carry, begin, end):
        """The turns from begin to end - 1 for rows of (q [T, K, G * C, D], table, last), on (largest, total, mixed)."""
        q, table, last = row

        def turn(index, carry):
            largest, total, mixed = carry
            k, v = fetch(jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1))
            scores = jnp.einsum("tkqd,tkdc->tkqc", q, k, preferred_element_type=wide) * dim**-0.5
            visible = index * block + jnp.arange(block) <= last[:, None, :, None]  # [T, 1, G * C, block]
            scores = jnp.where(visible, scores, -1e30)
            peak = jnp.maximum(largest, extremes.largest(scores))  # [T, K, G * C]
            weights, scale = jnp.exp(scores - peak[..., None]), jnp.exp(largest - peak)
            new = jnp.einsum("tkqc,tkcd->tkqd", weights.astype(v.dtype), v, preferred_element_type=wide)
            return peak, total * scale + weights.sum(-1), mixed * scale[..., None] + new

        return jax.lax.fori_loop(begin, end, turn, carry)

    def nothing_read(q):  # (largest, total, mixed) before the first turn
        zeros = jnp.zeros(q.shape[:3], wide)
        return zeros - 1e30, zeros, jnp.zeros(q.shape, wide)

    def attention(tile_rows):
        row, live = tile_rows  # of T rows, the longest first
        tile = live.size
        turns_of = -(-live // block)  # [T]
        carry = nothing_read(row[0])
        long = -(-(tile // 2) // FEW) * FEW if tile > FEW else 0  # rows, in tiles of a few, that may need more turns
        together = turns_of[long]
        carry = turns(row, carry, 0, together)

        def go_on(few):
            row, carry, turns_of = few
            return turns(row, carry, together, jnp.maximum(turns_of[0], together))

        def the_longest(carry):
            few = jax.tree.map(lambda x: x[:long].reshape(-1, FEW, *x.shape[1:]), (row, carry, turns_of))
            rest = jax.lax.map(go_on, few)
            return jax.tree.map(lambda x, y: jnp.concatenate([y.reshape(-1, *y.shape[2:]), x[long:]]), carry, rest)

        if long:
            carry = jax.lax.cond(turns_of[0] > together, the_longest, lambda carry: carry, carry)
        return normalized(*carry)

    def normalized(largest, total, mixed):
        return mixed / jnp.maximum(total, 1e-30)[..., None]

    def result(out):  # [R, K, G * C, D] -> [R, C, heads, head_dim]
        out = out.reshape(rows, kv_heads, group, count, dim)
        return out.transpose(0, 3, 1, 2, 4).reshape(rows, count, heads, dim).astype(q.dtype)

    if table.shape[1] == pages:
        return result(normalized(*turns((q, table, last), nothing_read(q), 0, 1)))
    order = jnp.argsort(-live, stable=True)  # [R], longest first
    tiles = jax.tree.map(lambda x: tiled(x[order], TILE), ((q, table, last), live))
    out = jax.lax.map(attention, tiles)  # [tiles, T, K, G * C, D]
    return result(out.reshape(-1, *out.shape[2:])[jnp.argsort(order)])
