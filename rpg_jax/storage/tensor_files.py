"""Files of tensors on the host: where each tensor is, reading rows of one, and writing of safetensors.

The safetensors package validates every header. Data is read and written directly, because the package maps files into
memory: its copies ran at a quarter of the speed, and mapped pages count as this process's memory.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from rpg_jax import InputError
from rpg_jax.models.huggingface import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_ROWS = 1024  # compared at once
_SHOWN = 3  # names in an error


class Stored(NamedTuple):
    """A tensor's place on disk."""

    file: pathlib.Path
    offset: int  # of its first byte in the file
    code: str  # its dtype, as safetensors names it
    shape: tuple[int, ...]
    quantization: str | None = None  # of a GGUF file: how its numbers are packed; they are read as float32
    turn: Callable[[np.ndarray], np.ndarray] | None = None  # of a GGUF file: from all rows there to those here

    def row_bytes(self, width: int) -> int:
        """Bytes on disk of a row of so many numbers."""
        if self.quantization is None:
            return width * DTYPES[self.code].itemsize
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.quantization]]
        return width // block * size

    def numbers(self, data: np.ndarray) -> np.ndarray:
        """Rows of bytes u8[rows, row_bytes] as rows of numbers in the tensor's dtype."""
        if self.quantization is None:
            return data.view(DTYPES[self.code])
        import gguf

        return gguf.dequantize(data, gguf.GGMLQuantizationType[self.quantization])


def contents(directory) -> tuple[dict[str, Stored], list[str]]:
    """{name: Stored} of the model in a folder, and the mistakes in its index, one string for each kind.

    Raises ValueError for a folder without safetensors, or with a file that is absent, truncated or corrupt; names it.
    """
    directory = pathlib.Path(directory)
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE), []
    if not (directory / INDEX).is_file():
        others = sorted(file.name for file in directory.glob("*.bin"))
        mend = f"; {others[0]} is a pickle, which is never read: save it as safetensors" if others else ""
        raise InputError(f"{directory} holds neither {SINGLE} nor {INDEX}{mend}")
    index = read_json(directory / INDEX).get("weight_map")
    names = index.values() if isinstance(index, dict) else [None]
    if not all(isinstance(name, str) and pathlib.PurePath(name).name == name for name in names):
        raise InputError(f"{directory / INDEX}: weight_map must give each tensor the name of a file in the same folder")
    absent = {name: file for name, file in index.items() if not (directory / file).is_file()}
    if absent:
        files = few(sorted(set(absent.values())))
        raise InputError(f"{directory / INDEX} names files that are not there: {files} (tensors {few(absent)})")
    headers = {file: _header(directory / file) for file in sorted(set(names))}
    named, there = index.items(), [(name, file) for file, header in headers.items() for name in header]
    lost = [f"{name} is not in {file}, where {INDEX} has it" for name, file in named - set(there)]
    strays = [f"{name} is in {file}, but {INDEX} does not name it there" for name, file in set(there) - named]
    faults = [few(sorted(kind)) for kind in (lost, strays) if kind]
    places = dict(there) | {name: file for name, file in named if name in headers[file]}
    return {name: headers[file][name] for name, file in places.items()}, faults


def few(names: Iterable[str]) -> str:
    """Three of several names, with commas between them, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def read(name: str, stored: Stored, first: int, last: int) -> np.ndarray:
    """Rows `first` to `last` of a tensor, as the file has them, in its dtype. Raises ValueError if the file ends."""
    rows = (first, last) if stored.turn is None else (0, stored.shape[0])
    size = stored.row_bytes(math.prod(stored.shape[1:]))  # of a row
    data = np.fromfile(stored.file, np.uint8, (rows[1] - rows[0]) * size, offset=stored.offset + rows[0] * size)
    if data.size < (rows[1] - rows[0]) * size:
        raise InputError(f"{stored.file} ends within tensor {name}; copy the file again")
    block = stored.numbers(data.reshape(-1, size)).reshape(-1, *stored.shape[1:])
    return block if stored.turn is None else stored.turn(block)[first:last]


def equal(left: Stored, right: Stored) -> bool:
    """Whether two tensors hold the same bytes, compared a few rows at a time."""
    if (left.code, left.shape) != (right.code, right.shape):
        return False
    parts = [(start, min(start + _ROWS, left.shape[0])) for start in range(0, left.shape[0], _ROWS)]
    return all(read("", left, *part).tobytes() == read("", right, *part).tobytes() for part in parts)


def write(file, tensors: list[tuple[str, np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]) -> int:
    """Writes a safetensors file; returns the bytes of its tensors.

    Args:
      tensors: [(name, dtype, shape, make)]; `make()` is called when the tensor is written.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors then begin at a multiple of 8 bytes
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, make in tensors:
            out.write(np.ascontiguousarray(make()).reshape(-1).view(np.uint8).data)
    return offset


def _header(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one file; raises ValueError that names a truncated or corrupt file."""
    try:
        with safetensors.safe_open(file, "np"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is not a whole safetensors file ({error}); {file.stat().st_size} bytes are there: copy it again"
        ) from None
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {
        name: Stored(file, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
    }
