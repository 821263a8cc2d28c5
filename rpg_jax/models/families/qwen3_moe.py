"""Qwen3-MoE: Qwen3's attention, and in place of one MLP many small ones, the experts, of which a router chooses a few
for each token.

The router is computed in float32, from activations and a kernel in the compute dtype. Tokens are sorted by expert and
multiplied with `jax.lax.ragged_dot`. Layers without experts (mlp_only_layers, decoder_sparse_step) are refused.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.models import config as shapes
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.families import qwen_llama
from rpg_jax.models.families.qwen_llama import attention_kinds, embed, init_norm, norm  # noqa: F401
from rpg_jax.models.layers import grouped, init_kernel


@dataclasses.dataclass(frozen=True)
class Config(ModelConfig):
    """`mlp_size` is only what config.json says of layers without experts, of which there are none."""

    model_type = "qwen3_moe"
    qk_norm: bool = True
    experts: int = 128
    experts_per_token: int = 8
    expert_size: int = 768  # hidden units of one expert
    normalized: bool = True  # the weights of a token's experts sum to 1
    balance: float = 0.001  # coefficient of the balance loss that the model was made with; carried in config.json

    def __post_init__(self):
        super().__post_init__()
        each, every = self.experts_per_token, self.experts
        if each > every:
            raise InputError(f"model experts_per_token ({each}) must be at most experts ({every})")


def init_layer(config: Config, key: jax.Array) -> dict:
    """As a dense layer, but with a router [hidden, experts] and the kernels [experts, I, O] of all experts."""
    dense = qwen_llama.init_layer(config, key)
    hidden, size = config.hidden_size, config.expert_size
    expert = {"gate": (hidden, size), "up": (hidden, size), "down": (size, hidden)}
    keys = jax.random.split(jax.random.fold_in(key, 1), config.experts)
    kernels = {name: jax.vmap(lambda k, n=name, s=shape: init_kernel(k, n, s))(keys) for name, shape in expert.items()}
    kept = {name: module for name, module in dense.items() if name not in expert}
    return kept | {"router": init_kernel(key, "router", (hidden, config.experts)), "experts": kernels}


def route(config: Config, x: jax.Array, params: dict, given: jax.Array | None) -> tuple[jax.Array, ...]:
    """The experts of each token of x [B, T, hidden]: those that are given, i32[B, T, k], where they are 0 or more.

    Returns:
      probability of every expert f32[B, T, experts], the chosen ones i32[B, T, k], and their weights f32[B, T, k].
    """
    logits = jnp.einsum(
        "btd,de->bte", x, params["kernel"].astype(x.dtype), precision="highest",
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )  # fmt: skip
    probability = jax.nn.softmax(logits, -1)
    preferred = jax.lax.top_k(jax.lax.stop_gradient(probability), config.experts_per_token)[1]
    chosen = preferred if given is None else jnp.where(given < 0, preferred, given)
    weight = jnp.take_along_axis(probability, chosen, -1)
    return probability, chosen, weight / weight.sum(-1, keepdims=True) if config.normalized else weight


def mixture(kernels: dict, first: jax.Array | int, x: jax.Array, chosen: jax.Array, weight: jax.Array) -> jax.Array:
    """The weighted sum of each token's experts, as far as they are here: those from number `first` on.

    Args:
      kernels: {"gate", "up": [experts here, hidden, size], "down": [experts here, size, hidden]}, in x's dtype.
      x: [B, T, hidden]; chosen: i32[B, T, k], numbers among all experts; weight: [B, T, k].

    Returns [B, T, hidden]; sums over k are taken in the weights' dtype, float32 or wider.
    """
    (batch, length, hidden), k, count = x.shape, chosen.shape[-1], kernels["gate"].shape[0]
    expert = chosen.reshape(-1) - first  # [N], of N = B * T * k pairs of a token and an expert
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)  # experts elsewhere come last
    place, sizes = places(expert, count + 1)
    pairs = jnp.arange(place.size, dtype=jnp.int32)
    pair = jnp.zeros_like(place).at[place].set(pairs, unique_indices=True)  # that comes to each place
    sizes = sizes[:count]
    here = (pairs < sizes.sum())[:, None]  # ragged_dot says nothing of rows beyond the last group

    def product(rows, kernel):
        return jnp.where(here, grouped(jnp.where(here, rows, 0), kernel, sizes), 0)

    rows = x.reshape(-1, hidden)[pair // k]  # [N, hidden]
    gated = jax.nn.silu(product(rows, kernels["gate"])) * product(rows, kernels["up"])
    out = product(gated, kernels["down"])[place].reshape(batch, length, k, hidden)
    return jnp.einsum("btkd,btk->btd", out.astype(weight.dtype), weight).astype(x.dtype)


def places(group: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Where each of i32[N] numbers of groups comes when they are sorted, ties in order, i32[N]; and the groups' sizes.

    By counting, because the TPU compiler takes several seconds for each sort of so many.
    """
    counted = jnp.cumsum(group[:, None] == jnp.arange(groups), axis=0, dtype=jnp.int32)  # [N, groups]
    sizes = counted[-1]
    before = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    return jnp.take_along_axis(counted + before, group[:, None], axis=1)[:, 0] - 1, sizes


def layer(config, params, x, turns, attend, constrain, per_expert, counted=None, routes=None):
    """One layer. Its auxiliary numbers are sums over the tokens that are `counted`, by default all: `router_load` and
    `router_probability` f32[experts], `router_entropy` in nats; and `routes`, i32[B, T, k], the chosen experts.

    Args:
      per_expert: `(function, kernels, rows) -> out` runs `function(kernels here, first, *rows)` where experts are.
      counted: bool[B, T]; routes: i32[B, T, k], the experts to take in place of those that the router prefers.
    """
    h = norm(config, x, params["attention_norm"])
    mixed, kept = qwen_llama.attention(config, params, h, turns, attend, constrain)
    x = constrain(x + mixed, "residual")
    h = norm(config, x, params["mlp_norm"])
    probability, chosen, weight = route(config, h, params["router"], routes)
    kernels = {name: module["kernel"].astype(x.dtype) for name, module in params["experts"].items()}
    x = constrain(x + per_expert(mixture, kernels, (h, chosen, weight)), "residual")
    return x, kept, statistics(config, probability, chosen, counted) | {"routes": chosen}


def statistics(config, probability, chosen, counted):
    """Sums over the counted tokens, of which a mean over any batch can be made."""
    share = jnp.broadcast_to(True if counted is None else counted, chosen.shape[:2]).astype(probability.dtype)
    load = jnp.zeros(config.experts, share.dtype).at[chosen].add(share[..., None])
    entropy = -jnp.sum(jax.scipy.special.xlogy(probability, probability), -1)
    return {
        "router_load": load,
        "router_probability": jnp.einsum("bte,bt->e", probability, share),
        "router_entropy": jnp.einsum("bt,bt->", entropy, share),
    }


_MLP = "gate", "up", "down"
MODULES = {name: theirs for name, theirs in qwen_llama.MODULES.items() if name.removeprefix("layers/") not in _MLP}
MODULES |= {"layers/router": "model.layers.{}.mlp.gate"}
MODULES |= {f"layers/experts/{name}": f"model.layers.{{}}.mlp.experts.{{}}.{name}_proj" for name in _MLP}

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM"}
# Key of config.json -> our field.
EXPERTS = {"num_experts": "experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "expert_size"}
DEFAULTS = dict(
    head_dim=128, num_key_value_heads=4, max_position_embeddings=32768, rope_theta=10000.0, rms_norm_eps=1e-6,
    tie_word_embeddings=False, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=False, router_aux_loss_coef=0.001,
)  # fmt: skip


def read_config(raw: dict) -> Config:
    """The shape that a config.json describes; raises InputError for a key that changes the forward pass."""
    raw = DEFAULTS | ({"num_experts": raw["num_local_experts"]} if "num_local_experts" in raw else {}) | raw
    expected = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1}
    shapes.expect(raw, expected | {"mlp_only_layers": []})
    shapes.expect_full_attention(raw.get("layer_types"))
    return Config(
        **shapes.from_json(raw), **{field: shapes.integer(raw, key) for key, field in EXPERTS.items()},
        normalized=bool(raw["norm_topk_prob"]), balance=float(raw["router_aux_loss_coef"]),
    )  # fmt: skip


def write_config(config: Config) -> dict:
    """The inverse of `read_config`."""
    of_experts = {key: getattr(config, field) for key, field in EXPERTS.items()}
    of_router = {"norm_topk_prob": config.normalized, "router_aux_loss_coef": config.balance}
    every = {"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []}
    of_experts["num_local_experts"] = config.experts  # as transformers 5 calls it
    return every | of_experts | of_router | shapes.to_json(config)


GGUF, GGUF_SETTINGS = {}, {}

SIZES = {
    "micro-moe": Config(
        512, 32, 64, 1, 4, 2, 8, rope_theta=1e4, max_length=1024, experts=4, experts_per_token=2, expert_size=32
    ),
    "tiny-moe": Config(
        512, 128, 384, 4, 4, 2, 32, rope_theta=1e4, max_length=1024, experts=8, experts_per_token=2, expert_size=192
    ),
    "qwen3-30b-a3b": Config(151936, 2048, 6144, 48, 32, 4, 128, tied_embeddings=False, max_length=40960),
}
