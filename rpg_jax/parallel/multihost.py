"""Many processes, one job: how a process joins, what processes tell each other, and how one leaves.

Whatever exchanges is called by every process of the job, in the same order. A process alone is a job of one.
"""

import contextlib
import json
import os
import re
import socket
import struct
import sys
import threading

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

from rpg_jax.parallel.mesh import ROWS

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
HEARTBEAT_SECONDS = 10  # of silence, after which a process counts as lost and the others are ended
LEAVE_SECONDS = 5  # that a process which failed waits for the others to end as well
CHUNK = 1 << 16  # bytes exchanged at a time: one shape, compiled once


def identity(environment) -> dict | None:
    """What the environment says of this process: the arguments of `jax.distributed.initialize`, or None.

    Raises:
      ValueError: one of the three variables is missing or makes no sense.
    """
    given = {name: environment[name] for name in (ADDRESS, COUNT, INDEX) if environment.get(name)}
    if not given:
        return None
    if missing := [name for name in (ADDRESS, COUNT, INDEX) if name not in given]:
        raise ValueError(f"{', '.join(given)} set and {', '.join(missing)} not: a process of a job needs all three")
    address = re.fullmatch(r"\S+:(\d{1,5})", given[ADDRESS])
    if not address or not 0 < int(address[1]) < 65536:
        raise ValueError(f"{ADDRESS}={given[ADDRESS]}: expected HOST:PORT of process 0, a port from 1 to 65535")
    for name, least in ((COUNT, 1), (INDEX, 0)):
        if not given[name].isdecimal() or int(given[name]) < least:
            raise ValueError(f"{name}={given[name]}: expected a whole number of at least {least}")
    count, index = int(given[COUNT]), int(given[INDEX])
    if index >= count:
        raise ValueError(f"{INDEX}={index} is out of range: with {COUNT}={count}, ids are 0 to {count - 1}")
    return dict(
        coordinator_address=given[ADDRESS],
        num_processes=count,
        process_id=index,
        cluster_detection_method="deactivate",
    )


def initialize(detect: bool, wait_seconds: float) -> None:
    """Joins the job that the environment names, before any other use of JAX; does nothing where it names none.

    Args:
      detect: ask the cluster (TPU pod, SLURM, Kubernetes, MPI) where the environment variables are not set.
      wait_seconds: for the coordinator and all processes to come; after it, one line and exit status 2.

    Raises:
      ValueError: the environment makes no sense, or `detect` found no cluster.
    """
    arguments = identity(os.environ)
    if arguments is None and not detect:
        return
    # SIGTERM stays with the program: a process that was told to stop tells the others, see `any_process`.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(wait_seconds, _give_up, [wait_seconds])  # where the wait ends, JAX would abort in C++
    timer.start()
    try:
        jax.distributed.initialize(
            **arguments or {},
            initialization_timeout=int(wait_seconds) + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=60,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"no job to join: {error} Set {ADDRESS}, {COUNT} and {INDEX}, or start on a TPU pod or under SLURM"
        ) from error
    finally:
        timer.cancel()


def _give_up(wait_seconds):
    address, index = global_state.coordinator_address, global_state.process_id
    host, _, port = str(address).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        found = f"the coordinator at {address} was reached by process {index}, but not all processes of the job came"
    except (OSError, ValueError):
        found = f"process {index} could not reach the coordinator at {address}"
    print(
        f"error: {found} within {wait_seconds:g} s; start every process, or raise --coordinator_timeout",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def leave(status: int) -> None:
    """Ends this process with `status`, although others may never come to the end that JAX waits for."""
    if jax.distributed.is_initialized():
        thread = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        thread.start()
        thread.join(LEAVE_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def is_first() -> bool:
    """Whether this process is the one that logs, prints and writes what is written once."""
    return jax.process_index() == 0


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    return bool(process_allgather(np.array(flag)).any())


def gather(value) -> list:
    """The JSON values that the processes gave, in the order of processes."""
    data = json.dumps(value).encode()
    data = struct.pack(">q", len(data)) + data

    def part(start):
        return process_allgather(np.frombuffer(data[start : start + CHUNK].ljust(CHUNK, b"\0"), np.uint8))

    parts = [part(0)]
    ends = [8 + struct.unpack(">q", row[:8].tobytes())[0] for row in parts[0]]
    parts += [part(start) for start in range(CHUNK, max(ends), CHUNK)]
    rows = np.concatenate(parts, axis=1)
    return [json.loads(row[8:end].tobytes()) for row, end in zip(rows, ends, strict=True)]


def row_indices(mesh, count: int) -> np.ndarray:
    """i64[N], ascending: which of the `count` rows of a batch this process's devices hold."""
    held = NamedSharding(mesh, ROWS).addressable_devices_indices_map((count,))
    return np.unique(np.concatenate([np.arange(count)[index] for index in held.values()]))


def gather_rows(rows, values) -> list:
    """JSON values of all rows of a batch, of which this process has those of `rows` (see `row_indices`)."""
    everyones = gather([[int(row), value] for row, value in zip(rows, values, strict=True)])
    return [value for _, value in sorted({row: value for pairs in everyones for row, value in pairs}.items())]


@contextlib.contextmanager
def together():
    """What is raised inside on one process is raised on all: as it is there, as a ValueError that quotes it elsewhere.

    Nothing inside may exchange.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    said = gather(failure and " ".join(str(failure).split()))
    if failure is not None:
        raise failure
    for process, text in enumerate(said):
        if text is not None:
            raise ValueError(f"process {process}: {text}")


def check_same(settings: dict) -> None:
    """Raises ValueError on every process, naming each difference, when processes have other settings than the first.

    Args:
      settings: flat, with JSON values.
    """
    first, *others = gather(settings)
    differences = [
        f"process {process} has {key}={other.get(key)!r}, process 0 {first.get(key)!r}"
        for process, other in enumerate(others, 1)
        for key in sorted(first.keys() | other.keys())
        if first.get(key) != other.get(key)
    ]
    if differences:
        raise ValueError(
            f"the processes of this job were started differently: {'; '.join(differences)}; "
            f"start all of them with one config, one version of the code and the same data"
        )
