"""Shapes of decoder-only transformers: one dataclass, named sizes, and the number of parameters."""

import dataclasses

from rpg_jax import InputError
from rpg_jax.models import rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen3, Qwen2.5 or Llama model (pre-norm, GQA, rotary positions, SwiGLU)."""

    vocab_size: int
    hidden_size: int
    mlp_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-6
    qk_norm: bool = False  # Qwen3: RMSNorm over each head of q and k
    qkv_bias: bool = False  # Qwen2.5: biases on q, k and v
    tied_embeddings: bool = True
    max_length: int = 32768  # longest sequence, in tokens, that the positions support
    rope_scaling: rope.Scaling = None

    def __post_init__(self):
        for field in ("vocab_size", "hidden_size", "mlp_size", "layers", "heads", "kv_heads", "head_dim", "max_length"):
            if getattr(self, field) < 1:
                raise InputError(f"model {field} is {getattr(self, field)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise InputError(f"model heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"model head_dim ({self.head_dim}) must be even: rotary positions turn pairs")


_qwen3 = dict(qk_norm=True, max_length=40960)
_qwen25 = dict(qkv_bias=True, rope_theta=1e6)
_llama3 = dict(rope_theta=5e5, norm_epsilon=1e-5, max_length=8192)

SIZES = {
    # The least one, for smoke runs; the size of the quickstart; the two sizes of the benchmarks against other systems.
    "micro": ModelConfig(512, 32, 64, 1, 4, 2, 8, qk_norm=True, rope_theta=1e4, max_length=1024),
    "tiny": ModelConfig(512, 128, 384, 4, 4, 2, 32, qk_norm=True, rope_theta=1e4, max_length=1024),
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


def named(name: str) -> ModelConfig:
    """The named size; raises ValueError that lists the names."""
    if name not in SIZES:
        raise InputError(f"unknown model size {name!r}; known: {', '.join(SIZES)}")
    return SIZES[name]


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters."""
    hidden, query, key = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * hidden * query + 2 * hidden * key
    attention += config.qkv_bias * (query + 2 * key) + config.qk_norm * 2 * config.head_dim
    layer = attention + 3 * hidden * config.mlp_size + 2 * hidden
    embeddings = config.vocab_size * hidden * (1 if config.tied_embeddings else 2)
    return embeddings + config.layers * layer + hidden
