"""Files of tensors on the host: where each tensor is, shards of a tensor into arrays, and writing of safetensors.

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
_WORDS = {2: np.uint16, 4: np.uint32}  # by item size; NumPy copies its own integers faster than ml_dtypes
_ROWS = 64  # read or written at once: a block of them stays in cache while it is transposed
_CHUNK = 1 << 20  # bytes compared at once
_SHOWN = 3  # names in an error
_ALIGNMENT = 64  # bytes; JAX on CPU uses memory with this alignment without a copy


Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dimension of a shard


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

    Raises:
      ValueError: the folder holds no safetensors, or its index names a file that does not exist, is truncated or
        corrupt; names it.
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


def read(name: str, stored: Stored, shards: Iterable[tuple[slice, ...]], transposed: bool) -> dict[Bounds, np.ndarray]:
    """Shards of a tensor, or of its transpose, each in an array of its own; each row of the file is read once.

    Args:
      shards: a slice for each dimension of the result; equal shards share one array.

    Returns:
      {bounds of the shard: array in the dtype on disk, rows contiguous}.

    Raises:
      ValueError: the file ends within the tensor.
    """
    dtype, shape = DTYPES[stored.code], stored.shape[::-1] if transposed else stored.shape
    words = _WORDS[dtype.itemsize]
    arrays = {}
    for bounds in {shard_bounds(shard, shape) for shard in shards}:
        arrays[bounds] = _empty([stop - start for start, stop in bounds], words)
    rows, width = stored.shape[0], math.prod(stored.shape[1:])  # on disk: [rows, ...], width numbers in a row
    row_bytes = stored.row_bytes(width)
    step = _ROWS if width > 1 and stored.turn is None else rows
    with stored.file.open("rb", buffering=0) as file:
        for first in range(0, rows, step):
            last = min(first + step, rows)
            wanted = [bounds for bounds in arrays if _overlap(bounds[-1 if transposed else 0], first, last)]
            if not wanted:
                continue
            data = np.empty((last - first, row_bytes), np.uint8)  # rows first..last of the file
            file.seek(stored.offset + first * row_bytes)
            if file.readinto(data.reshape(-1)) != data.nbytes:
                raise InputError(f"{stored.file} ends within tensor {name}; copy the file again")
            block = stored.numbers(data).reshape(last - first, *stored.shape[1:])
            block = (block if stored.turn is None else stored.turn(block)).view(words)
            for bounds in wanted:
                row_bound, *other_bounds = bounds[::-1] if transposed else bounds  # in the orientation of the file
                low, high = _overlap(row_bound, first, last)
                part = block[(slice(low - first, high - first), *(slice(*bound) for bound in other_bounds))]
                filled = slice(low - row_bound[0], high - row_bound[0])
                if transposed:
                    arrays[bounds][:, filled] = part.T
                else:
                    arrays[bounds][filled] = part
    return {bounds: array.view(dtype) for bounds, array in arrays.items()}


def equal(left: Stored, right: Stored) -> bool:
    """Whether two tensors hold the same bytes, compared chunk by chunk."""
    if (left.code, left.shape) != (right.code, right.shape):
        return False
    remaining = math.prod(left.shape) * DTYPES[left.code].itemsize  # bytes
    with left.file.open("rb") as left_file, right.file.open("rb") as right_file:
        left_file.seek(left.offset)
        right_file.seek(right.offset)
        while remaining > 0:
            chunk = min(remaining, _CHUNK)
            if left_file.read(chunk) != right_file.read(chunk):
                return False
            remaining -= chunk
    return True


def shard_bounds(shard: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """A tuple of slices as ((start, stop), ...), which can be a key."""
    return tuple(part.indices(size)[:2] for part, size in zip(shard, shape, strict=True))


def write(file, tensors: list[tuple[str, np.dtype, tuple[int, ...], Callable[[], np.ndarray]]]) -> int:
    """Writes a safetensors file; returns the bytes of its tensors.

    Args:
      tensors: [(name, dtype, shape, make)]; `make()` is called when the tensor is written, and its array may be a
        transposed view.
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
            array = make()
            array = array.view(_WORDS[array.dtype.itemsize])
            for first in range(0, len(array), _ROWS):
                out.write(np.ascontiguousarray(array[first : first + _ROWS]).data)
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


def _overlap(bound, first, last):
    """The part of first..last that lies within a bound, or None."""
    low, high = max(bound[0], first), min(bound[1], last)
    return (low, high) if low < high else None


def _empty(shape, words):
    """An array of integers, aligned so that JAX on CPU uses its memory without a copy."""
    size = math.prod(shape) * np.dtype(words).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(words).reshape(shape)
