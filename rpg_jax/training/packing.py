"""Microbatches of a batch: rows as they are, or several sequences packed into a row, and the way back.

A batch whose lengths vary is mostly padding. Packed, its sequences stand end to end in as few rows as hold them, with
a segment id of their own and positions that start again for each. The host plans this from lengths alone, so that all
processes make the same plan. A plan is data, one number for each sequence. Packed rows have W columns, at least the T
of the batch, and are at most as many as its rows, of which only the first microbatches are computed: no plan compiles
anything anew.

The objective never sees packed rows: log-probs are computed on them and gathered back, one sequence a row.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from rpg_jax import parallel
from rpg_jax.types import TrainBatch

Rows = Callable[[ArrayLike], dict[str, jax.Array]]  # microbatch index i32[] -> keyword arguments of `token_logprobs`
Microbatch = tuple[dict[str, jax.Array], TrainBatch, Callable[[jax.Array], jax.Array]]


class Plan(NamedTuple):
    """How a batch goes into microbatches."""

    count: Any  # i32[], of the microbatches; on the host or the device
    start: Any  # i32[B] of `first_fit`; None where each sequence has a row


def plan(lengths: np.ndarray, rows: int, columns: int | None, most: int | None = None) -> Plan:
    """How a batch goes into microbatches, decided on the host.

    Args:
      lengths: i32[B], tokens of each sequence.
      rows: of a microbatch, a divisor of B; columns: W, of a packed row; None is one sequence a row.
      most: sequences of a packed row; None is as many as it has room for.
    """
    start, used = (None, len(lengths)) if columns is None else first_fit(lengths, columns, most)
    if columns and most:  # where long sequences share rows, short ones run out of places in the others
        least = -(-np.sum(lengths) // (rows * columns)) * rows  # rows that hold so many tokens
        start, used = min((start, used), first_fit(lengths, columns, most, least), key=lambda fit: fit[1])
    return Plan(np.int32(-(-used // rows)), start)


def first_fit(lengths: np.ndarray, columns: int, most: int | None = None, spread: int = 0) -> tuple[np.ndarray, int]:
    """First-fit decreasing: each sequence, the longest first, goes into the first row that has room for it, and fewer
    than `most` others; or, of the first `spread` rows, into the one with the most room for each place that is left.

    Returns start i32[B], the index of each sequence's first token when all rows are laid end to end; B * columns, which
    is beyond the last row, for a sequence without tokens. And the number of rows used, at most B.
    """
    lengths = np.asarray(lengths)
    room = np.full(len(lengths), columns)  # free columns of each row
    places = np.full(len(lengths), most or columns)  # free for sequences
    first = np.arange(len(lengths)) < spread
    start = np.full(len(lengths), len(lengths) * columns, np.int32)
    for sequence in np.argsort(-lengths, kind="stable"):
        if lengths[sequence]:
            preferred = 1 + first * room / places.clip(1) if spread else 1
            row = np.argmax((room >= lengths[sequence]) * (places > 0) * preferred)
            start[sequence] = (row + 1) * columns - room[row]
            room[row] -= lengths[sequence]
            places[row] -= 1
    return start, int((room < columns).sum())


def on_host(length: jax.Array) -> np.ndarray:
    """The lengths of all rows, i32[B], whole on every process."""
    return np.asarray(jax.device_put(length, NamedSharding(parallel.mesh_of(length), parallel.REPLICATED)))


def packed(
    start: jax.Array, lengths: jax.Array, tokens: jax.Array, mask: jax.Array, first: jax.Array, rows: int, columns: int,
    routes: jax.Array | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """Packed rows `first` to `first + rows` of a batch, as keyword arguments of `token_logprobs`.

    Args:
      start: i32[B], of `first_fit`; lengths: i32[B], tokens of each sequence; tokens: i32[B, T]; mask: bool[B, T];
      first: i32[].
      columns: W, of a packed row; routes: [B, T, N], or None.

    Returns:
      tokens, mask, positions, segment_ids and routes, each [rows, W, ...]; padding is a segment of its own.
    """
    begin = start - first * columns  # [B], relative to the first of these rows
    # [rows * W] each from here on. How many sequences begin at a slot, then which sequence covers it:
    begins = jnp.zeros(rows * columns, jnp.int32).at[jnp.where(begin < 0, rows * columns, begin)].add(1, mode="drop")
    sequence = jnp.argsort(start)[(begin < 0).sum() + jnp.cumsum(begins) - 1]
    position = jnp.arange(rows * columns, dtype=jnp.int32) - begin[sequence]
    real = (position >= 0) & (position < lengths[sequence])  # false on padding
    source = jnp.where(real, sequence * tokens.shape[1] + position, 0)  # index into the batch's tokens, flat
    flat = dict(
        tokens=jnp.where(real, tokens.reshape(-1)[source], 0),
        mask=real & mask.reshape(-1)[source],
        positions=jnp.where(real, position, 0),
        segment_ids=jnp.where(real, sequence, -1).astype(jnp.int32),
        routes=None if routes is None else jnp.where(real[:, None], routes.reshape(mask.size, -1)[source], 0),
    )
    return jax.tree.map(lambda array: array.reshape(rows, columns, *array.shape[1:]), flat)


def unpacked(start: jax.Array, values: jax.Array, columns: int) -> jax.Array:
    """The way back: values [R, W] of packed rows to [B, T], where column t is that of a sequence's token t.

    Beyond a sequence's own tokens, and where `start` i32[B] lies outside the R rows, the result holds zeros or values
    of other sequences. A sequence is contiguous, so slices are gathered instead of single numbers. `columns` is T.
    """
    flat = jnp.pad(values.reshape(-1), (columns, columns))  # [R * W + 2 * T]
    begin = jnp.clip(start + columns, 0, flat.size - columns)  # [B]
    return jax.vmap(lambda at: jax.lax.dynamic_slice(flat, (at,), (columns,)))(begin)


def split_rows(mesh: Mesh, tree: Any, rows: int) -> Any:
    """[B, ...] leaves to [B / rows, rows, ...], rows spread over the mesh. For use inside jit."""
    sharding = NamedSharding(mesh, parallel.MICROBATCHES)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x.reshape(-1, rows, *x.shape[1:]), sharding), tree)


def entry(tree: Any, index: ArrayLike) -> Any:
    """Entry `index` of every leaf."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def model_rows(
    mesh: Mesh, start: jax.Array | None, tokens: jax.Array, length: jax.Array, mask: jax.Array, rows: int, columns: int,
    routes: jax.Array | None,
) -> Rows:  # fmt: skip
    """The rows of a microbatch by its index: packed at `start` in `columns`, or as they are if that is None."""
    if start is None:
        whole = split_rows(mesh, dict(tokens=tokens, mask=mask, routes=routes), rows)
        return lambda index: entry(whole, index)
    spread = NamedSharding(mesh, parallel.ROWS)

    def take(index):
        chosen = packed(start, length, tokens, mask, index * rows, rows, columns, routes)
        return jax.lax.with_sharding_constraint(chosen, spread)

    return take


def microbatches(
    mesh: Mesh, start: jax.Array | None, batch: TrainBatch, rows: int, columns: int | None = None
) -> Callable[[ArrayLike], Microbatch]:
    """Builds `micro(index) -> (rows for the model, sequences, undo)`.

    The rows are keyword arguments of `token_logprobs`, the sequences have one row each, and `undo` maps log-probs of
    the model's rows to the sequences' columns. Packed, the sequences are the whole batch with a mask of those that this
    microbatch holds: their number varies, shapes may not, and the objective is cheap beside the model. `columns` are
    those of a packed row; None is the batch's.
    """
    length = batch.tokens.shape[1]
    columns = columns or length
    take = model_rows(mesh, start, batch.tokens, batch.length, batch.loss_mask, rows, columns, batch.routes)
    if start is None:
        sequences = split_rows(mesh, batch, rows)
        return lambda index: (take(index), entry(sequences, index), lambda logp: logp)
    size = rows * columns

    def micro(index):
        sequences = dataclasses.replace(batch, loss_mask=batch.loss_mask & (start // size == index)[:, None])
        return take(index), sequences, lambda logp: unpacked(start - index * size, logp, length)

    return micro


def map_rows(
    function: Callable[..., tuple[jax.Array, ...]], mesh: Mesh, plan: Plan, tokens: jax.Array, length: jax.Array,
    mask: jax.Array, rows: int, columns: int | None = None, routes: jax.Array | None = None,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`function(**rows for the model) -> tuple of [rows, W]` over the microbatches of a plan.

    W is the `columns` of a packed row; None is the T of the batch.

    Returns the tuple, each [B, T], one sequence a row; zeros off the mask and in sequences of other microbatches.
    """
    (count, start), width = plan, tokens.shape[1]
    columns = columns or width
    take, size = model_rows(mesh, start, tokens, length, mask, rows, columns, routes), rows * columns
    # Rows as they are give values of one microbatch after another, spread over the mesh as its rows are.
    shape = (-1, rows, width) if start is None else tokens.shape
    spread = NamedSharding(mesh, parallel.MICROBATCHES if start is None else parallel.ROWS)

    def put(index, values, new):
        if start is None:
            return values.at[index].set(new)
        return jnp.where(mask & (start // size == index)[:, None], unpacked(start - index * size, new, width), values)

    @partial(jax.jit, inline=True)  # traced once, for shapes and in the loop, whose index is of the type of 0
    def found(index):
        return function(**take(index))

    def body(index, values):
        values = jax.tree.map(lambda old, new: put(index, old, new), values, found(index))
        return jax.lax.with_sharding_constraint(values, spread)

    shapes = jax.eval_shape(found, 0)
    nothing = jax.tree.map(lambda x: jnp.zeros(tokens.shape, x.dtype).reshape(shape), shapes)
    return jax.tree.map(lambda x: x.reshape(tokens.shape), jax.lax.fori_loop(0, count, body, nothing))
