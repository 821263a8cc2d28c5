"""Shapes of decoder-only transformers: one dataclass, and what all families' config.json have in common."""

import dataclasses
from typing import ClassVar

from rpg_jax import InputError
from rpg_jax.models import rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a Qwen3, Qwen2.5 or Llama model (pre-norm, GQA, rotary positions, SwiGLU).

    Another family subclasses it, adds what it needs with defaults, and sets `model_type`.
    """

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
    max_length: int = 32768  # longest sequence, in tokens, that positions support; at least what YaRN extends them to
    rope_scaling: rope.Scaling = None
    experts: ClassVar[int] = 0  # of a layer; another family makes it a field

    def __post_init__(self):
        for field in ("vocab_size", "hidden_size", "mlp_size", "layers", "heads", "kv_heads", "head_dim", "max_length"):
            if getattr(self, field) < 1:
                raise InputError(f"model {field} is {getattr(self, field)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise InputError(f"model heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise InputError(f"model head_dim ({self.head_dim}) must be even: rotary positions turn pairs")
        if isinstance(self.rope_scaling, rope.Yarn):  # a config.json may leave max_position_embeddings as it was
            extended = int(self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings)
            object.__setattr__(self, "max_length", max(self.max_length, extended))

    @property
    def model_type(self) -> str:
        """What a config.json calls the family, and the key of `families.FAMILIES`."""
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"


# Key of config.json -> our field, of integers.
SHAPE = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "mlp_size"}
SHAPE |= {"num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
SHAPE |= {"head_dim": "head_dim", "max_position_embeddings": "max_length"}


def from_json(raw: dict) -> dict:
    """The fields of a `ModelConfig` that every family's config.json has; raises InputError that names the key."""
    hidden, heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    if "head_dim" not in raw and heads > 0 and hidden % heads:
        raise InputError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}); give head_dim")
    raw = {"head_dim": hidden // max(heads, 1), "num_key_value_heads": heads} | raw
    theta, scaling = _rope(raw)
    return {field: integer(raw, key) for key, field in SHAPE.items()} | dict(
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=number(raw, "rms_norm_eps"),
        tied_embeddings=bool(raw["tie_word_embeddings"]),
    )


def to_json(config: ModelConfig) -> dict:
    """The inverse of `from_json`, for transformers 4 and 5."""
    scaling = None
    if config.rope_scaling is not None:
        name = next(name for name, kind in rope.SCALINGS.items() if isinstance(config.rope_scaling, kind))
        fields = dataclasses.asdict(config.rope_scaling)
        scaling = {"rope_type": name, **{key: value for key, value in fields.items() if value is not None}}
    return {
        **{key: getattr(config, field) for key, field in SHAPE.items()},
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
    }


def expect(raw: dict, values: dict) -> None:
    """Raises InputError for a key that is there with another value than this one, the only one that is supported."""
    for key, value in values.items():
        if raw.get(key, value) != value:
            raise InputError(f"{key} is {raw[key]!r}; only {value!r} is supported")


def expect_full_attention(layer_types: list | None) -> None:
    """Raises InputError for a type of layers that does not attend to all earlier tokens."""
    other = set(layer_types or []) - {"full_attention"}
    if other:
        raise InputError(f"layers with {', '.join(sorted(map(str, other)))} are not supported; only full_attention is")


def integer(raw, key) -> int:
    """A value of a config.json; raises InputError where it is missing or of another kind."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{key} is {value!r}; expected an integer" if key in raw else f"key {key} is missing")
    return value


def number(raw, key) -> float:
    """A positive number of a config.json; raises InputError for anything else."""
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{key} is {value!r}; expected a positive number")
    return float(value)


def _rope(raw):
    """(theta, scaling or None), from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rotary = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rotary, dict) or any(isinstance(value, dict) for value in rotary.values()):
        raise InputError(f"rope scaling is {rotary!r}; expected one object with rope_type for all layers")
    rotary = {key: value for key, value in rotary.items() if value is not None}
    other = raw.get("rope_parameters")  # somebody may have added a rope_scaling to a file of transformers 5
    theta = other.get("rope_theta") if isinstance(other, dict) else None
    theta = number({"rope_theta": theta or raw["rope_theta"]} | rotary, "rope_theta")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"partial_rotary_factor is {rotary['partial_rotary_factor']!r}; only 1.0 is supported")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in rope.SCALINGS:
        raise InputError(f"rope type {kind!r} is not supported; known: default, {', '.join(rope.SCALINGS)}")
    longest = integer(raw, "max_position_embeddings")
    original = raw.get("original_max_position_embeddings") or rotary.get("original_max_position_embeddings") or longest
    rotary["original_max_position_embeddings"] = original
    if kind == "yarn":
        rotary |= _yarn_defaults(rotary, longest)
    fields = dataclasses.fields(rope.SCALINGS[kind])
    missing = [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in rotary]
    if missing:
        raise InputError(f"rope scaling {kind} lacks {', '.join(missing)}")
    return theta, rope.SCALINGS[kind](**{f.name: rotary[f.name] for f in fields if f.name in rotary})


def _yarn_defaults(rotary, longest):
    """`factor`, by default the ratio of the two lengths, and `attention_factor` if DeepSeek's mscale keys define it."""
    factor = rotary.get("factor", longest / number(rotary, "original_max_position_embeddings"))
    defaults = {"factor": factor}
    mscale, all_dims = rotary.get("mscale"), rotary.get("mscale_all_dim")
    if "attention_factor" not in rotary and mscale and all_dims:
        numerator = rope.yarn_mscale(number(defaults, "factor"), mscale)
        defaults["attention_factor"] = numerator / rope.yarn_mscale(factor, all_dims)
    return defaults
