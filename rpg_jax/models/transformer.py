"""The decoder-only transformer (Qwen3, Qwen2.5 and Llama shapes) as functions of a plain parameter tree.

One block is a Linen module; everything around it is plain JAX. The tree is `{"embed", "layers", "final_norm"[,
"head"]}`, and every leaf of "layers" is stacked along a leading layer axis. Training scans over that axis; sampling
unstacks it once per rollout (`unstack_layers`) and unrolls the layers, as training may when there are few.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.models import rope
from rpg_jax.models.attention import SAVED, AttentionKind, causal_attention
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.lora import LoRA
from rpg_jax.models.quantization import dequantized, table_rows

_kernel = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

# What a layer saves for its backward pass beside its input [T, hidden]; the rest is recomputed. Numbers per token,
# with Q = heads * head_dim and K = kv_heads * head_dim:
#   none       everything: about 8 hidden + 5 mlp + 4 Q + 4 K, plus those of "attention"
#   dots       outputs of products with weights: 2 hidden + 2 mlp + Q + 2 K; attention is recomputed
#   attention  what attention's backward pass reads: Q + heads with splash, about heads * T / 2 with blockwise
#   offload    those of dots, in host memory: no device memory, but two transfers per step to and from the host
#   full       nothing
REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(SAVED),
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


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


def _dot_general(x, kernel, dimensions, precision=None):
    """`project` as `nn.Dense` calls it."""
    return project(x, kernel)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding in the half-split convention of Hugging Face.

    x [B, T, H, D]; cos, sin f32[B, T, D / 2] or f32[1, T, D / 2], of `rope.turns`.
    """
    half, cos, sin = x.shape[-1] // 2, cos[..., None, :], sin[..., None, :]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class AsStored:
    """A module that takes its parameters as they are. Flax compares each with the shape that its initializer gives, and
    traces the initializer for that in every call: a quarter of the time that tracing a layer takes."""

    @nn.nowrap
    def param(self, name, *initializer):
        stored = self.has_variable("params", name)
        return self.get_variable("params", name) if stored else super().param(name, *initializer)


class RMSNorm(AsStored, nn.RMSNorm):
    """Divides by the root mean square and multiplies by a scale."""


class Dense(AsStored, nn.Dense):
    """A product with a kernel, and with the adapters that `lora.join` has laid beside it."""

    def __call__(self, x):
        out = super().__call__(x)
        if self.has_variable("params", "lora_a"):
            a, b = (self.get_variable("params", name).astype(self.dtype) for name in ("lora_a", "lora_b"))
            out += project(project(x, a), b)
        return out


class Block(nn.Module):
    """One pre-norm layer. `attend(q, k, v) -> (out, kept)` computes attention and may keep k and v in a cache; `turns`
    are those of `rope.turns`."""

    config: ModelConfig
    dtype: jnp.dtype
    constrain: Callable

    @nn.compact
    def __call__(self, x, turns, attend):
        config, batch_and_time = self.config, x.shape[:2]
        dense = partial(Dense, dtype=self.dtype, kernel_init=_kernel, dot_general=_dot_general)
        norm = partial(RMSNorm, epsilon=config.norm_epsilon, dtype=self.dtype)

        h = norm(name="attention_norm")(x)
        q = dense(config.heads * config.head_dim, use_bias=config.qkv_bias, name="q")(h)
        k = dense(config.kv_heads * config.head_dim, use_bias=config.qkv_bias, name="k")(h)
        v = dense(config.kv_heads * config.head_dim, use_bias=config.qkv_bias, name="v")(h)
        q, k, v = (z.reshape(*batch_and_time, -1, config.head_dim) for z in (q, k, v))  # [B, T, H or K, D]
        if config.qk_norm:
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        q, k = rotate(q, *turns), rotate(k, *turns)
        q, k, v = (self.constrain(z, "heads") for z in (q, k, v))
        attended, kept = attend(q, k, v)
        attended = attended.reshape(*batch_and_time, -1)  # [B, T, H * D]
        x = self.constrain(x + dense(config.hidden_size, use_bias=False, name="o")(attended), "residual")

        h = norm(name="mlp_norm")(x)
        gated = nn.silu(dense(config.mlp_size, use_bias=False, name="gate")(h))  # [B, T, mlp]
        h = self.constrain(gated * dense(config.mlp_size, use_bias=False, name="up")(h), "mlp")
        return self.constrain(x + dense(config.hidden_size, use_bias=False, name="down")(h), "residual"), kept


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's shape and how to compute it. It holds no arrays and is hashable, so it can be a static argument.

    `attention(q, k, v[, segment_ids]) -> out` is the training attention; `constrain(array, name) -> array` pins
    activations to a mesh and `per_shard(function, weights, shared, rows)` runs a function on each data shard's rows
    (`parallel.make_constrain`, `parallel.make_per_shard`). All are injected. `dtype` is that of the computation;
    parameters are float32 unless the caller casts them. With `lora` they are frozen, and only its adapters are trained.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32
    scan: bool = True
    remat: str = "none"
    attention: Callable = causal_attention
    constrain: Callable = lambda array, name: array
    per_shard: Callable = lambda function, weights, shared, rows: function(weights, shared, rows)
    lora: LoRA | None = None

    def __post_init__(self):
        if self.remat not in REMAT_POLICIES:
            raise InputError(f"unknown remat policy {self.remat!r}; known: {', '.join(REMAT_POLICIES)}")

    def init(self, key: jax.Array) -> dict:
        """Random float32 parameters, `layers` stacked along axis 0; jit with out_shardings makes them sharded."""
        config, norm = self.config, {"scale": jnp.ones(self.config.hidden_size)}
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        # As large as a layer's output: the first layers' outputs would drown out a much smaller embedding.
        embedding = nn.initializers.normal(config.hidden_size**-0.5)
        x, turns = jnp.zeros((1, 1, config.hidden_size)), (jnp.zeros((1, 1, config.head_dim // 2)),) * 2
        block = Block(config, self.dtype, lambda array, name: array)  # no sharding: a mesh cannot split one row

        def init_layer(key):
            return block.init(key, x, turns, lambda q, k, v: (q, None))["params"]

        params = {
            "embed": {"embedding": embedding(embed_key, (config.vocab_size, config.hidden_size))},
            "layers": jax.vmap(init_layer)(jax.random.split(layer_key, config.layers)),
            "final_norm": norm,
        }
        if not config.tied_embeddings:
            params["head"] = {"kernel": _kernel(head_key, (config.hidden_size, config.vocab_size))}
        return params

    @cached_property
    def shapes(self) -> dict:
        """The tree of `init` as shapes and dtypes; traced once."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @property
    def block(self) -> Block:
        return Block(self.config, self.dtype, self.constrain)

    def attention_kind(self, layer: int) -> AttentionKind:
        """How a layer attends."""
        return AttentionKind(rope_theta=self.config.rope_theta, rope_scaling=self.config.rope_scaling)

    def turns(self, positions: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """`rope.turns` of positions i32[B, T], for each kind of attention that the model's layers have."""
        kinds = dict.fromkeys(map(self.attention_kind, range(self.config.layers)))
        return tuple(rope.turns(positions, self.config.head_dim, kind.rope_theta, kind.rope_scaling) for kind in kinds)

    def embed(self, params: dict, tokens: jax.Array) -> jax.Array:
        """[B, T] token ids to [B, T, hidden] in the compute dtype."""
        x = table_rows(params["embed"]["embedding"], tokens).astype(self.dtype)
        return self.constrain(self.constrain(x, "lookup"), "residual")

    def normalize(self, params: dict, x: jax.Array) -> jax.Array:
        """The final RMSNorm of [B, T, hidden], before the vocabulary projection."""
        norm = RMSNorm(epsilon=self.config.norm_epsilon, dtype=self.dtype)
        return norm.apply({"params": params["final_norm"]}, x)

    def hidden(self, params: dict, tokens: jax.Array, positions=None, segment_ids=None) -> jax.Array:
        """Final hidden states for training: tokens i32[B, T] -> [B, T, hidden], causal, no vocabulary projection.

        Rows of several sequences need positions and segment_ids i32[B, T]; no token attends to another segment. With
        unstacked `params` (`unstack_layers`) the layers are unrolled, whatever `scan` says.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]  # [1, T]: one table of angles for all rows

        (turns,) = self.turns(positions)
        attention = self.attention if segment_ids is None else partial(self.attention, segment_ids=segment_ids)

        def layer(x, layer_params):
            return self.block.apply({"params": layer_params}, x, turns, lambda *qkv: (attention(*qkv), None))

        unstacked = isinstance(params["layers"], list)
        scan = self.scan and not unstacked
        if self.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=not scan)
        x = self.embed(params, tokens)
        if scan:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            for layer_params in (params if unstacked else unstack_layers(params))["layers"]:
                x, _ = layer(x, layer_params)
        return self.normalize(params, x)

    def cached(self, params: dict, tokens, turns, attend: Callable) -> tuple[jax.Array, list]:
        """One pass for sampling, unrolled over the layers of an unstacked tree.

        Args:
          params: the tree of `unstack_layers`, its matrices `Quantized` or not.
          tokens: i32[B, T]; turns: those of their positions, as the method of this name gives them.
          attend: (layer index, q, k, v) -> (out, kept); reads and writes the KV cache.

        Returns:
          final hidden states [B, T, hidden], and a list of what `attend` kept in each layer.
        """
        x, kept, (turns,) = self.embed(params, tokens), [], turns
        for index, layer_params in enumerate(params["layers"]):
            layer_params = dequantized(layer_params, self.dtype)
            x, keep = self.block.apply({"params": layer_params}, x, turns, partial(attend, index))
            kept.append(keep)
        return self.normalize(params, x), kept

    def logits(self, params: dict, hidden: jax.Array) -> jax.Array:
        """Vocabulary projection: [..., hidden] -> [..., vocab], at least float32."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        if "head" not in params:  # tied embeddings
            table = dequantized(params["embed"], self.dtype)["embedding"].astype(self.dtype)
            return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=wide)
        kernel = dequantized(params["head"], self.dtype)["kernel"].astype(self.dtype)
        return jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=wide)


def with_head(params: dict) -> dict:
    """The tree with a head of its own: that of tied embeddings is their table, transposed."""
    table = params["embed"]["embedding"]
    return {"head": {"kernel": jax.tree.map(jnp.transpose, table)}, **params}


def unstack_layers(params: dict) -> dict:
    """The same weights with `layers` as a list of per-layer trees; its gradient is one concatenation per leaf."""
    leaves, treedef = jax.tree.flatten(params["layers"])
    layers = [treedef.unflatten(slices) for slices in zip(*(jnp.unstack(leaf) for leaf in leaves), strict=True)]
    return {**params, "layers": layers}


def stack_layers(params: dict) -> dict:
    """The inverse of `unstack_layers`."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}
