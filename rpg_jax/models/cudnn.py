"""cuDNN's fused attention for NVIDIA GPUs, as JAX wraps it: rows of one sequence, packed rows, and pages.

JAX keeps the wrapper in a private module: tests/test_cudnn.py says what is used of it, and which JAX has what. cuDNN
adds up gradients, of plain and of packed rows, in no fixed order unless XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""

from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as wrapper

from rpg_jax import InputError
from rpg_jax.models.attention import PLAIN, AttentionKind

AMPERE, HOPPER = 8.0, 9.0  # compute capabilities, the least for rows of one sequence and for packed rows
SEQUENCES = 8  # of a packed row at most, for the memory of its backward pass is that of so many rows
GROUPED = jax.__version_info__ >= (0, 11, 1)  # before, keys of packed rows were looked for at the stride of queries
replaced = partial(mock.patch.multiple, wrapper)  # a context in which JAX's functions are these, by name


def without_gpu(capability: float = HOPPER, version: tuple[int, int, int] = (9, 12, 0)) -> AbstractContextManager:
    """The context for lowering programs for GPUs of a compute capability that are not there, with a version of cuDNN:
    JAX would ask those that are. It is the whole process's, so no thread may leave it while another lowers."""
    major, minor, patch = version
    return replaced(
        check_cudnn_version=lambda: major * 10000 + minor * 100 + patch,
        check_compute_capability=lambda least: capability >= float(least),
    )


def capability_of(device: jax.Device) -> float:
    """The compute capability of an NVIDIA GPU; 0 of other devices, also of AMD's GPUs, whose name there is gfx942."""
    name = device.compute_capability if device.platform == "gpu" else "none"
    return float(name) if name[0].isdigit() else 0.0


def largest_head(device: jax.Device) -> int:
    """The largest head dimension, a multiple of 8, that the kernels take on a device; 0 of none."""
    found = capability_of(device)
    return 0 if found < AMPERE else 256 if HOPPER <= found < HOPPER + 1 else 128


def segments(segment_ids: jax.Array, places: int) -> tuple[jax.Array, jax.Array]:
    """Where the runs of equal ids in each row of i32[B, T] begin, i32[B, places + 1], and how long they are,
    i32[B, places]; -1 where there are no more."""
    new = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    index = jnp.cumsum(new, axis=1)  # [B, T], of the run that a token is in
    begin = (index[:, None] < jnp.arange(places + 1)[:, None]).sum(2, dtype=jnp.int32)  # T where there are no more
    length = begin[:, 1:] - begin[:, :-1]
    return jnp.where(begin < segment_ids.shape[1], begin, -1), jnp.where(length > 0, length, -1)


def attention(query, key, value, segment_ids=None, kind: AttentionKind = PLAIN) -> jax.Array:
    """`causal_attention` in 16 bits, without soft caps. Of packed rows, which need a Hopper GPU, one with more than
    `SEQUENCES` segments beside its padding is not a number."""
    if segment_ids is None:
        window = None if kind.window is None else (kind.window - 1, 0)
        return jax.nn.dot_product_attention(
            query, key, value, scale=kind.scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )
    if query.size >= 2**31:  # offsets into it are int32
        raise InputError(
            f"{query.shape[0]} packed rows of {query.shape[1]} tokens on a GPU have {query.size} numbers of queries, "
            f"and cuDNN takes fewer than 2**31: lower learner.microbatch_rows and learner.scoring_rows"
        )
    if not GROUPED:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    begin, length = segments(segment_ids, SEQUENCES + 1)  # padding is a segment, so that every token is computed
    out = wrapper.dot_product_attention(
        query, key, value, q_seqlen=length, kv_seqlen=length, q_offsets=begin, kv_offsets=begin,
        scale=kind.scale_of(query.shape[-1]), mask_type=wrapper.MaskType.PADDING_CAUSAL,
        sliding_window_length=kind.window,
    )  # fmt: skip
    return jnp.where((begin[:, -1] < 0)[:, None, None, None], out, jnp.nan)


def paged_attention(query: jax.Array, pool: jax.Array, table: jax.Array, lengths: jax.Array, scale: float) -> jax.Array:
    """Attention of one query a row, [R, heads, head_dim], to the first `lengths` tokens, i32[R], of the row's pages.

    A page of `pool`, [pages, 2, page_size, kv_heads, head_dim], is keys and then values, in 16 bits; table: i32[R, W].
    """
    halves = pool.reshape(-1, *pool.shape[2:])  # keys of page p are entry 2 p, its values the next
    table = 2 * table[:, None, :, None]
    with replaced(check_layout=lambda *arrays: None):  # it wants as many pages as entries; XLA and cuDNN do not
        out = wrapper.paged_attention(
            query[:, None], halves, halves, jnp.ones_like(lengths), lengths, table, table + 1, scale=scale,
            mask_type=wrapper.MaskType.PADDING,
        )  # fmt: skip
    return out[:, 0]
