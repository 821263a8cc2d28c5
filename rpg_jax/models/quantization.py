"""Arrays in 8 bits, for sampling: numbers of a small type with a float32 scale for each channel.

A sampler with such weights, or with such keys and values in its cache, is another policy than the trainer's. With
behavior.source=sampler its recorded log-probs are the importance ratio's denominator, so that the gradient stays exact
(docs/method.md 9.1).
"""

from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax.types import Params, pytree

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # finite magnitudes of the types
CHANNEL_AXES = {"kernel": -2, "embedding": -1}  # what a channel of a parameter runs along: [I, O] and [V, hidden]


@pytree
class Quantized:
    """An array as values * scales; the scales lack the axis that a channel runs along."""

    values: jax.Array  # int8 or float8 [...]
    scales: jax.Array  # f32[..., without that axis]


def quantize(x: jax.Array, dtype: Any, axis: int) -> Quantized:
    """The nearest values of `dtype` under a scale by which the largest number along `axis` becomes the type's largest.

    A number that is not finite makes the scale so, and stays visible.
    """
    dtype = jnp.dtype(dtype)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=axis, keepdims=True)
    # At least the least normal number: processors take what is smaller for 0, and a division by it is infinite.
    scales = jnp.maximum(largest / LARGEST[dtype.name], jnp.finfo(jnp.float32).tiny)
    scaled = wide / scales
    values = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
    return Quantized(values.astype(dtype), jnp.squeeze(scales, axis))


def dequantize(x: Quantized, axis: int, dtype: Any) -> jax.Array:
    """The array again, in `dtype`; the product is taken in float32."""
    return (x.values.astype(jnp.float32) * jnp.expand_dims(x.scales, axis)).astype(dtype)


def quantize_params(params: Params, dtype: Any) -> Params:
    """The tree with every matrix `Quantized`, one scale for each output of a layer and each row of the vocabulary.

    Norms and biases stay as they are, and so do routers: rounding them would choose other experts.
    """

    def leaf(path, x):
        axis = CHANNEL_AXES.get(path[-1].key)
        return x if axis is None or path[-2].key == "router" else quantize(x, dtype, axis)

    return jax.tree_util.tree_map_with_path(leaf, params)


def dequantized(params: Any, dtype: Any) -> Any:
    """A part of the tree with plain arrays in place of `Quantized` ones, in `dtype`; other leaves are as they were."""

    def leaf(path, x):
        return dequantize(x, CHANNEL_AXES[path[-1].key], dtype) if isinstance(x, Quantized) else x

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=lambda x: isinstance(x, Quantized))


def table_rows(table: jax.Array | Quantized, rows: jax.Array) -> jax.Array:
    """Rows i32[...] of a table [V, hidden], quantized or not: [..., hidden]."""
    taken = jax.tree.map(lambda x: jnp.take(x, rows, axis=0), table)
    return dequantize(taken, -1, jnp.float32) if isinstance(taken, Quantized) else taken
