"""Which pages of the KV cache belong to whom: a stack of free pages, and tables of those that sequences hold.

Everything is arrays of fixed shape, so that pages change hands inside a jitted loop. A row of a table is valid in its
first `held` entries; what follows is left over, and is never read by attention.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax.types import pytree


@pytree
class Free:
    """A stack of free pages; [1] on each data shard."""

    stack: jax.Array  # i32[pages + W]; the first `count` entries are free pages, W is the width of tables
    count: jax.Array  # i32[1]


def all_free(pages: int, width: int) -> Free:
    """All of `pages` pages free, for tables of `width` entries a row."""
    return Free(jnp.arange(pages + width, dtype=jnp.int32), jnp.full(1, pages, jnp.int32))


def take(free: Free, table: jax.Array, row: jax.Array, begin: jax.Array, count: jax.Array) -> tuple[Free, jax.Array]:
    """Row i32[] of the table gets `count` free pages at its entries begin, begin + 1, ...; there must be so many."""
    width = table.shape[1]
    left = free.count[0] - count
    pages = jax.lax.dynamic_slice(free.stack, (left,), (width,))  # the first `count` are meant
    entries = jnp.arange(width)
    new = jnp.where(entries < begin, table[row], pages[(entries - begin) % width])
    return dataclasses.replace(free, count=free.count - count), table.at[row].set(new)


def take_one_each(free: Free, table: jax.Array, rows: jax.Array, entry: jax.Array) -> tuple[Free, jax.Array]:
    """Every row that is true in `rows`, bool[rows], gets a free page at its own entry, i32[rows]."""
    rank = jnp.cumsum(rows) - 1
    page = free.stack[jnp.maximum(free.count[0] - 1 - rank, 0)]
    target = jnp.where(rows, jnp.arange(rows.size), rows.size)  # out of range: dropped
    table = table.at[target, entry].set(page, mode="drop")
    return dataclasses.replace(free, count=free.count - rows.sum()), table


def give_back(free: Free, table: jax.Array, row: jax.Array, begin: jax.Array, end: jax.Array) -> Free:
    """The pages at entries begin to end - 1 of row i32[] are free again."""
    width = table.shape[1]
    pages = table[row][(jnp.arange(width) + begin) % width]  # the first end - begin are meant
    stack = jax.lax.dynamic_update_slice(free.stack, pages, (free.count[0],))
    return Free(stack, free.count + jnp.maximum(end - begin, 0))
