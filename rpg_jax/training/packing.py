"""Microbatches of a batch: rows as they are, or several sequences packed into a row, and the way back.

A batch whose lengths vary is mostly padding. Packed, its sequences stand end to end in as few rows as hold them, told
apart by segment ids, with positions that start again for each. The plan is made on the host from lengths alone, so that
every process makes the same one, and it is data: one number a sequence. Shapes are those of the batch, of which only
the first microbatches are computed, so that no plan compiles anything anew.

The objective never sees packed rows: log-probs are computed on them and gathered back, one sequence a row.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rpg_jax import parallel


def plan(lengths, columns: int, rows: int, pack: bool):
    """How a batch goes into microbatches, decided on the host.

    Args:
      lengths: i32[B], tokens of each sequence that a gradient may depend on, from its first to its last trained one.
      columns: T, length of a row; rows: of a microbatch, dividing B.

    Returns:
      (number of microbatches i32[], start i32[B] of `first_fit` or None when not packed): what `update` is called with.
    """
    start, used = first_fit(lengths, columns) if pack else (None, len(lengths))
    return np.int32(-(-used // rows)), start


def first_fit(lengths, columns: int):
    """First-fit decreasing: each sequence, the longest first, goes into the first row that has room for it.

    Returns:
      start i32[B], where a sequence's first token stands, counted along row after row; B * columns for one without
      tokens, which stands nowhere. And the number of rows used, at most B.
    """
    lengths = np.asarray(lengths)
    room = np.full(len(lengths), columns)
    start = np.full(len(lengths), len(lengths) * columns, np.int32)
    for sequence in np.argsort(-lengths, kind="stable"):
        if lengths[sequence]:
            row = np.argmax(room >= lengths[sequence])
            start[sequence] = (row + 1) * columns - room[row]
            room[row] -= lengths[sequence]
    return start, int((room < columns).sum())


def row_lengths(mask):
    """Columns up to and including the last true one: bool[B, T] -> i32[B]."""
    return jnp.max(jnp.where(mask, jnp.arange(1, mask.shape[1] + 1, dtype=jnp.int32), 0), -1)


def lengths_on_host(mask) -> np.ndarray:
    """`row_lengths` of a global array, all of them on every process."""
    replicated = NamedSharding(parallel.mesh_of(mask), parallel.REPLICATED)
    return np.asarray(jax.jit(row_lengths, out_shardings=replicated)(mask))


def packed(start, lengths, tokens, mask, first, rows: int) -> dict:
    """Packed rows `first` to `first + rows` of a batch, as keyword arguments of `token_logprobs`.

    Args:
      start: i32[B], of `first_fit`; lengths: i32[B]; tokens: i32[B, T]; mask: bool[B, T]; first: i32[].

    Returns:
      tokens, mask, positions and segment_ids, each [rows, T]; padding is a segment of its own.
    """
    columns = tokens.shape[1]
    begin = start - first * columns
    begins = jnp.zeros(rows * columns, jnp.int32).at[jnp.where(begin < 0, rows * columns, begin)].add(1, mode="drop")
    sequence = jnp.argsort(start)[(begin < 0).sum() + jnp.cumsum(begins) - 1]
    position = jnp.arange(rows * columns, dtype=jnp.int32) - begin[sequence]
    real = (position >= 0) & (position < lengths[sequence])
    source = jnp.where(real, sequence * columns + position, 0)
    flat = dict(
        tokens=jnp.where(real, tokens.reshape(-1)[source], 0),
        mask=real & mask.reshape(-1)[source],
        positions=jnp.where(real, position, 0),
        segment_ids=jnp.where(real, sequence, -1).astype(jnp.int32),
    )
    return {name: array.reshape(rows, columns) for name, array in flat.items()}


def unpacked(start, values):
    """The way back: values [R, T] of packed rows to [B, T], column t of a sequence's token t.

    Off a sequence's own tokens, and where `start` leads out of the R rows, it holds zeros or values of others. Slices,
    not single numbers, are gathered: a sequence stands in one piece.
    """
    columns = values.shape[1]
    flat = jnp.pad(values.reshape(-1), (columns, columns))
    begin = jnp.clip(start + columns, 0, flat.size - columns)
    return jax.vmap(lambda at: jax.lax.dynamic_slice(flat, (at,), (columns,)))(begin)


def split_rows(mesh, tree, rows: int):
    """[B, ...] leaves to [B / rows, rows, ...], rows spread over the mesh. For use inside jit."""
    sharding = NamedSharding(mesh, parallel.MICROBATCHES)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x.reshape(-1, rows, *x.shape[1:]), sharding), tree)


def entry(tree, index):
    """Entry `index` of every leaf."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def model_rows(mesh, start, tokens, mask, rows: int):
    """Builds `take(index) -> keyword arguments of token_logprobs`: the rows of a microbatch, packed if `start` says."""
    if start is None:
        whole = split_rows(mesh, dict(tokens=tokens, mask=mask), rows)
        return lambda index: entry(whole, index)
    lengths, spread = row_lengths(mask), NamedSharding(mesh, parallel.ROWS)

    def take(index):
        return jax.lax.with_sharding_constraint(packed(start, lengths, tokens, mask, index * rows, rows), spread)

    return take


def standing_in(start, index, size: int):
    """Which sequences stand in microbatch `index` of `size` tokens: bool[B, 1]."""
    return (start // size == index)[:, None]


def microbatches(mesh, start, batch, rows: int):
    """Builds `micro(index) -> (rows of the model, sequences, undo)` over a `TrainBatch`.

    The rows are keyword arguments of `token_logprobs`, the sequences a TrainBatch, one a row, and `undo` brings
    log-probs of those rows to the sequences' columns. Of packed rows the sequences are the whole batch with the mask of
    those that stand in this microbatch: as many as there may be, and cheap beside the model.
    """
    take = model_rows(mesh, start, batch.tokens, batch.response_mask, rows)
    if start is None:
        sequences = split_rows(mesh, batch, rows)
        return lambda index: (take(index), entry(sequences, index), lambda logp: logp)
    size = rows * batch.tokens.shape[1]

    def micro(index):
        sequences = dataclasses.replace(batch, response_mask=batch.response_mask & standing_in(start, index, size))
        return take(index), sequences, lambda logp: unpacked(start - index * size, logp)

    return micro


def map_rows(function, mesh, start, count, tokens, mask, rows: int):
    """`function(**rows of the model) -> tuple of [rows, T]` over the first `count` (i32[]) microbatches.

    Returns:
      the tuple, each [B, T], one sequence a row; zeros off the mask and where nothing was computed.
    """
    take, size = model_rows(mesh, start, tokens, mask, rows), rows * tokens.shape[1]
    # Unpacked values are put together as they come, spread over the mesh like the rows of a microbatch.
    shape = (-1, rows, tokens.shape[1]) if start is None else tokens.shape
    spread = NamedSharding(mesh, parallel.MICROBATCHES if start is None else parallel.ROWS)

    def put(index, values, new):
        if start is None:
            return values.at[index].set(new)
        return jnp.where(mask & standing_in(start, index, size), unpacked(start - index * size, new), values)

    def body(index, values):
        values = jax.tree.map(lambda old, new: put(index, old, new), values, function(**take(index)))
        return jax.lax.with_sharding_constraint(values, spread)

    kinds = jax.eval_shape(lambda: function(**take(0)))
    nothing = jax.tree.map(lambda x: jnp.zeros(tokens.shape, x.dtype).reshape(shape), kinds)
    return jax.tree.map(lambda x: x.reshape(tokens.shape), jax.lax.fori_loop(0, count, body, nothing))
