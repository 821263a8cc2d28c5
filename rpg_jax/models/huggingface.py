"""Hugging Face's format: `config.json` to and from `ModelConfig`, and the names of tensors.

The supported decoders have the forward pass of `Model`: Qwen2 and Qwen2.5, dense Qwen3, Llama. A checkpoint that needs
more (sliding windows, other biases, quantized weights) is refused, never approximated.
"""

import dataclasses
import json
import pathlib

from rpg_jax import InputError
from rpg_jax.models import rope
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.lora import TARGETS, LoRA

# Architecture -> its traits here, and the values that transformers assumes for keys missing from config.json.
_COMMON = dict(rope_theta=10000.0, rms_norm_eps=1e-6, tie_word_embeddings=False)
ARCHITECTURES = {
    "Qwen2ForCausalLM": (
        dict(model_type="qwen2", qk_norm=False, qkv_bias=True),
        _COMMON | dict(max_position_embeddings=32768, num_key_value_heads=32, max_window_layers=28),
    ),
    "Qwen3ForCausalLM": (
        dict(model_type="qwen3", qk_norm=True, qkv_bias=False),
        _COMMON | dict(max_position_embeddings=32768, num_key_value_heads=32, max_window_layers=28, head_dim=128),
    ),
    "LlamaForCausalLM": (
        dict(model_type="llama", qk_norm=False, qkv_bias=False),
        _COMMON | dict(max_position_embeddings=2048),
    ),
}

# Their key -> our field, of integers.
SHAPE = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "mlp_size"}
SHAPE |= {"num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads"}
SHAPE |= {"head_dim": "head_dim", "max_position_embeddings": "max_length"}

# Our leaf -> their tensor; {} is the layer. Their matrices are [out, in]; ours, the leaves named kernel, are [in, out].
TENSORS = {
    "embed/embedding": "model.embed_tokens.weight",
    "layers/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/q/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/q/bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers/k/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/k/bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers/v/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/v/bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers/q_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers/k_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers/o/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "final_norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
_ADAPTED = {name: TENSORS[f"layers/{name}/kernel"].removesuffix(".weight") for name in TARGETS}
TENSORS |= {  # as peft names them; its A is [rank, I] and its B [O, rank]
    f"layers/{name}/lora_{part.lower()}": f"base_model.model.{module}.lora_{part}.weight"
    for name, module in _ADAPTED.items()
    for part in "AB"
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor's place in our tree: a leaf, or one layer of a stacked leaf, perhaps transposed."""

    leaf: str
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]  # as Hugging Face stores the tensor


def places(leaf_shapes: dict[str, tuple[int, ...]]) -> dict[str, Place]:
    """{tensor name: Place} of a training tree, {leaf name: shape} with stacked layers; ordered layer by layer."""
    tensors = {}
    for leaf, shape in leaf_shapes.items():
        stacked, transposed = leaf.startswith("layers/"), leaf.endswith(("/kernel", "/lora_a", "/lora_b"))
        single = tuple(shape[1:] if stacked else shape)  # of one layer
        for layer in range(shape[0]) if stacked else [None]:
            name = TENSORS[leaf].format(layer)
            tensors[name] = Place(leaf, layer, transposed, single[::-1] if transposed else single)
    leaves = list(TENSORS)

    def order(item):
        place = item[1]
        layer = -1 if place.layer is None else place.layer
        return place.leaf == "head/kernel", layer, leaves.index(place.leaf)

    return dict(sorted(tensors.items(), key=order))


def read_config(directory) -> ModelConfig:
    """The shape of a checkpoint, from its `config.json` of transformers 4 or 5.

    Raises:
      ValueError: it is not there or not JSON, lacks a key, or needs something unsupported; names the file and the key.
    """
    file = pathlib.Path(directory) / "config.json"
    raw = read_json(file)
    try:
        return parse_config(raw)
    except (ValueError, TypeError, ArithmeticError) as error:  # a value may be of any type
        raise InputError(f"{file}: {error}") from None


def read_json(file) -> dict:
    """The JSON object in a file. Raises ValueError if there is no file, or if it holds anything else."""
    file = pathlib.Path(file)
    if not file.is_file():
        raise InputError(f"{file} does not exist; expected a folder with a model in Hugging Face's format")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}); download or copy it again") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file} holds a JSON {type(raw).__name__}; expected an object")
    return raw


def config_json(config: ModelConfig) -> dict:
    """The `config.json` of a shape, for transformers 4 and 5, without a dtype or token ids.

    Raises ValueError for a shape that no architecture has.
    """
    traits = dict(qk_norm=config.qk_norm, qkv_bias=config.qkv_bias)
    matching = (name for name, (others, _) in ARCHITECTURES.items() if traits.items() <= others.items())
    architecture = next(matching, None)
    if architecture is None:
        raise InputError(f"no architecture of {', '.join(ARCHITECTURES)} has both qk_norm and qkv_bias")
    scaling = {"rope_type": "default"}
    if config.rope_scaling is not None:
        name = next(name for name, kind in rope.SCALINGS.items() if isinstance(config.rope_scaling, kind))
        fields = dataclasses.asdict(config.rope_scaling)
        scaling = {"rope_type": name, **{key: value for key, value in fields.items() if value is not None}}
    return {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture][0]["model_type"],
        **{key: getattr(config, field) for key, field in SHAPE.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
    }


def adapter_config(lora: LoRA, base: str) -> dict:
    """The `adapter_config.json` with which peft loads adapters beside the model in the folder `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [_ADAPTED[name].rpartition(".")[2] for name in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def parse_config(raw: dict) -> ModelConfig:
    """The shape that the values of a `config.json` describe. Raises ValueError as `read_config` does."""
    traits, defaults = _architecture(raw)
    raw = defaults | {key: value for key, value in raw.items() if value is not None}
    _refuse_what_we_lack(raw)
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    if "head_dim" not in raw and heads > 0 and hidden % heads:
        raise InputError(f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}); give head_dim")
    raw = {"head_dim": hidden // max(heads, 1), "num_key_value_heads": heads} | raw
    theta, scaling = _rope(raw)
    return ModelConfig(
        **{field: _integer(raw, key) for key, field in SHAPE.items()},
        rope_theta=theta,
        norm_epsilon=_number(raw, "rms_norm_eps"),
        qk_norm=traits["qk_norm"],
        qkv_bias=traits["qkv_bias"],
        tied_embeddings=bool(raw["tie_word_embeddings"]),
        rope_scaling=scaling,
    )


def _architecture(raw):
    """The entry of `ARCHITECTURES` that a config names, by architecture or else by model type."""
    named = raw.get("architectures") or [
        name for name, (traits, _) in ARCHITECTURES.items() if traits["model_type"] == raw.get("model_type")
    ]
    name = named[0] if isinstance(named, list) and named else raw.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def _refuse_what_we_lack(raw):
    """Raises ValueError for a setting that changes the forward pass."""
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    for key, value in expected.items():
        if raw.get(key, value) != value:
            raise InputError(f"{key} is {raw[key]!r}; only {value!r} is supported")
    for key in ("quantization_config", "compression_config"):
        if key in raw:
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            raise InputError(f"{key} ({method!r}): quantized weights are not supported; use the unquantized checkpoint")
    kinds = raw.get("layer_types")
    if kinds is None and raw.get("use_sliding_window") and "sliding_window" in raw:
        windowed = raw["max_window_layers"] < _integer(raw, "num_hidden_layers")
        kinds = ["sliding_attention"] if windowed else []
    other = set(kinds or []) - {"full_attention"}
    if other:
        raise InputError(f"layers with {', '.join(sorted(map(str, other)))} are not supported; only full_attention is")


def _rope(raw):
    """(theta, scaling or None), from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    rotary = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rotary, dict) or any(isinstance(value, dict) for value in rotary.values()):
        raise InputError(f"rope scaling is {rotary!r}; expected one object with rope_type for all layers")
    rotary = {key: value for key, value in rotary.items() if value is not None}
    theta = _number({"rope_theta": raw["rope_theta"]} | rotary, "rope_theta")
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"partial_rotary_factor is {rotary['partial_rotary_factor']!r}; only 1.0 is supported")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str) or kind not in rope.SCALINGS:
        raise InputError(f"rope type {kind!r} is not supported; known: default, {', '.join(rope.SCALINGS)}")
    longest = _integer(raw, "max_position_embeddings")
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
    factor = rotary.get("factor", longest / _number(rotary, "original_max_position_embeddings"))
    defaults = {"factor": factor}
    mscale, all_dims = rotary.get("mscale"), rotary.get("mscale_all_dim")
    if "attention_factor" not in rotary and mscale and all_dims:
        numerator = rope.yarn_mscale(_number(defaults, "factor"), mscale)
        defaults["attention_factor"] = numerator / rope.yarn_mscale(factor, all_dims)
    return defaults


def _integer(raw, key) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{key} is {value!r}; expected an integer" if key in raw else f"key {key} is missing")
    return value


def _number(raw, key) -> float:
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InputError(f"{key} is {value!r}; expected a positive number")
    return float(value)
