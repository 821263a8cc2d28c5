"""Hugging Face's format: `config.json` to and from `ModelConfig`, and the names of tensors."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

from rpg_jax import InputError
from rpg_jax.models import families
from rpg_jax.models.config import ModelConfig
from rpg_jax.models.lora import LoRA

ARCHITECTURES = {family.ARCHITECTURES[name]: name for name, family in families.FAMILIES.items()}  # -> model_type


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor's place in our tree: a leaf, or one entry of its leading axes, perhaps transposed."""

    leaf: str
    index: tuple[int, ...]  # (layer,), or (layer, expert); () for a whole leaf
    transposed: bool  # their matrices are [out, in]; ours, the leaves named kernel, are [in, out]
    shape: tuple[int, ...]  # as Hugging Face stores the tensor


def tensor_name(leaf: str, index: tuple[int, ...]) -> str:
    """The tensor of an entry of our leaf such as `layers/q/kernel`; that of an adapter as peft names it."""
    module, _, part = leaf.rpartition("/")
    theirs = families.TENSORS[module].format(*index)
    if part in ("lora_a", "lora_b"):
        return f"base_model.model.{theirs}.lora_{part[-1].upper()}.weight"
    return f"{theirs}.bias" if part == "bias" else f"{theirs}.weight"


def places(leaves: dict[str, Any]) -> dict[str, Place]:
    """{tensor name: Place} of {name: leaf} of a training tree, with layers stacked; ordered layer by layer."""
    tensors = {}
    for leaf, array in leaves.items():
        axes = families.TENSORS[leaf.rpartition("/")[0]].count("{}")
        single, transposed = array.shape[axes:], leaf.endswith(("/kernel", "/lora_a", "/lora_b"))
        for index in np.ndindex(*array.shape[:axes]):
            place = Place(leaf, index, transposed, single[::-1] if transposed else single)
            tensors[tensor_name(leaf, index)] = place
    modules = list(families.TENSORS)

    def order(item):
        module, _, part = item[1].leaf.rpartition("/")
        return module == "head", item[1].index, modules.index(module), part == "bias"

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


def parse_config(raw: dict) -> ModelConfig:
    """The shape that the values of a `config.json` describe. Raises ValueError as `read_config` does."""
    named = raw.get("architectures") or raw.get("model_type")
    name = named[0] if isinstance(named, list) and named else named
    model_type = ARCHITECTURES.get(name, name) if isinstance(name, str) else None
    if model_type not in families.FAMILIES:
        raise InputError(f"architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            method = raw[key].get("quant_method") if isinstance(raw[key], dict) else raw[key]
            raise InputError(f"{key} ({method!r}): quantized weights are not supported; use the unquantized checkpoint")
    given = {key: value for key, value in raw.items() if value is not None}
    return families.FAMILIES[model_type].read_config(given | {"model_type": model_type})


def config_json(config: ModelConfig) -> dict:
    """The `config.json` of a shape, for transformers 4 and 5, without a dtype or token ids.

    Raises ValueError for a shape that no architecture has.
    """
    family = families.of(config)
    named = {"architectures": [family.ARCHITECTURES[config.model_type]], "model_type": config.model_type}
    return named | family.write_config(config)


def adapter_config(lora: LoRA, base: str) -> dict:
    """The `adapter_config.json` with which peft loads adapters beside the model in the folder `base`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [families.TENSORS[f"layers/{name}"].rpartition(".")[2] for name in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
