"""The families of models: one module each, and one table, by the `model_type` of config.json.

What the rest of the code asks of a module; `config` is a `ModelConfig` or the family's own subclass of it:
  SIZES           {name: config}
  init_layer      (config, key) -> a layer's float32 parameters: {module: {"kernel" [I, O], "bias" [O], "scale" [D]}}
  layer           (config, params, x [B, T, hidden], turns, attend, constrain) -> (x, kept, {name: auxiliary array});
                  `attend(q, k, v) -> (out, kept)` is attention of the layer's kind on [B, T, heads, head_dim], `turns`
                  are those of `rope.turns` for it, and `constrain(array, name)` pins an activation to a mesh
  attention_kinds (config) -> each layer's `AttentionKind`
  embed           (config, rows of the embedding [B, T, hidden] in the compute dtype) -> what the first layer takes
  norm, init_norm (config, x, params) -> x, after the last layer; and (size) -> its parameters
  MODULES         {module of the tree: its name in Hugging Face's files}, with a {} for each leading axis: layers,
                  experts. A module that two families have must have the same name in both.
  ARCHITECTURES   {model_type: architecture} of config.json
  read_config     (values of a config.json, with model_type) -> config; write_config is the inverse
  GGUF            {general.architecture: model_type}; GGUF_SETTINGS are keys beside those of `gguf_files.SETTINGS`
  gguf_turn       (config, architecture, Hugging Face's name of a tensor) -> None, or a function from the array in a
                  GGUF file to the one here
"""

from types import ModuleType

from rpg_jax import InputError
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.families import gemma3, qwen3_moe, qwen_llama

ALL = (qwen_llama, qwen3_moe, gemma3)
FAMILIES: dict[str, ModuleType] = {name: family for family in ALL for name in family.ARCHITECTURES}
SIZES = {name: size for family in ALL for name, size in family.SIZES.items()}
TENSORS = {ours: theirs for family in ALL for ours, theirs in family.MODULES.items()}


def of(config: ModelConfig) -> ModuleType:
    """The family of a shape."""
    return FAMILIES[config.model_type]


def named(name: str) -> ModelConfig:
    """The named size; raises InputError that lists the names."""
    if name not in SIZES:
        raise InputError(f"unknown model size {name!r}; known: {', '.join(SIZES)}")
    return SIZES[name]
