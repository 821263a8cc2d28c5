"""Checkpoints that notice damage: Orbax writes them, and a checksum per leaf tells whether the same bits came back.

Orbax saves atomically and in the background, but it does not detect flipped bits. Every step therefore holds, beside
its arrays, a JSON record with each leaf's name, shape, dtype and checksum, the caller's values, and its own digest.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from rpg_jax import InputError
from rpg_jax.parallel import multihost, named_leaves
from rpg_jax.storage import orbax_io, workdir
from rpg_jax.storage.disk import storage_errno

_WORD = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by item size; 8 bytes make two words


class DamagedCheckpoint(InputError):
    """The checkpoint on disk differs from what was saved, or cannot be read."""


def _mix(word):
    """The finalizer of MurmurHash3: a bijection of uint32 that maps nearby words far apart."""
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """A u32[] over the bits of `x`, an array of any shape of booleans, integers or floats.

    Each word is mixed with its index in the global array, and the results are added modulo 2**32. Addition commutes,
    so the checksum does not depend on sharding, mesh or process count. Mixing is a bijection, so a change in one word
    always changes the sum; a change in several words is missed with probability 2**-32.
    """
    x = jax.device_put(x, jax.memory.Space.Device)  # an offloaded optimizer state lies in host memory
    words = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORD[x.dtype.itemsize])  # [..., 2] of f64
    index = jnp.zeros(words.shape, jnp.uint32)  # of each word in row-major order
    for axis, size in enumerate(words.shape):
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mix(words.astype(jnp.uint32) ^ _mix(index)), dtype=jnp.uint32)


class Checkpoints(contextlib.ExitStack):
    """The checkpoints of one run, one folder per step: the newest `keep_last` and the one with the highest metric.

    `directory` is a local path or a bucket's URL. Every process of a job makes the same calls. `close`, or the end of a
    `with`, waits for the running save and ends Orbax's threads. Raises OSError, in `save` and `close`, too, when the
    disk is full or read-only; earlier checkpoints stay as they were.
    """

    def __init__(self, directory, keep_last: int = 2):
        super().__init__()
        self.directory = epath.Path(directory if "://" in str(directory) else os.path.abspath(directory))
        self._keep_last = keep_last
        self._resumed_from, self._saved = None, False
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            # If a folder that is made in the background cannot be made, threads wait five minutes for it.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        arrays = ocp.PyTreeCheckpointHandler(save_concurrent_gb=96)  # the files and the limit of StandardSave
        handlers = {"state": arrays, "record": ocp.JsonCheckpointHandler()}
        self._manager = self._storage(ocp.CheckpointManager, self.directory, options=options, item_handlers=handlers)
        self.callback(self._storage, self._manager.close)
        self._unranked: dict[int, str] = {}  # step -> why its metric cannot be read
        self._metrics = {step: self._metric_of(step) for step in self._manager.all_steps()}

    def save(self, step: int, state: Any, extra: dict, metric: float | None = None, wait: bool = False) -> None:
        """Copies `state` off the device and writes it in the background; with `wait`, returns when it is on disk.

        The first save after a `restore` also deletes the steps newer than the restored one, damaged or abandoned ones.
        The arrays of `state` may be donated as soon as this returns. `extra` are JSON values that `restore` gives back.
        The highest `metric` is the best; None or NaN never is. Of a step that is there already, the rest is replaced.
        """
        arrays = {name: jnp.asarray(x) for name, x in named_leaves(state).items()}
        sums = checksums(arrays)
        metric = None if metric is None or math.isnan(metric) else float(metric)
        leaves = {name: [_describe(x), sums[name]] for name, x in arrays.items()}
        record = _sealed({"leaves": leaves, "metric": metric, "extra": extra})
        self._discard_leftovers()
        if step in self._manager.all_steps() and self._record(step)["leaves"] == record["leaves"]:
            with multihost.together():
                if multihost.is_first():
                    workdir.write(self.directory / str(step) / "record", "metadata", json.dumps(record))
            self._metrics[step] = metric
            return
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(record))
        self._metrics[step] = metric
        self._storage(self._manager.save, step, args=items, force=True)
        if wait:
            self._storage(self._manager.wait_until_finished)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, dict] | None:
        """The newest undamaged checkpoint, or that of `step`.

        Leaves are restored to the shardings of `like`, the pytree that was saved, of arrays or `ShapeDtypeStruct`.
        Returns (step, state, extra), or None when nothing was saved. Each damaged checkpoint that was skipped is
        reported in one line on stderr.

        Raises:
          ValueError: `like` has other leaves, shapes or dtypes than the checkpoint; `step` does not exist.
          DamagedCheckpoint: `step`, or every step there is, is damaged.
        """
        self._storage(self._manager.wait_until_finished)
        wanted, structure = named_leaves(like), jax.tree.structure(like)
        steps = sorted(self._manager.all_steps(), reverse=True)
        if step is not None and step not in steps:
            raise InputError(f"{self.directory} has no checkpoint of step {step}; it has {steps[::-1]}")
        for candidate in steps if step is None else [step]:
            try:
                arrays, extra = self._load(candidate, wanted)
                self._resumed_from = candidate
                return candidate, structure.unflatten(arrays), extra
            except DamagedCheckpoint as error:
                damage = str(error)
            still_there = (self.directory / str(candidate)).exists()  # a run that trains deletes old ones
            if step is None and still_there and jax.process_index() == 0:
                print(f"warning: checkpoint {candidate} in {self.directory} is damaged: {damage}", file=sys.stderr)
        if steps:
            which = f"each of the {len(steps)} checkpoints" if step is None else f"checkpoint {step}"
            raise DamagedCheckpoint(
                f"{which} in {self.directory} is damaged (step {candidate}: {damage}); mend the storage and try again, "
                f"or move the folder away to start over"
            )
        for leaf in map(_stored, wanted.values()):  # compile the checksums now, not at the run's first save
            zeros = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding.with_memory_kind("device"))
            checksum(jax.device_put(zeros, leaf.sharding))
        return None

    def latest_step(self) -> int | None:
        """The newest step; after a `restore`, steps newer than the restored one do not count."""
        return max(self._steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the highest metric, the newest of equal ones; None when no checkpoint has a metric.

        A checkpoint whose record is damaged has no metric, and is reported in one line on stderr.
        """
        for step, damage in self._unranked.items():
            print(
                f"warning: checkpoint {step} in {self.directory} is damaged: {damage}; it may have been the best one",
                file=sys.stderr,
            )
        return self._best(self._steps())

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax's preservation policy: which checkpoints stay once the newest one is on disk."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self._best(steps)
        return [step == best or step in steps[-self._keep_last :] for step in steps]

    def _steps(self):
        return [s for s in self._manager.all_steps() if self._resumed_from is None or s <= self._resumed_from]

    def _best(self, steps):
        ranked = [(self._metrics[step], step) for step in steps if self._metrics.get(step) is not None]
        return max(ranked, default=(None, None))[1]

    def _metric_of(self, step):
        try:
            return self._record(step)["metric"]
        except DamagedCheckpoint as error:
            self._unranked[step] = str(error)
            return None

    def _record(self, step):
        """The JSON record of a step. Raises DamagedCheckpoint."""
        file = self.directory / str(step) / "record" / "metadata"
        record = _read("record", lambda: json.loads(file.read_text()))
        if not isinstance(record, dict) or record.get("digest") != _sealed(record)["digest"]:
            raise DamagedCheckpoint("its record was altered")
        return record

    def _load(self, step, wanted):
        """(leaves in the order of `wanted`, extra). Raises DamagedCheckpoint, or ValueError when leaves differ."""
        record = self._record(step)
        self._check_fit(step, record["leaves"], wanted)
        like = {name: _stored(leaf) for name, leaf in wanted.items()}
        folder = self.directory / str(step) / "state"
        request = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        with orbax_io.reader(like) as reader:
            data = _read("arrays", lambda: reader.restore(folder, args=request))
        sums = checksums(data)
        altered = [name for name, (_, expected) in record["leaves"].items() if sums[name] != expected]
        if altered:
            rest = f" and {len(altered) - 1} more" if altered[1:] else ""
            raise DamagedCheckpoint(f"the checksum of leaf {altered[0]}{rest} differs")
        return [data[name] for name in wanted], record["extra"]

    def _check_fit(self, step, saved, wanted):
        """Raises ValueError, naming the leaf, when an undamaged checkpoint has other leaves than `wanted`."""
        for name in sorted(saved.keys() | wanted.keys()):
            on_disk = saved[name][0] if name in saved else "absent"
            expected = _describe(wanted[name]) if name in wanted else "absent"
            if on_disk != expected:
                raise InputError(
                    f"checkpoint {step} in {self.directory} does not fit: leaf {name} is {on_disk}, {expected} is "
                    f"wanted; use the config it was made with, or another folder"
                )

    def _discard_leftovers(self):
        """Before a save: deletes steps newer than the restored one and, the first time, leftovers of killed saves."""
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
        """Calls; whatever Orbax raises on a full or read-only disk becomes an OSError with the disk's errno, and
        the end of its time limits, which it measures with the wall clock, an InputError."""
        try:
            return call(*args, **kwargs)
        except TimeoutError as error:
            raise InputError(
                f"{self.directory}: a checkpoint was not written within Orbax's time limit ({error}); the storage "
                f"hangs, or the clock was set forward; start again to go on from the checkpoint before"
            ) from error
        except Exception as error:
            code = storage_errno(error)
            if code is None:
                raise
            raise OSError(code, os.strerror(code), str(self.directory)) from error


def saved_steps(directory) -> list[int]:
    """The completely written steps of a folder, in order, which another process may be saving into."""
    return sorted(ocp.utils.checkpoint_steps(directory))


def checksums(arrays: dict) -> dict[str, int]:
    """`checksum` of each array, one after the other, because XLA's CPU client hangs when many programs run at once."""
    return {name: int(checksum(x)) for name, x in arrays.items()}


def _stored(like) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a leaf; on the first device when the leaf names no sharding."""
    sharding = getattr(like, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def _describe(x) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _sealed(record: dict) -> dict:
    """The record with a digest of its other entries, as it reads after a round trip through JSON."""
    body = json.dumps({k: v for k, v in record.items() if k != "digest"}, sort_keys=True)
    return json.loads(body) | {"digest": hashlib.sha256(body.encode()).hexdigest()}


def _read(what: str, call: Callable):
    """The result of `call`, or DamagedCheckpoint on every process when it raises anything on one of them."""
    result = failure = None
    try:
        result = call()
    except Exception as error:
        failure = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if multihost.any_process(failure is not None):
        raise DamagedCheckpoint(f"its {what} cannot be read ({failure or 'on another process'})")
    return result
