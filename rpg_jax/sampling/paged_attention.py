"""Attention over a paged KV cache: plain JAX for any platform, kernels for TPUs and GPUs, and the choice of one.

A layer's keys and values lie in a pool of pages, and a row of a table names the pages of a sequence in order: token t
of row i is at offset t mod page_size of page table[i, t // page_size]. A `Kernel` is how the pool is laid out, how keys
and values are written there, and the attention of C consecutive queries a row to all tokens up to their own.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from rpg_jax import InputError
from rpg_jax.models import ModelConfig, cudnn
from rpg_jax.models.attention import AttentionKind
from rpg_jax.models.quantization import LARGEST, Quantized, dequantize, quantize
from rpg_jax.parallel import ROW_AXES
from rpg_jax.sampling.running_softmax import BLOCK, running_softmax

Pool = tuple[jax.Array, ...]  # one layer's arrays

KERNEL_TOKENS, KERNEL_QUERIES = 1024, 32  # tokens and queries of a block of the TPU kernel
FLOAT8_CAPABILITY = 8.9  # of GPUs that have float8
KERNEL_VMEM = 32 << 20  # bytes for its blocks: 32 query heads with 8 KV heads need more than the default, 16 MiB


class Kernel(NamedTuple):
    """A layout of the pool and the functions that know it; hashable, so it can be a static argument."""

    name: str
    spec: PartitionSpec  # of each of a layer's arrays: pages over data shards, KV heads over tensor
    empty: Callable[..., Pool]  # (config, dtype, pages, page_size)
    # (pool, k, v [N, kv_heads, head_dim], page, offset i32[N]); what goes to a page out of range is dropped
    write: Callable[..., Pool]
    # (q [R, C, heads, head_dim], pool, table i32[R, W], first i32[R], page_size, AttentionKind)
    attend: Callable[..., jax.Array]

    @property
    def rows(self) -> PartitionSpec:
        """The spec without the tensor axis, as `parallel.over_rows` splits the arrays."""
        return PartitionSpec(*(axis if axis == ROW_AXES else None for axis in self.spec))


def choose(
    mesh: Mesh, config: ModelConfig, page_size: int, cache_dtype: str | None = None, dtype: DTypeLike = jnp.bfloat16
) -> Kernel:
    """The kernel for a mesh's platform and a model's heads and dtype: `ragged` on TPU, `cudnn` on GPU, else `blocks`.

    Raises ValueError for a page size, in tokens, or a type of keys and values that the kernel does not take.
    """
    device = mesh.devices.flat[0]
    platform = device.platform
    if page_size < 1 or page_size & (page_size - 1) or page_size > BLOCK:
        raise InputError(f"page_size is {page_size}; it must be a power of two and at most {BLOCK}")
    kernel = BLOCKS
    if platform == "tpu" and config.head_dim % 128 == 0:
        kernel = RAGGED
    if platform == "gpu" and cache_dtype not in LARGEST and jnp.dtype(dtype).itemsize == 2 and config.head_dim % 8 == 0:
        kernel = CUDNN if config.head_dim <= cudnn.largest_head(device) else BLOCKS
    if kernel is not BLOCKS and page_size < 16:
        raise InputError(f"page_size is {page_size}; the {platform.upper()} kernel takes at least 16")
    if kernel is RAGGED and cache_dtype == "int8":
        raise InputError("cache_dtype is int8; the TPU kernel has no scale for each token, so use float8_e4m3fn")
    if platform == "gpu" and cache_dtype == "float8_e4m3fn" and cudnn.capability_of(device) < FLOAT8_CAPABILITY:
        raise InputError(
            f"cache_dtype is float8_e4m3fn; this GPU's compute capability is {device.compute_capability}, and it takes "
            f"{FLOAT8_CAPABILITY}: use int8"
        )
    return kernel


def copy_page(pool: Pool, source: jax.Array, target: jax.Array) -> Pool:
    """The pool with page i32[] `source` in place of page i32[] `target`, whatever its layout."""
    page = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, source, 1), pool)
    return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, target, 0), pool, page)


# blocks: k [pages, kv_heads, head_dim, page_size], v [pages, kv_heads, page_size, head_dim]. Both products of attention
# read it as it lies. In 8 bits, two arrays more: scales f32[pages, kv_heads, page_size] of keys, and of values.


def _blocks_empty(config, dtype, pages, page_size):
    shape = pages, config.kv_heads
    k = jnp.zeros((*shape, config.head_dim, page_size), dtype)
    v = jnp.zeros((*shape, page_size, config.head_dim), dtype)
    scales = (jnp.zeros((*shape, page_size), jnp.float32),) * 2
    return (k, v, *scales) if jnp.dtype(dtype).name in LARGEST else (k, v)


def _blocks_write(pool, k, v, page, offset):
    scales: tuple = ()
    if len(pool) > 2:
        k, v = (quantize(x, pool[0].dtype, -1) for x in (k, v))
        k, v, scales = k.values, v.values, (k.scales, v.scales)
    new = pool[0].at[page, :, :, offset].set(k, mode="drop"), pool[1].at[page, :, offset].set(v, mode="drop")
    return new + tuple(array.at[page, :, offset].set(x, mode="drop") for array, x in zip(pool[2:], scales, strict=True))


def _blocks_attend(q, pool, table, first, page_size, kind):
    def fetch(pages):  # i32[T, n]
        k, v, *scales = (array[pages] for array in pool)  # [T, n, kv_heads, ...]
        if scales:
            k, v = dequantize(Quantized(k, scales[0]), 3, q.dtype), dequantize(Quantized(v, scales[1]), 4, q.dtype)
        k, v = jnp.moveaxis(k, 1, -2), jnp.moveaxis(v, 1, 2)  # [T, kv_heads, head_dim, n, ...], [T, kv_heads, n, ...]
        return k.reshape(*k.shape[:3], -1), v.reshape(*v.shape[:2], -1, v.shape[-1])

    return running_softmax(q, fetch, table, first, page_size, kind)


BLOCKS = Kernel("blocks", PartitionSpec(ROW_AXES, "tensor"), _blocks_empty, _blocks_write, _blocks_attend)

# ragged: [pages, page_size, 2 kv_heads, head_dim], a head's key and value beside each other.


def _ragged_empty(config, dtype, pages, page_size):
    return (jnp.zeros((pages, page_size, 2 * config.kv_heads, config.head_dim), dtype),)


def _ragged_write(pool, k, v, page, offset):
    both = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])  # [N, 2 kv_heads, head_dim]
    if (largest := LARGEST.get(pool[0].dtype.name)) is not None:
        both = jnp.clip(both, -largest, largest)  # beyond it float8 is not a number
    return (pool[0].at[page, offset].set(both.astype(pool[0].dtype), mode="drop"),)


def ragged(
    q: jax.Array, pool: Pool, table: jax.Array, first: jax.Array, page_size: int, kind: AttentionKind
) -> jax.Array:
    """The TPU kernel `jax.experimental.pallas.ops.tpu.ragged_paged_attention`, for decoding and prefill alike."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as kernels

    rows, count, heads, dim = q.shape
    pages = max(1, min(table.shape[1], KERNEL_TOKENS // page_size))
    scale = None if pool[0].dtype == q.dtype else 1.0  # a scale makes the kernel convert what it reads

    def attention(q, kv_pages, lengths, table):
        return kernels.ragged_paged_attention(
            q, kv_pages, lengths, table, jnp.arange(rows + 1, dtype=jnp.int32) * count, jnp.array([rows], jnp.int32),
            sm_scale=kind.scale_of(dim), sliding_window=kind.window, soft_cap=kind.soft_cap,
            k_scale=scale, v_scale=scale, num_kv_pages_per_block=pages,
            num_queries_per_block=min(rows * count, KERNEL_QUERIES), vmem_limit_bytes=KERNEL_VMEM,
        )  # fmt: skip

    by_head = over_heads(attention, PartitionSpec(None, None, "tensor"))
    lengths = jnp.maximum(first, 0) + count
    table = jnp.pad(table, ((0, 0), (0, -(-(count - 1) // page_size))))  # queries that are not meant reach beyond it
    return by_head(q.reshape(rows * count, heads, dim), pool[0], lengths, table).reshape(q.shape)


RAGGED = Kernel("ragged", PartitionSpec(ROW_AXES, None, "tensor"), _ragged_empty, _ragged_write, ragged)

# cudnn: [pages, 2, page_size, kv_heads, head_dim], keys of a page and then its values.


def _cudnn_empty(config, dtype, pages, page_size):
    return (jnp.zeros((pages, 2, page_size, config.kv_heads, config.head_dim), dtype),)


def _cudnn_write(pool, k, v, page, offset):
    both = jnp.stack([k, v], axis=1)  # [N, 2, kv_heads, head_dim]
    return (pool[0].at[page, :, offset].set(both, mode="drop"),)


def cudnn_pages(
    q: jax.Array, pool: Pool, table: jax.Array, first: jax.Array, page_size: int, kind: AttentionKind
) -> jax.Array:
    """cuDNN's kernel for single queries in 16 bits, else `running_softmax`.

    The kernel knows no soft cap, and would align windows, and the causality of several queries, with the first token.
    A single query reads its window in one turn: between turns of a loop the host would wait for the GPU.
    """
    window = kind.window if (kind.window or 0) < table.shape[1] * page_size else None  # none: no sequence is longer
    block = None
    if window is not None and q.shape[1] == 1:
        width = min((window - 2) // page_size + 2, table.shape[1])  # pages that a window may touch
        before = jnp.maximum(first - window + 1, 0) // page_size  # [R]
        table = jnp.take_along_axis(table, before[:, None] + jnp.arange(width), axis=1, mode="clip")
        first, block = first - before * page_size, width * page_size
    if q.shape[1] > 1 or window is not None or kind.soft_cap is not None or q.dtype.itemsize != 2:

        def fetch(pages):  # i32[T, n]
            both = pool[0][pages].transpose(2, 0, 4, 1, 3, 5)  # [2, T, kv_heads, n, page_size, head_dim]
            k, v = both.reshape(*both.shape[:3], -1, both.shape[-1])
            return k.swapaxes(2, 3), v

        return running_softmax(q, fetch, table, first, page_size, kind, block)
    kernel = partial(cudnn.paged_attention, scale=kind.scale_of(q.shape[-1]))
    by_head = over_heads(kernel, PartitionSpec(None, None, None, "tensor"))
    return by_head(q[:, 0], pool[0], table, jnp.maximum(first, 0) + 1)[:, None]


CUDNN = Kernel("cudnn", PartitionSpec(ROW_AXES, None, None, "tensor"), _cudnn_empty, _cudnn_write, cudnn_pages)


def over_heads(function: Callable, pool: PartitionSpec) -> Callable:
    """A shard_map of function(q [N, heads, head_dim], pool, ..., ...) over the tensor axis inside `parallel.over_rows`,
    for kernels that the compiler cannot partition.

    It is over all axes that are left, for a kernel of Mosaic refuses a mesh of which one is the compiler's.
    """
    mesh, heads, whole = jax.sharding.get_abstract_mesh(), PartitionSpec(None, "tensor"), PartitionSpec()
    if "tensor" not in mesh.axis_names or "tensor" in mesh.manual_axes:  # outside of any mesh; one device's heads
        return function
    left, specs = set(mesh.axis_names) - set(mesh.manual_axes), (heads, pool, whole, whole)
    return jax.shard_map(function, in_specs=specs, out_specs=heads, axis_names=left, check_vma=False)
