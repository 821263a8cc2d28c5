"""Tensors in files on the host: what there is, and reading rows of one. The safetensors package reads and checks."""

import functools
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
    """A tensor on disk."""

    file: pathlib.Path
    code: str  # its dtype, as safetensors names it
    shape: tuple[int, ...]
    rows: Callable[[int, int], np.ndarray]  # (first, last) -> rows `first` to `last`, in its dtype


def contents(directory) -> dict[str, Stored]:
    """{name: Stored} of the model in a folder: of its one file, or of those that its index names.

    Raises ValueError for a folder without safetensors, or with a file that is absent, truncated or corrupt; names it.
    """
    directory = pathlib.Path(directory)
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE)
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
    return {name: stored for file in sorted(set(names)) for name, stored in _header(directory / file).items()}


def few(names: Iterable[str]) -> str:
    """Three of several names, with commas between them, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def equal(left: Stored, right: Stored) -> bool:
    """Whether two tensors hold the same bytes, compared a few rows at a time."""
    if (left.code, left.shape) != (right.code, right.shape):
        return False
    parts = [(start, min(start + _ROWS, left.shape[0])) for start in range(0, left.shape[0], _ROWS)]
    return all(left.rows(*part).tobytes() == right.rows(*part).tobytes() for part in parts)


def _header(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one file; raises ValueError that names a truncated or corrupt file."""
    try:
        opened = safetensors.safe_open(file, "np")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is not a whole safetensors file ({error}); {file.stat().st_size} bytes are there: copy it again"
        ) from None

    def rows(name, first, last):
        return opened.get_slice(name)[first:last]

    slices = {name: opened.get_slice(name) for name in opened.keys()}
    return {
        name: Stored(file, one.get_dtype(), tuple(one.get_shape()), functools.partial(rows, name))
        for name, one in slices.items()
    }
