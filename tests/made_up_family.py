"""A family as a fork would add it, in one file: two local layers, then a global one, with a soft cap and a scale of
their own; norms by 1 + w, embeddings that are multiplied, GeGLU, and an auxiliary number of each layer."""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax.models import AttentionKind, ModelConfig
from rpg_jax.models.config import from_json, to_json
from rpg_jax.models.layers import dense, init_kernel, rms_norm, rotate

ARCHITECTURES, GGUF, SIZES = {"made_up": "MadeUpForCausalLM"}, {}, {}
MODULES = {"embed": "tokens", "final_norm": "norm", **{f"layers/{name}": f"layers.{{}}.{name}" for name in "nqkvoabc"}}


@dataclasses.dataclass(frozen=True)
class Config(ModelConfig):
    model_type = "made_up"
    window: int = 4
    soft_cap: float = 2.0


def attention_kinds(config):
    shared = dict(scale=0.6, soft_cap=config.soft_cap)
    local = AttentionKind(window=config.window, rope_theta=50.0, **shared)
    everywhere = AttentionKind(rope_theta=config.rope_theta, **shared)
    return tuple(everywhere if layer % 3 == 2 else local for layer in range(config.layers))


def embed(config, x):
    return x * config.hidden_size**0.5


def norm(config, x, params):
    return rms_norm(x, 1 + params["scale"], config.norm_epsilon)


def init_norm(size):
    return {"scale": jnp.zeros(size)}


def init_layer(config, key):
    wide, narrow, mlp = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.mlp_size
    sizes = dict(q=wide, k=narrow, v=narrow, a=mlp, b=mlp)
    shapes = {name: (config.hidden_size, size) for name, size in sizes.items()}
    shapes |= {"o": (wide, config.hidden_size), "c": (mlp, config.hidden_size)}
    params = {name: init_kernel(key, name, shape) for name, shape in shapes.items()}
    return params | {"n": init_norm(config.hidden_size)}


def layer(config, params, x, turns, attend, constrain):
    h = norm(config, x, params["n"])
    q, k, v = (dense(h, params[name]).reshape(*x.shape[:2], -1, config.head_dim) for name in "qkv")
    mixed, kept = attend(rotate(q, *turns), rotate(k, *turns), v)
    x = constrain(x + dense(mixed.reshape(*x.shape[:2], -1), params["o"]), "residual")
    gated = jax.nn.gelu(dense(x, params["a"])) * dense(x, params["b"])
    return constrain(x + dense(gated, params["c"]), "residual"), kept, {"gate": gated.mean()}


def read_config(raw):
    return Config(**from_json(dict(rope_theta=1e4, tie_word_embeddings=True) | raw))


def write_config(config):
    return to_json(config)
