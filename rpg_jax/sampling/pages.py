"""Which pages of the KV cache belong to whom: a stack of free pages, and tables of those that sequences hold.

Everything is arrays of fixed shape, so that pages change hands inside a jitted loop. A row of a table is valid in its
first `held` entries; what follows is left over, and is never read by attention.
"""

import jax
import jax.numpy as jnp

from rpg_jax.types import pytree

NOWHERE = jnp.iinfo(jnp.int32).max  # an index beyond every array: what is written there is dropped


@pytree
class Free:
    """A stack of free pages; [1] on each data shard."""

    stack: jax.Array  # i32[pages]; the first `count` entries are free pages
    count: jax.Array  # i32[1]


def _ranks(table: jax.Array, begin: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """bool[R, W], the entries begin to end - 1 of each row, and i32[R, W], how many of them come before each."""
    entries = jnp.arange(table.shape[1])
    counts = jnp.maximum(end - begin, 0)  # [R]
    meant = (entries >= begin[:, None]) & (entries < end[:, None])
    return meant, (jnp.cumsum(counts) - counts - begin)[:, None] + entries


def take(free: Free, table: jax.Array, begin: jax.Array, end: jax.Array) -> tuple[Free, jax.Array]:
    """Every row of a table, i32[R, W], gets free pages at its entries begin to end - 1, i32[R] each.

    There must be so many; a row with begin = end gets none.
    """
    meant, rank = _ranks(table, begin, end)
    page = free.stack[jnp.clip(free.count[0] - 1 - rank, 0, free.stack.size - 1)]
    return Free(free.stack, free.count - meant.sum()), jnp.where(meant, page, table)


def give_back(free: Free, table: jax.Array, begin: jax.Array, end: jax.Array) -> Free:
    """The pages at entries begin to end - 1, i32[R] each, of every row of a table, i32[R, W], are free again."""
    meant, rank = _ranks(table, begin, end)
    target = jnp.where(meant, free.count[0] + rank, NOWHERE)
    return Free(free.stack.at[target].set(table, mode="drop"), free.count + meant.sum())
