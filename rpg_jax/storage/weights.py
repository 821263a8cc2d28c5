"""Weights of a model from Hugging Face's safetensors into sharded arrays and back; GGUF files are read, too.

Loading is a stream of tensors. While the host reads the next one, of which it needs only the shards of this process,
the previous one goes to the devices in its dtype on disk and is cast into its layer of the stacked leaf.
"""

import concurrent.futures
import functools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from rpg_jax import InputError
from rpg_jax.models.huggingface import places
from rpg_jax.parallel import named_leaves
from rpg_jax.storage import gguf_files, tensor_files
from rpg_jax.storage.logs import Progress
from rpg_jax.storage.tensor_files import few
from rpg_jax.training.phases import say

_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a constant that old exports contain
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load(directory, shapes: Any) -> Any:
    """The weights in a folder as a tree like `shapes`; every process of a job calls it and reads its own shards.

    Args:
      directory: a folder in Hugging Face's format, or a GGUF file.
      shapes: the training tree (layers stacked on axis 0) of ShapeDtypeStruct with shardings (the first device for
        leaves without one); weights are cast to its dtypes.

    Raises:
      ValueError, OSError: the folder or a file cannot be read; tensors are missing, unexpected, of another shape or of
        an unsupported dtype (one error has all of these kinds); a tensor holds NaN or infinity.
    """
    say(f"loading weights of {directory}")
    leaves, arrays = named_leaves(shapes), {}
    stored, placement = _check(pathlib.Path(directory), leaves)

    def read(name):
        """(name, the tensor's shape on disk, how it is divided there, what reads a shard of it)."""
        place = placement[name]
        sharding = _stored_sharding(leaves[place.leaf], place)
        rows = [
            index[0].indices(place.shape[0]) for index in sharding.addressable_devices_indices_map(place.shape).values()
        ]
        first, last = min(start for start, *_ in rows), max(stop for _, stop, _ in rows)
        block = stored[name].rows(first, last)

        def shard(index):
            start, stop, _ = index[0].indices(place.shape[0])
            return block[(slice(start - first, stop - first), *index[1:])]

        return name, place.shape, sharding, shard

    unchecked = None
    with Progress("loading tensors", 0, len(placement)) as progress:
        for done, (name, *parts) in enumerate(_ahead(read, placement)):
            place, leaf = placement[name], leaves[placement[name].leaf]
            if place.index and not any(place.index):
                arrays[place.leaf] = jnp.zeros(leaf.shape, leaf.dtype, device=_sharding(leaf))
            tensor = jax.make_array_from_callback(*parts)
            write = _writer(leaf.dtype, _sharding(leaf), place.transposed)
            arrays[place.leaf], finite = write(arrays.get(place.leaf), tensor, place.index)
            if unchecked is not None:  # the previous tensor: this one's check would wait for its write
                _refuse_not_finite(*unchecked)
            unchecked = finite, name, stored[name].file
            progress(done + 1)
    _refuse_not_finite(*unchecked)
    return jax.tree.structure(shapes).unflatten(arrays[name] for name in leaves)


def with_stored_dtypes(directory, shapes: Any) -> Any:
    """`shapes` with the dtypes of the weights in a folder. Checks names and shapes, and raises as `load` does."""
    leaves, dtypes = named_leaves(shapes), {}
    stored, placement = _check(pathlib.Path(directory), leaves)
    for name, place in placement.items():
        dtype = tensor_files.DTYPES[stored[name].code]
        dtypes[place.leaf] = jnp.promote_types(dtypes.get(place.leaf, dtype), dtype)
    kept = (jax.ShapeDtypeStruct(x.shape, dtypes[name], sharding=x.sharding) for name, x in leaves.items())
    return jax.tree.structure(shapes).unflatten(kept)


def save_safetensors(directory, params: Any, max_shard_bytes: float, name: str = "model") -> int:
    """Writes a training tree as `NAME.safetensors`, or, when it needs several files, as numbered ones with an index.
    Returns the number of tensors.

    `params` are fully addressable arrays, float32, float16 or bfloat16. A file has at most `max_shard_bytes` of
    tensors, which are in the host's memory at once; a larger tensor gets one of its own.
    """
    directory, leaves, weight_map = pathlib.Path(directory), named_leaves(params), {}
    placed = places(leaves)
    sizes = {n: math.prod(place.shape) * leaves[place.leaf].dtype.itemsize for n, place in placed.items()}
    groups, filled = [[]], 0  # tensors of each file, bytes in the last file
    for tensor, size in sizes.items():
        if groups[-1] and filled + size > max_shard_bytes:
            groups, filled = [*groups, []], 0
        groups[-1].append(tensor)
        filled += size
    with Progress("writing tensors", 0, len(sizes)) as progress:
        for number, group in enumerate(groups, 1):
            which = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
            file = f"{name}{which}.safetensors"
            taken = {n: _taken(leaves[placed[n].leaf], placed[n].index, placed[n].transposed) for n in group}
            arrays = {tensor: np.ascontiguousarray(array) for tensor, array in taken.items()}
            (directory / file).touch()
            mode = (directory / file).stat().st_mode
            safetensors.numpy.save_file(arrays, directory / file, {"format": "pt"})
            (directory / file).chmod(mode)  # the package makes files that nobody else may read
            weight_map |= dict.fromkeys(group, file)
            progress(len(weight_map))
    if len(groups) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (directory / tensor_files.INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(sizes)


# Checks of names, shapes and dtypes, before any data is read.


def _check(directory, leaves):
    """{tensor: Stored} and {tensor: Place}, after checking names, shapes and dtypes."""
    if directory.suffix == gguf_files.SUFFIX:
        stored = gguf_files.contents(gguf_files.read_header(directory))
    else:
        stored = tensor_files.contents(directory)
    stored = {name: entry for name, entry in stored.items() if not _IGNORED.search(name)}
    placement = places(leaves)
    expected = {name: place.shape for name, place in placement.items()}
    tied_head = _HEAD not in expected and stored.pop(_HEAD, None)  # saved although tied: harmless if the same matrix
    faults = _differences(expected, {name: entry.shape for name, entry in stored.items()})
    unknown = [f"{name} ({entry.code})" for name, entry in stored.items() if entry.code not in tensor_files.DTYPES]
    if unknown:
        supported = ", ".join(tensor_files.DTYPES)
        faults.append(f"{len(unknown)} of a dtype that is not supported (known: {supported}): {few(unknown)}")
    if faults:
        raise InputError(f"the tensors in {directory} do not fit its config: {'; '.join(faults)}")
    if tied_head and not tensor_files.equal(tied_head, stored[_EMBEDDING]):
        raise InputError(
            f"{tied_head.file}: {_HEAD} differs from {_EMBEDDING} though config.json ties them; "
            f"set tie_word_embeddings to false, or drop the tensor"
        )
    return stored, placement


def _differences(expected: dict[str, tuple], stored: dict[str, tuple]) -> list[str]:
    """The names that are missing, unexpected or of another shape, one string for each of these kinds that occurs.

    Where all names have the same text too much or too little before them, a string says that and no more.
    """
    for name in stored:
        before = name.removesuffix(_EMBEDDING)
        if name != before != "" and all(other.startswith(before) for other in stored):
            return [
                f"all {len(stored)} names begin with {before!r} ({few(stored)}): save the model inside its wrapper "
                f"(model._orig_mod, model.module, or model.merge_and_unload() of peft), or drop this from each name"
            ]
        before = _EMBEDDING.removesuffix(name)
        if before != _EMBEDDING and before and all(f"{before}{other}" in expected for other in stored):
            return [
                f"all {len(stored)} names lack {before!r} ({few(stored)}): save the model with its head "
                f"(AutoModelForCausalLM of transformers), or put this before each name"
            ]
    lists = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in expected],
        "of another shape": [
            f"{name} is {list(stored[name])}, {list(shape)} expected"
            for name, shape in expected.items()
            if name in stored and tuple(stored[name]) != tuple(shape)
        ],
    }
    return [f"{len(names)} {what}: {few(names)}" for what, names in lists.items() if names]


def _refuse_not_finite(finite, name, place):
    if not bool(finite):
        raise InputError(f"{place}: {name} holds NaN or infinity (or overflows its dtype); take another checkpoint")


# Loading onto the devices.


def _ahead(function, items: Iterable) -> Iterator:
    """`function` of each item in order; a thread computes the next result while the caller uses the current one."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        upcoming = None
        for item in items:
            current, upcoming = upcoming, thread.submit(function, item)
            if current is not None:
                yield current.result()
        yield upcoming.result()


def _sharding(leaf):
    return leaf.sharding or SingleDeviceSharding(jax.devices()[0])


def _stored_sharding(leaf, place):
    """The sharding of one tensor as it is on disk, with which writing it into the leaf moves no data."""
    sharding = _sharding(leaf)
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec)))[len(place.index) :]
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[::-1] if place.transposed else spec)))


@functools.cache
def _writer(dtype, sharding, transposed):
    """The jitted `write(leaf, tensor, index) -> (leaf, whether the tensor is finite)`; the leaf is donated.

    Where `index` is (), the tensor, cast, is the leaf.
    """

    def write(leaf, tensor, index):
        tensor = (tensor.T if transposed else tensor).astype(dtype)
        finite = jnp.isfinite(jnp.max(jnp.abs(tensor)))  # max keeps a NaN; six times as fast as isfinite of all
        if not index:
            return tensor, finite
        entry = tensor.reshape(*(1,) * len(index), *tensor.shape)
        return jax.lax.dynamic_update_slice(leaf, entry, (*index, *(0,) * tensor.ndim)), finite

    return jax.jit(write, donate_argnums=0, out_shardings=(sharding, None))


@partial(jax.jit, static_argnames="transposed")
def _taken(leaf, index, transposed):
    """An entry of a leaf's leading axes, the whole leaf for (), as it is on disk."""
    for axis in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, axis, keepdims=False)
    return leaf.T if transposed else leaf
