"""How an entry point takes part in a job of one or many processes: joining, agreeing, stopping together, the watchdog.

Environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID on each process, or --multihost where the
cluster knows them.
"""

import contextlib
import dataclasses
import hashlib
import pathlib
import platform
import signal
import threading

import jax

from rpg_jax.parallel import multihost
from rpg_jax.run import cli
from rpg_jax.run.watchdog import Watchdog
from rpg_jax.storage.settings import file_digest, of_config

SAMPLED = 100  # problems of a split that are compared


@contextlib.contextmanager
def joined(detect_cluster: bool = False, wait_seconds: float = 300.0, watchdog_seconds: float = 0.0):
    """Joins the job, watches over it, and gives `should_stop() -> bool`; the arguments are flags of `rpg_jax.train`.

    Every process asks `should_stop` at the same points. It is true on all once one was sent SIGTERM, and each time
    that it is asked counts as progress.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with cli.door():
        multihost.initialize(detect_cluster, wait_seconds)
    with Watchdog(watchdog_seconds) as watchdog:

        def should_stop():
            watchdog.tick()
            return multihost.any_process(stop.is_set())

        yield should_stop


def say(text: str) -> None:
    """Prints on the first process."""
    if multihost.is_first():
        print(text, flush=True)


def check_same(config) -> None:
    """Raises ValueError on every process when they were started with other configs, code or versions of JAX."""
    package = pathlib.Path(__file__).parents[1]
    files = {f"code of {file.relative_to(package.parent)}": file for file in sorted(package.rglob("*.py"))}
    code = {name: file_digest(file) for name, file in files.items()}
    settings = of_config(config, "config.")
    multihost.check_same({**settings, **code, "jax": jax.__version__, "python": platform.python_version()})


def check_same_data(data) -> None:
    """Raises ValueError on every process when they read other problems: by their number, and some of each split."""

    def digest(problems):
        some = [dataclasses.astuple(problems[i]) for i in range(0, len(problems), len(problems) // SAMPLED + 1)]
        return f"{len(problems)}, {hashlib.sha256(repr(some).encode()).hexdigest()[:12]}"

    multihost.check_same({f"problems of {split}": digest(data.problems(split)) for split in ("train", "heldout")})
