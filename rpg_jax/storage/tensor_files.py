"""Safetensors files of a model on the host: what lies where, blocks of rows into arrays, and arrays into files.

Files are read and written directly. The safetensors package, which still validates every header here, maps them into
memory: its copies ran at a quarter of the speed, and mapped pages count as this process's memory.
"""

import json
import math
import pathlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from rpg_jax.models.huggingface import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_WORDS = {2: np.uint16, 4: np.uint32}  # NumPy copies plain integers faster than dtypes it does not know
_ROWS = 64  # read or written at a time: a block that stays in cache while it is transposed
_CHUNK = 1 << 20  # bytes compared at a time
_ALIGNMENT = 64  # bytes; JAX on CPU then uses the memory in place


class Stored(NamedTuple):
    """Where a tensor lies on disk."""

    file: pathlib.Path
    offset: int  # of its first byte in the file
    code: str  # safetensors' name of its dtype
    shape: tuple[int, ...]


def contents(directory) -> tuple[dict[str, Stored], list[str]]:
    """Every tensor of the model in a folder, and what is wrong with its index, one fault a string.

    Raises:
      OSError: the folder holds no safetensors, or its index names files that are not there.
      ValueError: a file is truncated or corrupt; names it.
    """
    directory = pathlib.Path(directory)
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE), []
    if not (directory / INDEX).is_file():
        others = sorted(file.name for file in directory.glob("*.bin"))
        mend = f"; {others[0]} is a pickle, which is never read: save it as safetensors" if others else ""
        raise FileNotFoundError(f"{directory} holds neither {SINGLE} nor {INDEX}{mend}")
    index = read_json(directory / INDEX).get("weight_map")
    names = index.values() if isinstance(index, dict) else [None]
    if not all(isinstance(name, str) and pathlib.PurePath(name).name == name for name in names):
        raise ValueError(f"{directory / INDEX}: weight_map must give each tensor the name of a file in the same folder")
    absent = {name: file for name, file in index.items() if not (directory / file).is_file()}
    if absent:
        example = next(iter(absent))
        files = ", ".join(sorted(set(absent.values())))
        raise FileNotFoundError(
            f"{directory / INDEX} names files that are not there: {files} (tensor {example} and {len(absent) - 1} more)"
        )
    headers = {file: _header(directory / file) for file in sorted(set(names))}
    faults = [
        f"{name} is not in {file}, where {INDEX} has it" for name, file in index.items() if name not in headers[file]
    ]
    faults += [
        f"{name} is in {file}, but {INDEX} {'has it in ' + index[name] if name in index else 'does not name it'}"
        for file, header in headers.items()
        for name in header
        if index.get(name) != file
    ]
    found = {name: stored for header in headers.values() for name, stored in header.items()}
    return found | {name: headers[file][name] for name, file in index.items() if name in headers[file]}, faults


def read(name: str, stored: Stored, shards, transposed: bool) -> dict:
    """Parts of a tensor, or of its transpose, each in an array of its own; the file's rows are read once.

    Args:
      shards: tuples of slices, one a dimension of the result; equal ones are read once.

    Returns:
      {shard as `key` gives it: array in the dtype on disk, rows contiguous}.
    """
    dtype, shape = DTYPES[stored.code], stored.shape[::-1] if transposed else stored.shape
    words = _WORDS[dtype.itemsize]
    out = {key(shard, shape): None for shard in shards}
    for bounds in out:
        out[bounds] = _empty([stop - start for start, stop in bounds], words)
    rows, width = stored.shape[0], math.prod(stored.shape[1:])
    step = _ROWS if width > 1 else rows
    with stored.file.open("rb", buffering=0) as file:
        for first in range(0, rows, step):
            last = min(first + step, rows)
            takers = [bounds for bounds in out if _overlap(bounds[-1 if transposed else 0], first, last)]
            if not takers:
                continue
            block = np.empty((last - first, *stored.shape[1:]), words)
            file.seek(stored.offset + first * width * dtype.itemsize)
            if file.readinto(block.reshape(-1).view(np.uint8)) != block.nbytes:
                raise ValueError(f"{stored.file} ends within tensor {name}; copy the file again")
            for bounds in takers:
                theirs = bounds[::-1] if transposed else bounds
                (start, _), others = theirs[0], theirs[1:]
                low, high = _overlap(theirs[0], first, last)
                part = block[(slice(low - first, high - first), *(slice(*bound) for bound in others))]
                if transposed:
                    out[bounds][:, low - start : high - start] = part.T
                else:
                    out[bounds][low - start : high - start] = part
    return {bounds: array.view(dtype) for bounds, array in out.items()}


def equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same bytes, compared without holding either."""
    if (one.code, one.shape) != (other.code, other.shape):
        return False
    left = math.prod(one.shape) * DTYPES[one.code].itemsize
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        while left > 0:
            chunk = min(left, _CHUNK)
            if first.read(chunk) != second.read(chunk):
                return False
            left -= chunk
    return True


def key(shard, shape) -> tuple:
    """A tuple of slices as ((start, stop), ...)."""
    return tuple(part.indices(size)[:2] for part, size in zip(shard, shape, strict=True))


def write(file, tensors) -> int:
    """Writes a safetensors file; returns its bytes of tensors.

    Args:
      tensors: [(name, dtype, shape, make)]; `make() -> array`, which may be a transposed view, is called when the
        tensor's turn comes.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, _ in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, make in tensors:
            array = make()
            array = array.view(_WORDS[array.dtype.itemsize])
            for first in range(0, len(array), _ROWS):
                out.write(np.ascontiguousarray(array[first : first + _ROWS]).data)
    return offset


def _header(file) -> dict[str, Stored]:
    """The tensors of one file; ValueError that names it when it is not whole."""
    try:
        with safetensors.safe_open(file, "np"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
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
    """The part of rows first..last that lies within a bound, or None."""
    low, high = max(bound[0], first), min(bound[1], last)
    return (low, high) if low < high else None


def _empty(shape, words):
    """An array of integers at an address that JAX can use in place."""
    size = math.prod(shape) * np.dtype(words).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(words).reshape(shape)
