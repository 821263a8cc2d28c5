"""Checkpoints that notice damage: Orbax writes them, and a checksum per leaf tells whether the same bits came back.

Orbax makes a save atomic and asynchronous, but hands back flipped bits without a word. So every step holds, beside its
arrays, a JSON record with each leaf's name, shape, dtype and checksum, the caller's own values, and a digest of itself.
"""

import asyncio
import errno
import hashlib
import json
import logging
import math
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by item size; 8 bytes make two words
_STORAGE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM)

# What goes wrong in Orbax's threads reaches callers as an exception; its own accounts of it are pages of tracebacks.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(lambda record: "/orbax/" not in record.pathname + record.getMessage())


class DamagedCheckpoint(ValueError):
    """A checkpoint on disk that is not what was saved."""


def _mix(word):
    """A bijection of uint32 under which neighbors part (the finalizer of MurmurHash3)."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


@jax.jit
def checksum(x):
    """A u32[] over the bits of `x`, an array of any shape of booleans, integers or floats.

    The sum over words of a bijection of their bits, keyed by the global index, modulo 2**32: independent of the order
    of summation, and so of sharding, mesh and process count. A change in one word always changes it; any other change
    goes unseen with probability 2**-32.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an offloaded optimizer's lies in the hosts' memory
    words = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORD[x.dtype.itemsize])
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mix(words.astype(jnp.uint32) ^ _mix(index)), dtype=jnp.uint32)


class Checkpoints:
    """The checkpoints of one run, a folder a step: the newest `keep_last` and the `keep_best` with the highest metric.

    Every process of a job makes the same calls. Usable as a context manager; leaving it waits for the save under way.

    Args:
      directory: local path or bucket URL; made when it does not exist.

    Raises:
      OSError: here, in `save` or in `close`, when the disk is full or read-only; earlier checkpoints stay as they were.
    """

    def __init__(self, directory, keep_last: int = 2, keep_best: int = 1):
        if keep_last < 1 or keep_best < 0:
            raise ValueError(f"keep_last is {keep_last} and keep_best {keep_best}; at least 1 and 0 are needed")
        self.directory = epath.Path(directory).expanduser()
        if "://" not in str(directory):
            self.directory = epath.Path(os.path.abspath(self.directory))
        self._keep_last, self._keep_best = keep_last, keep_best
        self._resumed_from, self._saved = None, False
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            # Made in the background, a folder that cannot be made leaves threads that wait five minutes for it.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = self._storage(ocp.CheckpointManager, self.directory, options=options)
        self._metrics = {step: self._metric_of(step) for step in self._manager.all_steps()}

    def save(self, step: int, state, extra: dict, metric: float | None = None, wait: bool = False) -> None:
        """Copies `state` off the device and writes it in the background; `wait` returns when it is safe on disk.

        After a `restore`, the first save also deletes what is newer than the restored step: damaged or abandoned.

        Args:
          state: pytree of arrays; may be donated as soon as this returns.
          extra: JSON values to get back from `restore`.
          metric: ranks checkpoints; higher is better. None or NaN never counts as best.
        """
        arrays = {name: _data(jnp.asarray(x)) for name, x in _named(state).items()}
        sums = _checksums(arrays)
        metric = None if metric is None or math.isnan(metric) else float(metric)
        leaves = {name: [_describe(x), sums[name]] for name, x in _named(state).items()}
        record = _sealed({"leaves": leaves, "metric": metric, "extra": extra})
        self._discard_leftovers()
        items = ocp.args.Composite(state=ocp.args.StandardSave(arrays), record=ocp.args.JsonSave(record))
        self._metrics[step] = metric
        self._storage(self._manager.save, step, args=items, force=True)
        if wait:
            self._storage(self._manager.wait_until_finished)

    def restore(self, like, step: int | None = None):
        """The newest checkpoint that is whole, or that of `step`.

        Args:
          like: the pytree that was saved, of arrays or `ShapeDtypeStruct`; leaves come back with its shardings.

        Returns:
          (step, state, extra), or None when nothing was saved. Each damaged checkpoint that was passed over is
          reported in one line on stderr.

        Raises:
          ValueError: `like` has other leaves, shapes or dtypes than the checkpoint; `step` does not exist.
          DamagedCheckpoint: `step`, or every step there is, is damaged.
        """
        self._storage(self._manager.wait_until_finished)
        wanted, structure = _named(like), jax.tree.structure(like)
        known = sorted(self._manager.all_steps(), reverse=True)
        if step is not None and step not in known:
            raise ValueError(f"{self.directory} has no checkpoint of step {step}; it has {known[::-1]}")
        for candidate in known if step is None else [step]:
            try:
                arrays, extra = self._load(candidate, wanted)
                self._resumed_from = candidate
                return candidate, structure.unflatten(arrays), extra
            except DamagedCheckpoint as error:
                damage = str(error)
            if step is None and jax.process_index() == 0:
                print(f"warning: checkpoint {candidate} in {self.directory} is damaged: {damage}", file=sys.stderr)
        if known:
            which = f"each of the {len(known)} checkpoints" if step is None else f"checkpoint {step}"
            raise DamagedCheckpoint(
                f"{which} in {self.directory} is damaged (step {candidate}: {damage}); mend the storage and try again, "
                f"or move the folder away to start over"
            )
        for words in map(_stored, wanted.values()):  # compile the checksums now rather than in the middle of the run
            zeros = jnp.zeros(words.shape, words.dtype, device=words.sharding.with_memory_kind("device"))
            checksum(jax.device_put(zeros, words.sharding))
        return None

    def latest_step(self) -> int | None:
        """The newest step saved, not counting those newer than a restored one."""
        return max(self._steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the highest metric, the newest of equals; None when no checkpoint has one."""
        return max(self._ranked(self._steps()), key=self._rank, default=None)

    def leaves(self, step: int) -> dict[str, str]:
        """{leaf name: "dtype[shape]"} of what a step holds. Raises DamagedCheckpoint."""
        return {name: description for name, (description, _) in self._record(step)["leaves"].items()}

    def reached_preemption(self, step: int) -> bool:
        """Whether some host of the job was told to stop; ask every step, on every process, with the same `step`."""
        return self._manager.reached_preemption(step)

    def close(self) -> None:
        """Waits for the save under way and lets go of Orbax's threads."""
        self._storage(self._manager.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax's preservation policy: which checkpoints stay once the newest one is safe."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = sorted(self._ranked(steps), key=self._rank, reverse=True)[: self._keep_best]
        return [step in best or step in steps[-self._keep_last :] for step in steps]

    def _steps(self):
        return [s for s in self._manager.all_steps() if self._resumed_from is None or s <= self._resumed_from]

    def _ranked(self, steps):
        return [step for step in steps if self._metrics.get(step) is not None]

    def _rank(self, step):
        return self._metrics[step], step

    def _metric_of(self, step):
        try:
            return self._record(step)["metric"]
        except DamagedCheckpoint:
            return None

    def _record(self, step):
        """The JSON record of a step. Raises DamagedCheckpoint."""
        file = self.directory / str(step) / "record" / "metadata"
        record = _read("record", lambda: json.loads(file.read_text()))
        if not isinstance(record, dict) or record.get("digest") != _sealed(record)["digest"]:
            raise DamagedCheckpoint("its record was altered")
        return record

    def _load(self, step, wanted):
        """(leaves in the order of `wanted`, extra). Raises DamagedCheckpoint, and ValueError when it does not fit."""
        record = self._record(step)
        self._check_fit(step, record["leaves"], wanted)
        like = {name: _stored(leaf) for name, leaf in wanted.items()}
        folder = self.directory / str(step) / "state"
        request = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        with _reader(like) as reader:
            data = _read("arrays", lambda: reader.restore(folder, args=request))
        sums = _checksums(data)
        altered = [name for name, (_, expected) in record["leaves"].items() if sums[name] != expected]
        if altered:
            rest = f" and {len(altered) - 1} more" if altered[1:] else ""
            raise DamagedCheckpoint(f"the checksum of leaf {altered[0]}{rest} differs")
        return [_restored(data[name], leaf) for name, leaf in wanted.items()], record["extra"]

    def _check_fit(self, step, saved, wanted):
        """Raises ValueError, naming the leaf, when a whole checkpoint is not of `wanted`'s structure."""
        for name in sorted(saved.keys() | wanted.keys()):
            there = saved[name][0] if name in saved else "absent"
            here = _describe(wanted[name]) if name in wanted else "absent"
            if there != here:
                raise ValueError(
                    f"checkpoint {step} in {self.directory} does not fit: leaf {name} is {there}, {here} is wanted; "
                    f"use the config it was made with, or another folder"
                )

    def _discard_leftovers(self):
        """Before a save: deletes steps newer than the restored one, and once what killed saves left behind."""
        if self._resumed_from is not None:
            for newer in sorted(set(self._manager.all_steps()) - set(self._steps())):
                self._storage(self._manager.delete, newer)
                self._metrics.pop(newer, None)
            self._resumed_from = None
        if not self._saved and jax.process_index() == 0:
            for path in self.directory.glob("*.orbax-checkpoint-tmp*"):
                self._storage(path.rmtree)
        self._saved = True

    def _storage(self, call, *args, **kwargs):
        """Calls, and turns whatever a full or read-only disk makes Orbax raise into the OSError it is."""
        try:
            return call(*args, **kwargs)
        except Exception as error:
            code = _storage_errno(error)
            if code is None:
                raise
            raise OSError(code, os.strerror(code), str(self.directory)) from error


class _PatientHandler(ocp.type_handlers.ArrayHandler):
    """Reads leaves side by side as Orbax does; when one fails, waits for the others before the failure is raised.

    Orbax closes its event loop at the first failure. Each of TensorStore's threads that then reports on another leaf
    to the closed loop would print a traceback.
    """

    async def deserialize(self, infos, args=None):
        earlier = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        finally:
            while unfinished := asyncio.all_tasks() - earlier:
                await asyncio.gather(*unfinished, return_exceptions=True)


def _reader(like: dict) -> ocp.Checkpointer:
    """Orbax's reader of {leaf name: ShapeDtypeStruct}, without its barriers and with a limit on host memory.

    Inside a barrier, processes would wait for another that found its part damaged. By default Orbax holds the whole
    checkpoint in host memory twice; here it reads at once as little as the largest leaf allows.
    """
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    largest = max((math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in like.values()), default=0)  # bytes
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=alone,
        restore_concurrent_gb=1 + largest // 10**9,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, _PatientHandler())),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def saved_steps(directory) -> list[int]:
    """The steps of a folder, in order, of which every file has been written; none if it does not exist.

    Changes nothing: for a look at what another process saves.
    """
    return sorted(ocp.utils.checkpoint_steps(directory))


def _named(tree) -> dict:
    """{"path/of/leaf": leaf}, in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _checksums(arrays: dict) -> dict[str, int]:
    """One after the other: XLA's CPU client hangs when many programs are under way."""
    return {name: int(checksum(x)) for name, x in arrays.items()}


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _data(x):
    """The array that is stored for a leaf: itself, or a PRNG key's words."""
    return jax.random.key_data(x) if _is_key(x) else x


def _stored(like) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of `_data` of a leaf; the first device when it does not say."""
    words = jax.eval_shape(_data, like)
    sharding = getattr(like, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


def _restored(data, like):
    """The inverse of `_data` for a leaf of `like`'s dtype."""
    if not _is_key(like):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.zeros((), like.dtype)))


def _describe(x) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _sealed(record: dict) -> dict:
    """The record as JSON gives it back, with a digest of its other entries."""
    body = json.dumps({k: v for k, v in record.items() if k != "digest"}, sort_keys=True)
    return json.loads(body) | {"digest": hashlib.sha256(body.encode()).hexdigest()}


def _one_line(error, width=200) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= width else f"{text[:width]}..."


def _read(what, call):
    """Calls on every process; DamagedCheckpoint on all of them when it fails on one, whatever it raises there."""
    result = failure = None
    try:
        result = call()
    except Exception as error:
        failure = _one_line(error)
    if not multihost_utils.process_allgather(np.array(failure is None)).all():
        raise DamagedCheckpoint(f"its {what} cannot be read ({failure or 'on another process'})")
    return result


def _storage_errno(error) -> int | None:
    """The errno of a storage failure anywhere in an exception's causes; TensorStore and gRPC give it as text only."""
    while error is not None:
        for code in _STORAGE_ERRORS:
            if getattr(error, "errno", None) == code or os.strerror(code).lower() in str(error).lower():
                return code
        error = error.__cause__ or error.__context__
    return None
