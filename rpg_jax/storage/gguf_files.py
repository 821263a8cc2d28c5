"""GGUF files (llama.cpp's format): metadata, the config and the places of tensors, in Hugging Face's terms.

The gguf package reads the header, knows what tensors are called, and dequantizes them.
"""

import itertools
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rpg_jax import InputError
from rpg_jax.models import families, huggingface, rope
from rpg_jax.models.config import ModelConfig
from rpg_jax.storage.tensor_files import DTYPES, Stored

SUFFIX = ".gguf"
# general.architecture -> the family.
ARCHITECTURES = {name: family for family in families.FAMILIES.values() for name in family.GGUF}
# Key of the metadata, after the architecture's name -> key of config.json.
SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_READ_ELSEWHERE = ("vocab_size", "attention.value_length", "rope.dimension_count", "rope.scaling.type")
_READ_ELSEWHERE += ("rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned")
_FACTORS = "rope_freqs.weight"  # what divides rotary frequencies: how GGUF stores the scaling of Llama 3.1
_LLAMA31 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)

_MOST_VALUES = 1 << 21  # of a header; a vocabulary of 128,256 tokens with its merges has a million


class Gguf(NamedTuple):
    """What the header of a file says."""

    file: pathlib.Path
    metadata: dict[str, Any]  # numbers, strings, and lists of them
    tensors: dict[str, Stored]  # by their names in the file

    @property
    def architecture(self) -> str:
        return self.metadata["general.architecture"]


def read_header(file) -> Gguf:
    """The metadata of a file, and where its tensors are.

    Raises ValueError, with the file and the architecture or the tensor, for what is damaged or not supported.
    """
    file = pathlib.Path(file)
    try:
        import gguf as package
    except ImportError as error:
        raise InputError(f"{file}: GGUF files need the package gguf ({error}); pip install gguf") from None
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    reads = itertools.count()

    class Reader(package.GGUFReader):
        """The package's, which would take all memory for the sizes that a damaged file declares."""

        def _get(self, offset, dtype, count=1, override_order=None):
            if self.byte_order == "S" or next(reads) > _MOST_VALUES:
                raise InputError("its byte order is another one, or its header has too many values")
            return np.frombuffer(self.data, dtype, int(count), offset)

    try:
        with np.errstate(over="raise"):  # of an offset
            reader = Reader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise InputError(
            f"{file} is not a whole GGUF file ({error}); {file.stat().st_size} bytes are there: copy it again"
        ) from None
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(f"{file}: architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}")
    if (files := metadata.get("split.count", 1)) not in (0, 1):
        raise InputError(f"{file} is one of {files} files; join them with llama-gguf-split --merge of llama.cpp")
    return Gguf(file, metadata, {tensor.name: _stored(file, tensor) for tensor in reader.tensors})


def read_config(gguf: Gguf) -> ModelConfig:
    """The shape of the model. Raises ValueError for what is missing or not supported; names the file and the key."""
    try:
        return huggingface.parse_config(_raw_config(gguf))
    except (ValueError, TypeError, ArithmeticError) as error:  # a value may be of any type
        raise InputError(f"{gguf.file}: {error}") from None


def contents(gguf: Gguf) -> dict[str, Stored]:
    """{tensor name in Hugging Face's format: Stored}; a tensor that the architecture does not have keeps its name."""
    import gguf as package

    config = read_config(gguf)
    translate = package.get_tensor_name_map(package.MODEL_ARCH[gguf.architecture.upper()], config.layers)
    theirs = {name.format(layer) for name in families.of(config).MODULES.values() for layer in range(config.layers)}
    names = {f"{translate.get_name(name)}.{part}": f"{name}.{part}" for name in theirs for part in ("weight", "bias")}
    tensors = {}
    for name, stored in gguf.tensors.items():
        if name != _FACTORS:
            name = names.get(name, name)
            turn = families.of(config).gguf_turn(config, gguf.architecture, name)
            tensors[name] = stored._replace(rows=partial(_turned, stored, turn)) if turn else stored
    return tensors


def _turned(stored: Stored, turn: Callable, first: int, last: int) -> np.ndarray:
    return turn(stored.rows(0, stored.shape[0]))[first:last]


def _stored(file, tensor) -> Stored:
    import gguf as package

    name, kind, shape = tensor.name, tensor.tensor_type, tuple(map(int, tensor.shape))[::-1]
    block, size = package.GGML_QUANT_SIZES[kind]
    try:
        package.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        raise InputError(f"{file}: tensor {name} has the quantization {kind.name}, which is not supported") from None
    if not shape or (len(shape) == 1 and block > 1):
        raise InputError(f"{file}: tensor {name} of shape {list(shape)} does not divide into blocks of {block}")

    def rows(first, last):
        data = np.ascontiguousarray(tensor.data[first:last])
        return data.view(DTYPES[kind.name]) if kind.name in DTYPES else package.dequantize(data, kind)

    return Stored(file, kind.name if kind.name in DTYPES else "F32", shape, rows)


def _raw_config(gguf: Gguf) -> dict:
    """The `config.json` that describes the model."""
    prefix = f"{gguf.architecture}."
    own = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    family = ARCHITECTURES[gguf.architecture]
    settings = SETTINGS | family.GGUF_SETTINGS
    unknown = {k: v for k, v in own.items() if k not in settings and k not in _READ_ELSEWHERE and (v or v is False)}
    if unknown:
        key, value = next(iter(unknown.items()))
        raise InputError(f"{prefix}{key} is {value!r:.60}, which is not supported")
    raw = {theirs: _shortest(own[key]) for key, theirs in settings.items() if key in own}
    head_dim = raw.setdefault("head_dim", own.get("rope.dimension_count"))
    for key in ("attention.value_length", "rope.dimension_count"):
        if head_dim is not None and own.get(key, head_dim) != head_dim:
            raise InputError(f"{prefix}{key} is {own[key]!r}; only the {head_dim} of a head is supported")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor token_embd.weight is missing")
    layers = raw.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers <= len(gguf.tensors):
        raise InputError(f"{prefix}block_count is {layers!r}, and there are {len(gguf.tensors)} tensors")
    raw |= {"model_type": family.GGUF[gguf.architecture], "vocab_size": embedding.shape[0]}
    return raw | {"tie_word_embeddings": "output.weight" not in gguf.tensors, "rope_scaling": _scaling(gguf, own, raw)}


def _shortest(value):
    """A number of 32 bits as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _scaling(gguf: Gguf, own: dict, raw: dict) -> dict | None:
    """The `rope_scaling` of config.json."""
    kind = own.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise InputError(f"rope.scaling.type is {kind!r}; known: none, linear, yarn")
    if _FACTORS in gguf.tensors:
        return _llama31(gguf.tensors[_FACTORS], raw)
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    return scaling | {"original_max_position_embeddings": own.get("rope.scaling.original_context_length")}


def _llama31(stored: Stored, raw: dict) -> dict:
    """The scaling whose divisors of frequencies the file stores; raises ValueError if it is not that of Llama 3.1."""
    divisors = stored.rows(0, stored.shape[0])
    if divisors.dtype == np.float32 and divisors.size and 1 <= divisors.max() < np.inf:
        head_dim, theta = 2 * divisors.size, raw.get("rope_theta", 10000.0)
        fields = _LLAMA31 | {"factor": _shortest(float(divisors.max()))}
        scaled, _ = rope.frequencies(head_dim, theta, rope.Llama3(**fields))
        if np.allclose(rope.frequencies(head_dim, theta, None)[0] / divisors, scaled, rtol=1e-5, atol=0):
            return {"rope_type": "llama3", **fields}
    raise InputError(f"{_FACTORS} does not hold the scaling of Llama 3.1, the only one of its kind that is supported")
