"""The decoder-only transformer as functions of a plain parameter tree; its family (`models.families`) is the layer.

The tree is `{"embed", "layers", "final_norm"[, "head"]}`, and every leaf of "layers" is stacked along a leading layer
axis. Training scans over that axis; sampling unstacks it once per rollout (`unstack_layers`) and unrolls the layers, as
training may when there are few.
"""

import dataclasses
from collections.abc import Callable
from functools import cache, cached_property, partial
from types import ModuleType

import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.models import families, rope
from rpg_jax.models.attention import SAVED, AttentionKind, causal_attention
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.layers import kernel_init
from rpg_jax.models.lora import LoRA
from rpg_jax.models.quantization import dequantized, table_rows
from rpg_jax.models.routes import recorded

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


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's shape and how to compute it. It holds no arrays and is hashable, so it can be a static argument.

    `attention(q, k, v, kind=AttentionKind[, segment_ids]) -> out` is that of training; `constrain(array, name)` pins
    activations to a mesh, `per_shard(function, weights, shared, rows)` runs a function on each data shard's rows, and
    `per_expert(function, kernels, rows)` where experts are (`parallel.make_constrain`, `parallel.make_per_shard`,
    `parallel.make_per_expert`). All are injected. `dtype` is that of the computation;
    parameters are float32 unless the caller casts them. With `lora` they are frozen, and only its adapters are trained.
    `held_in` is the type of 8 bits that frozen matrices are to be kept in (`quantize_params`), if they are to be.
    `ids`, of a teacher with a longer table than its student's, are how many of its ids its distribution is over.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.float32
    scan: bool = True
    remat: str = "none"
    attention: Callable = causal_attention
    constrain: Callable = lambda array, name: array
    per_shard: Callable = lambda function, weights, shared, rows: function(weights, shared, rows)
    per_expert: Callable = lambda function, kernels, rows: function(kernels, 0, *rows)
    lora: LoRA | None = None
    held_in: str | None = None
    ids: int | None = None

    def __post_init__(self):
        if self.remat not in REMAT_POLICIES:
            raise InputError(f"unknown remat policy {self.remat!r}; known: {', '.join(REMAT_POLICIES)}")

    def init(self, key: jax.Array) -> dict:
        """Random float32 parameters, `layers` stacked along axis 0; jit with out_shardings makes them sharded."""
        config, family = self.config, self.family
        embed_key, layer_key, head_key = jax.random.split(key, 3)
        # As large as a layer's output: the first layers' outputs would drown out a much smaller embedding.
        embedding = jax.nn.initializers.normal(config.hidden_size**-0.5)
        init_layer = partial(family.init_layer, config)
        params = {
            "embed": {"embedding": embedding(embed_key, (config.vocab_size, config.hidden_size))},
            "layers": jax.vmap(init_layer)(jax.random.split(layer_key, config.layers)),
            "final_norm": family.init_norm(config.hidden_size),
        }
        if not config.tied_embeddings:
            params["head"] = {"kernel": kernel_init(head_key, (config.hidden_size, config.vocab_size))}
        return params

    @cached_property
    def shapes(self) -> dict:
        """The tree of `init` as shapes and dtypes; traced once."""
        return jax.eval_shape(lambda: self.init(jax.random.key(0)))

    @property
    def family(self) -> ModuleType:
        """The module of `models.families` with the layer."""
        return families.of(self.config)

    @cached_property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """How each layer attends."""
        return self.family.attention_kinds(self.config)

    def turns(self, positions: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """`rope.turns` of positions i32[B, T], for each kind of attention that the model's layers have."""
        kinds = dict.fromkeys(self.kinds)
        return tuple(rope.turns(positions, self.config.head_dim, kind.rope_theta, kind.rope_scaling) for kind in kinds)

    def layer(
        self, kind: AttentionKind, params: dict, x: jax.Array, turns: tuple, attend: Callable, **routing
    ) -> tuple:
        """A layer of a kind, with its parameters, as a family gives it; `turns` are those of all kinds."""
        params, own = dequantized(params, self.dtype), turns[list(dict.fromkeys(self.kinds)).index(kind)]
        more = routing | {"per_expert": self.per_expert} if self.config.experts else {}
        return self.family.layer(self.config, params, x, own, attend, self.constrain, **more)

    def embed(self, params: dict, tokens: jax.Array) -> jax.Array:
        """[B, T] token ids to [B, T, hidden] in the compute dtype."""
        x = self.family.embed(self.config, table_rows(params["embed"]["embedding"], tokens).astype(self.dtype))
        return self.constrain(self.constrain(x, "lookup"), "residual")

    def hidden(self, params: dict, tokens: jax.Array, positions=None, segment_ids=None) -> jax.Array:
        """The hidden states of `hidden_and_auxiliary`."""
        return self.hidden_and_auxiliary(params, tokens, positions, segment_ids)[0]

    def hidden_and_auxiliary(
        self, params: dict, tokens: jax.Array, positions=None, segment_ids=None, counted=None, routes=None
    ) -> tuple[jax.Array, dict]:
        """Final hidden states for training: tokens i32[B, T] -> [B, T, hidden], causal, no vocabulary projection.

        Beside them, what the layers return of auxiliary numbers, {name: [layers, ...]}; {} for families without any.
        Matrices may be `Quantized`. Rows of several sequences need positions and segment_ids i32[B, T]; no token
        attends to another segment. With unstacked `params` (`unstack_layers`) the layers are unrolled, whatever `scan`
        says. Families with experts take `counted` bool[B, T], the tokens that auxiliary sums are over, and `routes`
        i32[layers, B, T, k], the experts of each token in place of those that the routers prefer, which a number under
        0 leaves to them.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1])[None]  # [1, T]: one table of angles for all rows
        turns, segments = self.turns(positions), {} if segment_ids is None else {"segment_ids": segment_ids}
        x, layers, period = self.embed(params, tokens), params["layers"], _period(self.kinds)
        scan = self.scan and not isinstance(layers, list) and period <= max(self.config.layers // 2, 1)

        def layer(kind, x, own):
            def attend(q, k, v):
                return self.attention(q, k, v, kind=kind, **segments), None

            params, routes = own
            x, _, auxiliary = self.layer(kind, params, x, turns, attend, counted=counted, routes=routes)
            return x, auxiliary

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan, static_argnums=0)
        if not scan:  # so that layers of a kind are traced once
            layer = jax.jit(layer, static_argnums=0, inline=True)

        def unrolled(x, own):
            layers, routes = own
            layers = layers if isinstance(layers, list) else _unstacked(layers)
            auxiliary = []
            for index, params in enumerate(layers):
                x, numbers = layer(self.kinds[index], x, (params, None if routes is None else routes[index]))
                auxiliary.append(numbers)
            return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *auxiliary)

        own = layers, routes
        if scan and period > 1:
            own = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), own)
            x, auxiliary = jax.lax.scan(unrolled, x, own)
            auxiliary = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), auxiliary)
        else:
            x, auxiliary = jax.lax.scan(partial(layer, self.kinds[0]), x, own) if scan else unrolled(x, own)
        return self.family.norm(self.config, x, params["final_norm"]), auxiliary

    def cached(
        self, params: dict, tokens: jax.Array, turns: tuple, attend: Callable, caches: list
    ) -> tuple[jax.Array, list, jax.Array | None]:
        """One pass for sampling, unrolled over the layers of an unstacked tree.

        Args:
          params: the tree of `unstack_layers`, its matrices `Quantized` or not.
          tokens: i32[B, T]; turns: those of their positions, as the method of this name gives them.
          attend: (kind, cache, q, k, v) -> (out, cache), which reads and writes the KV cache of a layer.
          caches: one for each layer, in a form that `attend` knows.

        Returns final hidden states [B, T, hidden], the caches, and with experts the routes (`models.routes`), else
        None.
        """

        @partial(jax.jit, static_argnums=0, inline=True)  # as in `hidden_and_auxiliary`
        def layer(kind, params, x, kept):
            x, kept, auxiliary = self.layer(kind, params, x, turns, partial(attend, kind, kept))
            return x, kept, auxiliary.get("routes")

        x, kept, chosen = self.embed(params, tokens), list(caches), []
        for index, kind in enumerate(self.kinds):
            x, kept[index], routes = layer(kind, params["layers"][index], x, kept[index])
            chosen.append(routes)
        x = self.family.norm(self.config, x, params["final_norm"])
        return x, kept, recorded(chosen) if self.config.experts else None

    def logits(self, params: dict, hidden: jax.Array) -> jax.Array:
        """Vocabulary projection: [..., hidden] -> [..., vocab], at least float32."""
        wide = jnp.promote_types(self.dtype, jnp.float32)
        module, product = ("head", "...d,dv->...v") if "head" in params else ("embed", "...d,vd->...v")  # if tied
        [matrix] = dequantized(params[module], self.dtype).values()
        logits = jnp.einsum(product, hidden, matrix.astype(self.dtype), preferred_element_type=wide)
        return logits if self.ids is None else logits[..., : self.ids]


def with_head(params: dict) -> dict:
    """The tree with a head of its own: that of tied embeddings is their table, transposed. No other leaf is copied."""
    return params if "head" in params else params | {"head": {"kernel": _transposed(params["embed"]["embedding"])}}


# Of this leaf alone: a jitted function copies each array that it returns as it came.
_transposed = jax.jit(lambda table: jax.tree.map(jnp.transpose, table))


def unstack_layers(params: dict) -> dict:
    """The same weights with `layers` as a list of per-layer trees; its gradient is one concatenation per leaf."""
    return {**params, "layers": _unstacked(params["layers"])}


def stack_layers(params: dict) -> dict:
    """The inverse of `unstack_layers`."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def _unstacked(layers):
    leaves, treedef = jax.tree.flatten(layers)
    return [treedef.unflatten(slices) for slices in zip(*(jnp.unstack(leaf) for leaf in leaves), strict=True)]


def _period(kinds):
    """The least number of layers, a divisor of all, after which their kinds repeat."""
    return next(n for n in range(1, len(kinds) + 1) if kinds[:n] * (len(kinds) // n) == kinds)


@cache
def parameter_count(config: ModelConfig) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(Model(config).shapes))


@cache
def expert_parameter_count(config: ModelConfig) -> int:
    """Number of those in experts; 0 for a family without any."""
    return sum(leaf.size for leaf in jax.tree.leaves(Model(config).shapes["layers"].get("experts", {})))


def active_parameter_count(config: ModelConfig) -> int:
    """Number of those that a token meets: all but the experts that it is not sent to."""
    idle = config.experts - config.experts_per_token if config.experts else 0
    return parameter_count(config) - (expert_parameter_count(config) * idle // config.experts if idle else 0)
