"""cuDNN's fused attention for NVIDIA GPUs, as JAX wraps it: rows of one sequence, packed rows, and pages.

JAX keeps the wrapper in a private module: tests/test_cudnn.py says what is used of it, and which JAX has what. cuDNN
adds up gradients, of plain and of packed rows, in no fixed order unless XLA_FLAGS=--xla_gpu_deterministic_ops=true.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as wrapper

from rpg_jax.models.attention import PLAIN, AttentionKind

HEAD = 8, 128, 256  # a head dimension is a multiple of the first, at most the second, and on Hopper GPUs the third
HOPPER = 9.0  # compute capability, the least for packed rows
SEQUENCES = 8  # of a packed row at most, for the memory of its backward pass is that of so many rows
GROUPED = jax.__version_info__ >= (0, 11, 1)  # before, keys of packed rows were looked for at the stride of queries
VERSION = 91200  # of cuDNN that `without_gpu` compiles for
TRACING = threading.RLock()  # held while functions are replaced


def largest_head(device: jax.Device) -> int:
    """The largest head dimension that the kernels take on a GPU."""
    return HEAD[2] if HOPPER <= float(device.compute_capability) < HOPPER + 1 else HEAD[1]


def takes_heads(device: jax.Device, head_dim: int) -> bool:
    """Whether the kernels take heads of `head_dim` numbers of 16 bits on a device."""
    return device.platform == "gpu" and head_dim % HEAD[0] == 0 and head_dim <= largest_head(device)


@contextlib.contextmanager
def replaced(**functions: Callable) -> Iterator[None]:
    """JAX's wrapper with these functions in place of its own, while programs are traced."""
    with TRACING:
        own = {name: getattr(wrapper, name) for name in functions}
        vars(wrapper).update(functions)
        try:
            yield
        finally:
            vars(wrapper).update(own)


def without_gpu() -> contextlib.AbstractContextManager:
    """For tracing and lowering programs for Hopper GPUs that are not there, whom JAX would ask what they can do."""
    return replaced(check_cudnn_version=lambda: VERSION, check_compute_capability=lambda least: float(least) <= HOPPER)


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

    Of `pool`, [pages, 2, page_size, kv_heads, head_dim], a page holds keys and then values, all in 16 bits; table is
    i32[R, W].
    """
    halves = pool.reshape(-1, *pool.shape[2:])  # keys of page p are entry 2 p, its values the next
    table = 2 * table[:, None, :, None]
    # JAX wants as many pages as the table has entries; XLA and cuDNN do not.
    with replaced(check_layout=lambda *arrays: None):
        out = wrapper.paged_attention(
            query[:, None], halves, halves, jnp.ones_like(lengths), lengths, table, table + 1, scale=scale,
            mask_type=wrapper.MaskType.PADDING,
        )  # fmt: skip
    return out[:, 0]
