"""Qwen2, Qwen2.5, dense Qwen3 and Llama: pre-norm layers with grouped queries, rotary positions and SwiGLU.

A checkpoint that needs more (sliding windows, other biases, quantized weights) is refused, never approximated.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import InputError
from rpg_jax.models import config as shapes
from rpg_jax.models.attention import AttentionKind
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.layers import dense, init_kernel, rms_norm, rotate


def attention_kinds(config: ModelConfig) -> tuple[AttentionKind, ...]:
    """Every layer attends to all earlier tokens."""
    return (AttentionKind(rope_theta=config.rope_theta, rope_scaling=config.rope_scaling),) * config.layers


def embed(config: ModelConfig, x: jax.Array) -> jax.Array:
    return x


def norm(config: ModelConfig, x: jax.Array, params: dict) -> jax.Array:
    return rms_norm(x, params["scale"], config.norm_epsilon)


def init_norm(size: int) -> dict:
    return {"scale": jnp.ones(size, jnp.float32)}


def init_layer(config: ModelConfig, key: jax.Array) -> dict:
    """Kernels of variance 1 / fan-in, scales of one, biases of zero."""
    hidden, mlp, heads, kv = config.hidden_size, config.mlp_size, config.heads, config.kv_heads
    outputs = {"q": heads * config.head_dim, "k": kv * config.head_dim, "v": kv * config.head_dim}
    inputs = {name: (hidden, size) for name, size in outputs.items()}
    inputs |= {"o": (outputs["q"], hidden), "gate": (hidden, mlp), "up": (hidden, mlp), "down": (mlp, hidden)}
    params = {name: init_kernel(key, name, shape) for name, shape in inputs.items()}
    if config.qkv_bias:
        params |= {name: params[name] | {"bias": jnp.zeros(size, jnp.float32)} for name, size in outputs.items()}
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim} if config.qk_norm else {}
    return params | {name: init_norm(size) for name, size in norms.items()}


def attention(config, params, x, turns, attend, constrain, norm=norm):
    """x [B, T, hidden], normalized, to what attention adds to the residual, and what `attend` kept; `norm` is that of
    queries and keys."""
    batch_and_time = x.shape[:2]
    q, k, v = (dense(x, params[name]) for name in "qkv")

    def turned(q, k, *scales):
        q, k = (z.reshape(*batch_and_time, -1, config.head_dim) for z in (q, k))
        if config.qk_norm:
            q, k = (norm(config, z, {"scale": scale}) for z, scale in zip((q, k), scales, strict=True))
        return rotate(q, *turns), rotate(k, *turns)

    def as_one(q, k, *scales):
        both = jnp.concatenate([q, k], -1).reshape(*batch_and_time, -1, config.head_dim)
        heads = config.heads, config.kv_heads
        scale = jnp.concatenate([jnp.tile(z, (count, 1)) for z, count in zip(scales, heads, strict=True)])
        return tuple(jnp.split(rotate(norm(config, both, {"scale": scale}), *turns), [config.heads], axis=2))

    parts = q, k, *(params[name]["scale"] for name in ("q_norm", "k_norm") if config.qk_norm)
    if config.qk_norm and "tensor" in jax.sharding.get_abstract_mesh().manual_axes:  # a device samples with all heads
        q, k = jax.lax.platform_dependent(*parts, cuda=as_one, default=turned)  # a GPU's kernel less a layer
    else:
        q, k = turned(*parts)
    v = v.reshape(*batch_and_time, -1, config.head_dim)
    mixed, kept = attend(*(constrain(z, "heads") for z in (q, k, v)))  # [B, T, heads, head_dim]
    return dense(mixed.reshape(*batch_and_time, -1), params["o"]), kept


def layer(config, params, x, turns, attend, constrain):
    """One layer, without auxiliary numbers."""
    h = norm(config, x, params["attention_norm"])
    mixed, kept = attention(config, params, h, turns, attend, constrain)
    x = constrain(x + mixed, "residual")
    h = norm(config, x, params["mlp_norm"])
    gated = jax.nn.silu(dense(h, params["gate"]))  # [B, T, mlp]
    h = constrain(gated * dense(h, params["up"]), "mlp")
    return constrain(x + dense(h, params["down"]), "residual"), kept, {}


MODULES = {
    "embed": "model.embed_tokens",
    "layers/attention_norm": "model.layers.{}.input_layernorm",
    **{f"layers/{name}": f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkv"},
    **{f"layers/{name}": f"model.layers.{{}}.self_attn.{name}" for name in ("q_norm", "k_norm")},
    "layers/o": "model.layers.{}.self_attn.o_proj",
    "layers/mlp_norm": "model.layers.{}.post_attention_layernorm",
    **{f"layers/{name}": f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up", "down")},
    "final_norm": "model.norm",
    "head": "lm_head",
}

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# What transformers assumes for keys that a config.json lacks.
_COMMON = dict(rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=False)
_QWEN = _COMMON | dict(max_position_embeddings=32768, num_key_value_heads=32, max_window_layers=28)
DEFAULTS = {"qwen2": _QWEN, "qwen3": _QWEN | dict(head_dim=128), "llama": _COMMON | dict(max_position_embeddings=2048)}


def read_config(raw: dict) -> ModelConfig:
    """The shape that a config.json describes; raises InputError for a key that changes the forward pass."""
    traits = dict(qk_norm=raw["model_type"] == "qwen3", qkv_bias=raw["model_type"] == "qwen2")
    raw = DEFAULTS[raw["model_type"]] | raw
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    shapes.expect(raw, expected)
    kinds = raw.get("layer_types")
    if kinds is None and raw.get("use_sliding_window") and "sliding_window" in raw:
        windowed = raw["max_window_layers"] < shapes.integer(raw, "num_hidden_layers")
        kinds = ["sliding_attention"] if windowed else []
    shapes.expect_full_attention(kinds)
    return ModelConfig(**shapes.from_json(raw), **traits)


def write_config(config: ModelConfig) -> dict:
    """The inverse of `read_config`."""
    if config.qk_norm and config.qkv_bias:
        raise InputError(f"no architecture of {', '.join(ARCHITECTURES.values())} has both qk_norm and qkv_bias")
    return {"hidden_act": "silu", **shapes.to_json(config)}


GGUF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
GGUF_SETTINGS = {}


def gguf_turn(config, architecture, name):
    """llama.cpp lays x0 y0 x1 y1 … of a head of Llama's q and k together, transformers and we x0 x1 … y0 y1 …."""
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        pairs = -1, config.head_dim // 2, 2
        return lambda rows: rows[np.arange(len(rows)).reshape(pairs).swapaxes(1, 2).reshape(-1)]


_qwen3 = dict(qk_norm=True, max_length=40960)
_qwen25 = dict(qkv_bias=True, rope_theta=1e6)
_llama3 = dict(rope_theta=5e5, norm_epsilon=1e-5, max_length=8192)
SIZES = {
    # The least one, for smoke runs; the size of the quickstart, and one of half its width; the two sizes of the
    # benchmarks against other systems.
    "micro": ModelConfig(512, 32, 64, 1, 4, 2, 8, qk_norm=True, rope_theta=1e4, max_length=1024),
    "tiny": ModelConfig(512, 128, 384, 4, 4, 2, 32, qk_norm=True, rope_theta=1e4, max_length=1024),
    "tiny-narrow": ModelConfig(512, 64, 192, 4, 4, 2, 16, qk_norm=True, rope_theta=1e4, max_length=1024),
    "m1": ModelConfig(512, 128, 384, 4, 4, 2, 32, **_qwen3),
    "m2": ModelConfig(151936, 256, 768, 4, 8, 4, 32, **_qwen3),
    "qwen3-0.6b": ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, **_qwen3),
    "qwen3-1.7b": ModelConfig(151936, 2048, 6144, 28, 16, 8, 128, **_qwen3),
    "qwen3-4b": ModelConfig(151936, 2560, 9728, 36, 32, 8, 128, **_qwen3),
    "qwen3-8b": ModelConfig(151936, 4096, 12288, 36, 32, 8, 128, tied_embeddings=False, **_qwen3),
    "qwen2.5-0.5b": ModelConfig(151936, 896, 4864, 24, 14, 2, 64, **_qwen25),
    "qwen2.5-1.5b": ModelConfig(151936, 1536, 8960, 28, 12, 2, 128, **_qwen25),
    "qwen2.5-7b": ModelConfig(152064, 3584, 18944, 28, 28, 4, 128, tied_embeddings=False, **_qwen25),
    "llama3-8b": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128, tied_embeddings=False, **_llama3),
}
