"""Gemma 3, text only: of every six layers five look back over a window and one over everything; four norms a layer by
1 + w, normalized queries and keys, GeGLU, and embeddings times the root of the hidden size.

Images, soft caps (Gemma 2) and attention in both directions are refused, never approximated.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.models import config as shapes
from rpg_jax.models import rope
from rpg_jax.models.attention import AttentionKind
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.families import qwen_llama
from rpg_jax.models.layers import dense, rms_norm

ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM"}
LOCAL, GLOBAL = "sliding_attention", "full_attention"  # what config.json calls the two types of layers


@dataclasses.dataclass(frozen=True)
class Config(ModelConfig):
    """Shape of a Gemma 3 model; `rope_theta` and `rope_scaling` are those of global layers."""

    model_type = "gemma3_text"
    qk_norm: bool = True
    window: int = 512  # tokens that a query of a local layer sees, itself included
    period: int = 6  # of so many layers the last one is global
    local_rope_theta: float = 1e4
    query_scalar: float = 256.0  # scores are q k / sqrt(query_scalar)


def attention_kinds(config: Config) -> tuple[AttentionKind, ...]:
    scale = config.query_scalar**-0.5
    local = AttentionKind(scale, window=config.window, rope_theta=config.local_rope_theta)
    everywhere = AttentionKind(scale, rope_theta=config.rope_theta, rope_scaling=config.rope_scaling)
    return tuple(local if kind == LOCAL else everywhere for kind in _types(config.layers, config.period))


def _types(layers, period):
    return [LOCAL if layer % period else GLOBAL for layer in range(1, layers + 1)]


def embed(config: Config, x: jax.Array) -> jax.Array:
    """Times √hidden, which is rounded to the compute dtype first, as in training by Google and in transformers."""
    return x * jnp.asarray(config.hidden_size**0.5, x.dtype)


def norm(config: Config, x: jax.Array, params: dict) -> jax.Array:
    scale = params["scale"]
    return rms_norm(x, 1 + scale.astype(jnp.promote_types(scale.dtype, jnp.float32)), config.norm_epsilon)


def init_norm(size: int) -> dict:
    return {"scale": jnp.zeros(size, jnp.float32)}


def init_layer(config: Config, key: jax.Array) -> dict:
    """Kernels as those of a dense Qwen; scales of zero, by which norms multiply by one."""
    hidden, head_dim = config.hidden_size, config.head_dim
    kernels = {name: module for name, module in qwen_llama.init_layer(config, key).items() if "kernel" in module}
    norms = {"attention_norm": hidden, "attention_out_norm": hidden, "mlp_in_norm": hidden, "mlp_out_norm": hidden}
    norms |= {"q_norm": head_dim, "k_norm": head_dim}
    return kernels | {name: init_norm(size) for name, size in norms.items()}


def layer(config: Config, params, x, turns, attend, constrain):
    """One layer, without auxiliary numbers; what attention and the MLP add is normalized before and after."""
    h = norm(config, x, params["attention_norm"])
    mixed, kept = qwen_llama.attention(config, params, h, turns, attend, constrain, norm)
    x = constrain(x + norm(config, mixed, params["attention_out_norm"]), "residual")
    h = norm(config, x, params["mlp_in_norm"])
    gated = jax.nn.gelu(dense(h, params["gate"]), approximate=True)  # [B, T, mlp]
    out = dense(constrain(gated * dense(h, params["up"]), "mlp"), params["down"])
    return constrain(x + norm(config, out, params["mlp_out_norm"]), "residual"), kept, {}


# Dense Qwen's and Llama's mlp_norm is the post_attention_layernorm of theirs, before the MLP. Gemma's is another one.
MODULES = {name: theirs for name, theirs in qwen_llama.MODULES.items() if name != "layers/mlp_norm"}
MODULES |= {
    "layers/attention_out_norm": "model.layers.{}.post_attention_layernorm",
    "layers/mlp_in_norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers/mlp_out_norm": "model.layers.{}.post_feedforward_layernorm",
}

# Key of config.json -> our field, beside those that all families have.
KEYS = {"sliding_window": "window", "rope_local_base_freq": "local_rope_theta", "query_pre_attn_scalar": "query_scalar"}
# What transformers assumes for keys that a config.json lacks; those of Google's larger sizes lack most.
DEFAULTS = dict(
    vocab_size=262208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131072,
    rms_norm_eps=1e-6, tie_word_embeddings=True, sliding_window=4096, rope_theta=1e6, rope_local_base_freq=1e4,
)  # fmt: skip
EXPECTED = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False}
EXPECTED |= {"final_logit_softcapping": None, "attn_logit_softcapping": None}


def read_config(raw: dict) -> Config:
    """The shape that a config.json describes; raises InputError for a key that changes the forward pass."""
    raw = DEFAULTS | raw
    shapes.expect(raw, EXPECTED)
    if "query_pre_attn_scalar" not in raw and raw["head_dim"] != 256:  # the 27B: GGUF files do not say its 168
        raise InputError(f"query_pre_attn_scalar is missing, and heads have {raw['head_dim']!r} numbers, not 256")
    raw = {"query_pre_attn_scalar": 256} | raw | _rope(raw)
    layers = shapes.integer(raw, "num_hidden_layers")
    own = {field: shapes.number(raw, key) for key, field in KEYS.items()}
    own["window"] = shapes.integer(raw, "sliding_window")
    return Config(**shapes.from_json(raw), **own, period=_period(raw, layers))


def _rope(raw):
    """The keys of transformers 4 for the bases and the scaling, from `rope_parameters` of transformers 5 if they are
    there: an object for each type of layer."""
    both = raw.get("rope_parameters") or {}
    if not isinstance(both, dict) or not all(kind is None or isinstance(kind, dict) for kind in both.values()):
        raise InputError(f"rope_parameters is {both!r}; expected an object for each of {GLOBAL} and {LOCAL}")
    local, everywhere = both.get(LOCAL) or {}, both.get(GLOBAL) or {}
    if local.get("rope_type", "default") != "default":
        raise InputError(f"rope_parameters of {LOCAL} are of type {local['rope_type']!r}; only 'default' is supported")
    scaling = everywhere | (raw.get("rope_scaling") or {})
    return dict(
        rope_parameters=None,
        rope_scaling={key: value for key, value in scaling.items() if key != "rope_theta"} or None,
        rope_theta=everywhere.get("rope_theta", raw["rope_theta"]),
        rope_local_base_freq=local.get("rope_theta", raw["rope_local_base_freq"]),
    )


def _period(raw, layers):
    """`period`, from `sliding_window_pattern` or the `layer_types` of newer files; they must repeat."""
    given = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
    types = raw.get("layer_types")
    if types is None:
        return shapes.integer({"sliding_window_pattern": given}, "sliding_window_pattern")
    first = [*types, GLOBAL].index(GLOBAL) + 1
    for period in (given, first):
        if isinstance(period, int) and period > 0 and types == _types(layers, period):
            return period
    raise InputError(
        f"layer_types are {types!r:.80}; expected {GLOBAL} for every n-th of {layers} and {LOCAL} for others"
    )


def write_config(config: Config) -> dict:
    """The inverse of `read_config`."""
    raw = shapes.to_json(config)
    own = {key: getattr(config, field) for key, field in KEYS.items()}
    if own["query_pre_attn_scalar"] == int(own["query_pre_attn_scalar"]):
        own["query_pre_attn_scalar"] = int(own["query_pre_attn_scalar"])  # which transformers demands
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    more = dict(hidden_activation="gelu_pytorch_tanh", layer_types=_types(config.layers, config.period))
    more |= dict(sliding_window_pattern=config.period)
    return raw | own | more | dict(rope_parameters={GLOBAL: raw["rope_parameters"], LOCAL: local})


GGUF = {"gemma3": "gemma3_text"}
GGUF_SETTINGS = {"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"}


def gguf_turn(config, architecture, name):
    """llama.cpp stores 1 + w of norms, transformers and we w."""
    if name.endswith("norm.weight"):
        return lambda rows: rows - 1


_large = dict(rope_scaling=rope.Linear(8.0), window=1024, max_length=131072)
SIZES = {
    "gemma3-270m": Config(262144, 640, 2048, 18, 4, 1, 256),
    "gemma3-1b": Config(262144, 1152, 6912, 26, 4, 1, 256),
    "gemma3-4b": Config(262208, 2560, 10240, 34, 8, 4, 256, **_large),
}
