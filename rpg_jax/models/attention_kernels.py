"""Fused attention for TPUs and NVIDIA GPUs with the signature of `causal_attention`, and the choice among them.

Every function here maps (query [B, T, H, D], key [B, T, K, D], value [B, T, K, D], segment_ids i32[B, T] or None) to
[B, T, H, D]: causal, within segments, softmax in float32, H a multiple of K, no [T, T] array in memory, with a layer's
`AttentionKind` by keyword. The kernels are JAX's own, or cuDNN's (`cudnn`); this module runs them on a mesh.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rpg_jax import InputError
from rpg_jax.models import cudnn
from rpg_jax.models.attention import PLAIN, SAVED, AttentionKind, causal_attention

BLOCKS = (512, 256, 128)  # tokens of a splash block; the first that divides the padded length
LANES = 128  # lengths are padded to a multiple of it
PLATFORM = {"splash": "tpu", "cudnn": "gpu"}  # of each kernel
NAMES = ("auto", "blockwise", *PLATFORM)


def make_attention(
    name: str, mesh: Mesh, spec: PartitionSpec, *, dtype: jnp.dtype, head_dim: int, pack: bool = False,
    kinds: Iterable[AttentionKind] = (),
) -> Callable:  # fmt: skip
    """The attention function that model.attention names, for one mesh.

    Args:
      name: one of `NAMES`. "auto" is splash on TPU, and cuDNN on GPUs if it supports the heads and rows, for layers
        without a soft cap; else blockwise.
      spec: PartitionSpec of [B, T, H, D] arrays; a kernel runs on each device's own rows and heads.
      dtype, head_dim, kinds: of the model and its layers; pack: whether rows may hold several sequences.

    Raises ValueError for an unknown name, a kernel of another platform, and heads, rows or kinds of layers that a
    kernel does not support.
    """
    device = mesh.devices.flat[0]
    platform = device.platform
    largest = cudnn.largest_head(device)
    fits_cudnn = jnp.dtype(dtype).itemsize == 2 and head_dim % 8 == 0 and head_dim <= largest
    packs_cudnn = cudnn.capability_of(device) >= cudnn.HOPPER
    if name not in NAMES:
        raise InputError(f"unknown model.attention {name!r}; known: {', '.join(NAMES)}")
    if platform != PLATFORM.get(name, platform):
        raise InputError(
            f"model.attention={name} runs on {PLATFORM[name].upper()} devices and this mesh has {platform.upper()} "
            f"ones; choose auto or blockwise"
        )
    if name == "cudnn" and not fits_cudnn:
        raise InputError(
            f"model.attention=cudnn takes heads in 16 bits, of a multiple of 8 and at most {largest} numbers on a GPU "
            f"of compute capability {device.compute_capability} (none before {cudnn.AMPERE}); this model's are "
            f"{head_dim} in {jnp.dtype(dtype).name}; choose auto or blockwise"
        )
    if name == "cudnn" and pack and not packs_cudnn:
        raise InputError(
            f"model.attention=cudnn packs rows from compute capability {cudnn.HOPPER} on and this GPU's is "
            f"{device.compute_capability}; choose auto or blockwise, or learner.pack=False"
        )
    capped = {kind.soft_cap is not None for kind in kinds}
    if name == "cudnn" and True in capped:
        raise InputError("model.attention=cudnn cannot do this model's soft_cap; choose auto or blockwise")
    kernels = {"splash": splash, "cudnn": cudnn.attention}
    fused = fits_cudnn and (packs_cudnn or not pack) and capped != {True}
    automatic = {"tpu": splash, "gpu": cudnn_or_blockwise if fused else None}
    kernel = automatic.get(platform) if name == "auto" else kernels.get(name)
    return on_mesh(kernel, mesh, spec) if kernel else causal_attention


@functools.cache  # the same function for the same mesh, so that models that hold it are equal
def on_mesh(kernel: Callable, mesh: Mesh, spec: PartitionSpec) -> Callable:
    """A kernel as a function of global arrays: each device computes its own rows and heads."""

    def attention(query, key, value, segment_ids=None, kind=PLAIN):
        arrays = (query, key, value) if segment_ids is None else (query, key, value, segment_ids)
        in_specs = (spec, spec, spec, PartitionSpec(spec[0], None))[: len(arrays)]
        one = functools.partial(kernel, kind=kind)
        return jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(*arrays)

    return attention


def splash(query, key, value, segment_ids=None, kind: AttentionKind = PLAIN, *, interpret: bool = False) -> jax.Array:
    """The TPU splash kernel of `jax.experimental.pallas.ops.tpu`, with causal blocks skipped."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    length, heads, dim = query.shape[1:]
    query = query * kind.scale_of(dim)
    extra = -length % LANES  # at the end, where causality hides it from every token
    query, key, value = (jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) for x in (query, key, value))
    padded = length + extra
    block = next(size for size in BLOCKS if padded % size == 0)
    mask = kernels.CausalMask((padded, padded))
    if kind.window is not None:
        mask = kernels.LocalMask((padded, padded), window_size=(kind.window - 1, 0), offset=0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = kernels.make_splash_mha_single_device(
        kernels.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(**{f"block_{name}": block for name in names}),
        residual_checkpoint_name=SAVED,
        attn_logits_soft_cap=kind.soft_cap,
        interpret=interpret,
    )
    ids = None if segment_ids is None else kernels.SegmentIds(*[jnp.pad(segment_ids, ((0, 0), (0, extra)))] * 2)
    heads_first = [x.swapaxes(1, 2) for x in (query, key, value)]  # [B, H or K, T, D]
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)[:, :length]


def cudnn_or_blockwise(query, key, value, segment_ids=None, kind: AttentionKind = PLAIN) -> jax.Array:
    """cuDNN, or blockwise for a layer that caps its scores."""
    function = cudnn.attention if kind.soft_cap is None else causal_attention
    return function(query, key, value, segment_ids, kind)
