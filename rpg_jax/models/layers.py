"""Parts of a layer as functions of plain parameters: products with matrices, norms, rotary turns, initial values."""

import hashlib

import jax
import jax.numpy as jnp

GROUPED_TILES = 256, 1024, 1024  # rows, inputs and outputs of a block of megablox's kernel
kernel_init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


@jax.custom_vjp
def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., I] times kernel [I, O], to [..., O].

    The kernel's gradient is computed as [I, O]; autodiff computes [O, I] and so transposes the larger array of the MLP.
    """
    return x @ kernel


def _project_backward(saved, d_out):
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    return d_out @ kernel.T, jax.lax.dot_general(x, d_out, ((rows, rows), ((), ())))


project.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _project_backward)


def dense(x: jax.Array, params: dict) -> jax.Array:
    """x [..., I] times `kernel` [I, O], plus `bias` [O] and what the adapters of `lora.join` add; in x's dtype."""
    params = {name: array.astype(x.dtype) for name, array in params.items()}
    out = project(x, params["kernel"])
    if "bias" in params:
        out += params["bias"]
    if "lora_a" in params:
        out += project(project(x, params["lora_a"]), params["lora_b"])
    return out


@jax.custom_vjp
def grouped(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [N, I], sorted into groups of sizes i32[E], times the kernel [E, I, O] of each row's group, to [N, O].

    Rows beyond the last group are anything. The kernels' gradient is `jax.lax.ragged_dot`'s but on TPUs, where XLA
    would multiply every row with each kernel: there it is a kernel of JAX's megablox.
    """
    return jax.lax.ragged_dot(x, kernels, sizes)


def _grouped_backward(saved, d_out):
    x, kernels, sizes = saved
    d_x = jax.lax.ragged_dot(d_out, kernels.swapaxes(1, 2), sizes)
    if x.dtype not in (jnp.bfloat16, jnp.float32):  # that the kernel takes
        return d_x, _ragged_gradient(x, d_out, sizes), None
    return d_x, jax.lax.platform_dependent(x, d_out, sizes, tpu=_tpu_gradient, default=_ragged_gradient), None


def _ragged_gradient(x, d_out, sizes):
    dimensions = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return jax.lax.ragged_dot_general(x, d_out, sizes, dimensions)  # [E, I, O]


def _tpu_gradient(x, d_out, sizes, interpret=False):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, d_out = (jnp.pad(rows, ((0, -len(rows) % GROUPED_TILES[0]), (0, 0))) for rows in (x, d_out))
    return tgmm(x.swapaxes(0, 1), d_out, sizes, x.dtype, GROUPED_TILES, interpret=interpret)


grouped.defvjp(
    lambda x, kernels, sizes: (jax.lax.ragged_dot(x, kernels, sizes), (x, kernels, sizes)), _grouped_backward
)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x [..., D] over its root mean square, times scale [D]; at least float32 inside, in x's dtype outside."""
    square = jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    factor = jax.lax.rsqrt(jnp.mean(square, -1, keepdims=True) + epsilon) * scale
    return (x * factor).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding in the half-split convention of Hugging Face.

    x [B, T, H, D]; cos, sin f32[B, T, D / 2] or f32[1, T, D / 2], of `rope.turns`.
    """
    half, cos, sin = x.shape[-1] // 2, cos[..., None, :], sin[..., None, :]
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    first, second = wide[..., :half], wide[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def init_kernel(key: jax.Array, name: str, shape: tuple[int, ...]) -> dict:
    """A matrix of variance 1 / fan-in. Its key is the layer's with its name folded in, as Flax does it, and so does not
    depend on a layer's other parameters."""
    digest = hashlib.sha1(name.encode() + b"\1").digest()
    return {"kernel": kernel_init(jax.random.fold_in(key, int.from_bytes(digest[:4], "big")), shape, jnp.float32)}
