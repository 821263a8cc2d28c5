"""A job of several processes: joining it, exchanging values between processes, and leaving it.

Every process of the job calls each function that exchanges values, in the same order. A single process is a job of one.
Each thread has an order of its own: what it exchanges goes over devices that no other thread's programs run on
(`exchange_over`).
"""

import contextlib
import json
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax import InputError
from rpg_jax.parallel.mesh import ROWS, replicated

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HEARTBEAT_SECONDS = 10  # without a heartbeat for so long, a process counts as lost and JAX ends the others
LEAVE_SECONDS = 5  # how long a process that failed waits for the others to end
CHUNK = 1 << 16  # bytes exchanged at once: a single shape, compiled once


def identity(environment: Mapping[str, str]) -> dict | None:
    """The arguments of `jax.distributed.initialize` from the environment; None if it sets none of the variables.

    Raises ValueError: one of the three variables is missing or invalid.
    """
    values = {name: environment[name] for name in (ADDRESS, COUNT, INDEX) if environment.get(name)}
    if not values:
        return None
    if missing := [name for name in (ADDRESS, COUNT, INDEX) if name not in values]:
        raise InputError(f"{', '.join(values)} set and {', '.join(missing)} not: a process of a job needs all three")
    if not re.fullmatch(r"\S+:\d{1,5}", values[ADDRESS]):
        raise InputError(f"{ADDRESS}={values[ADDRESS]}: expected HOST:PORT of process 0")
    try:
        count, index = int(values[COUNT]), int(values[INDEX])  # JAX says whether they fit each other
    except ValueError as error:
        raise InputError(f"{COUNT} and {INDEX} must be whole numbers: {error}") from None
    job = dict(coordinator_address=values[ADDRESS], num_processes=count, process_id=index)
    return job | dict(cluster_detection_method="deactivate")


def initialize(detect: bool, wait_seconds: float) -> None:
    """Joins the job that the environment names, before any other use of JAX; does nothing if it names none.

    Args:
      detect: whether to ask the cluster (TPU pod, SLURM, Kubernetes, MPI) if the environment variables are not set.
      wait_seconds: how long to wait for the coordinator and all processes; after that, one line and exit status 2.

    Raises ValueError: the environment is invalid, or `detect` found no cluster.
    """
    arguments = identity(os.environ)
    if arguments is None and not detect:
        return
    # The program handles SIGTERM itself: a process that receives one tells the others (`any_process`).
    jax.config.update("jax_enable_preemption_service", False)
    # JAX aborts the process in C++ when its own time limit ends, so this one is shorter.
    timer = threading.Timer(wait_seconds, _give_up, [wait_seconds, arguments])
    timer.start()
    try:
        limits = dict(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=60)
        jax.distributed.initialize(**arguments or {}, initialization_timeout=int(wait_seconds) + 60, **limits)
    except (ValueError, RuntimeError) as error:
        mend = f"Set {ADDRESS}, {COUNT} and {INDEX}, or start on a TPU pod or under SLURM"
        raise InputError(f"no job to join: {error} {mend}") from error
    finally:
        timer.cancel()


def _give_up(wait_seconds: float, arguments: dict | None):
    if arguments is None:  # JAX does not publish the coordinator that it asked the cluster for
        reason = "not all processes of the job that the cluster names came"
    else:
        address, index = arguments["coordinator_address"], arguments["process_id"]
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            reason = f"process {index} reached the coordinator at {address}, but not all processes of the job came"
        except OSError:
            reason = f"process {index} could not reach the coordinator at {address}"
    mend = "start every process, or raise --coordinator_timeout"
    print(f"error: {reason} within {wait_seconds:g} s; {mend}", file=sys.stderr, flush=True)
    os._exit(2)


def leave(status: int) -> None:
    """Ends this process with `status`, without waiting for long for the other processes, as JAX would."""
    if jax.distributed.is_initialized():
        thread = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def is_first() -> bool:
    """Whether this is process 0, the only one that logs, prints and writes shared files."""
    return jax.process_index() == 0


_thread = threading.local()


def exchange_over(mesh: Mesh) -> None:
    """From now on, what this thread exchanges goes over devices of `mesh`; before, over the first of every process."""
    _thread.mesh = _one_of_each(mesh.devices.flat)


def _one_of_each(devices: Iterable[jax.Device]) -> Mesh:
    """A mesh of one device of every process."""
    first = {device.process_index: device for device in reversed(list(devices))}
    return Mesh([first[process] for process in sorted(first)], "process")


def allgather(value: np.ndarray) -> np.ndarray:
    """[processes, ...], the arrays of all processes, of one shape and dtype."""
    value = np.asarray(value)
    if jax.process_count() == 1:
        return value[None]
    if not hasattr(_thread, "mesh"):
        _thread.mesh = _one_of_each(jax.devices())
    sharding = NamedSharding(_thread.mesh, PartitionSpec("process"))
    return np.asarray(replicated(_thread.mesh, jax.make_array_from_process_local_data(sharding, value[None])))


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return bool(allgather(np.array(flag)).any())


def gather(value: Any) -> list:
    """The JSON values of all processes, in the order of processes."""
    data = json.dumps(value).encode()
    data = struct.pack(">q", len(data)) + data  # the length, then the text

    def part(start):
        return allgather(np.frombuffer(data[start : start + CHUNK].ljust(CHUNK, b"\0"), np.uint8))

    parts = [part(0)]
    ends = [8 + struct.unpack(">q", row[:8].tobytes())[0] for row in parts[0]]
    parts += [part(start) for start in range(CHUNK, max(ends), CHUNK)]
    rows = np.concatenate(parts, axis=1)
    return [json.loads(row[8:end].tobytes()) for row, end in zip(rows, ends, strict=True)]


def row_indices(mesh: Mesh, count: int) -> np.ndarray:
    """i64[N], ascending: those of the `count` rows of a batch that this process's devices hold."""
    held = NamedSharding(mesh, ROWS).addressable_devices_indices_map((count,))
    return np.unique(np.concatenate([np.arange(count)[index] for index in held.values()]))


def gather_rows(rows: Iterable[int], values: Iterable) -> list:
    """The JSON values of all rows of a batch; this process gives those of its `rows` (see `row_indices`)."""
    processes = gather([[int(row), value] for row, value in zip(rows, values, strict=True)])
    by_row = {row: value for pairs in processes for row, value in pairs}
    return [by_row[row] for row in sorted(by_row)]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """An exception on one process is raised on all: the same one there, one that quotes it on the others.

    No code inside may exchange values between processes.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    others = gather(failure and [isinstance(failure, InputError), " ".join(str(failure).split())])
    if failure is not None:
        raise failure
    for process, other in enumerate(others):
        if other is not None:
            is_input, message = other
            raise (InputError if is_input else RuntimeError)(f"process {process}: {message}")


def check_same(settings: dict) -> None:
    """Raises ValueError on every process if a process has other flat settings than process 0; names all differences."""
    first, *others = gather(settings)
    differences = [
        f"process {process} has {key}={other.get(key)!r}, process 0 {first.get(key)!r}"
        for process, other in enumerate(others, 1)
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    ]
    if differences:
        mend = "start all of them with one config, one version of the code and the same data"
        raise InputError(f"the processes of this job were started differently: {'; '.join(differences)}; {mend}")
