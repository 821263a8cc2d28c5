"""A command's part in a job of one or many processes: joining, comparing settings, stopping together, the watchdog.

Each process has JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment, or was started with
--multihost where the cluster knows them.
"""

import contextlib
import dataclasses
import pathlib
import platform
from collections.abc import Callable, Iterator

import jax
from ml_collections import ConfigDict

from rpg_jax.data import Sets
from rpg_jax.parallel import multihost
from rpg_jax.run import cli
from rpg_jax.run.watchdog import Watchdog
from rpg_jax.storage.settings import digest, file_digest, of_config

SAMPLED = 100  # problems of each split that are compared


@contextlib.contextmanager
def joined(
    detect_cluster: bool = False, wait_seconds: float = 300.0, watchdog_seconds: float = 0.0
) -> Iterator[Callable[..., bool]]:
    """Joins the job and gives `should_stop(flag=False)`. The arguments are flags of `rpg_jax.train`.

    Every process calls `should_stop` at the same points. It is true on all once one was sent SIGTERM or SIGINT, or
    gives a flag that is true. Each call tells the watchdog that there is progress.
    """
    stop = cli.stop_event()
    multihost.initialize(detect_cluster, wait_seconds)
    with Watchdog(watchdog_seconds) as watchdog:

        def should_stop(flag=False):
            watchdog.tick()
            return multihost.any_process(flag or stop.is_set())

        yield should_stop


def say(text: str) -> None:
    """Prints on the first process."""
    if multihost.is_first():
        print(text, flush=True)


def check_same(config: ConfigDict) -> None:
    """Raises ValueError on every process unless all have the same config, code and versions of JAX and Python."""
    package = pathlib.Path(__file__).parents[1]
    files = {f"code of {file.relative_to(package.parent)}": file for file in sorted(package.rglob("*.py"))}
    code = {name: file_digest(file) for name, file in files.items()}
    settings = of_config(config, "config.")
    multihost.check_same({**settings, **code, "jax": jax.__version__, "python": platform.python_version()})


def check_same_data(data: Sets) -> None:
    """Raises ValueError on every process unless all read as many problems and the same sample of each split."""

    def counted(problems):
        sample = [dataclasses.astuple(problems[i]) for i in range(0, len(problems), len(problems) // SAMPLED + 1)]
        return f"{len(problems)}, {digest(sample)}"

    multihost.check_same({f"problems of {split}": counted(data.problems(split)) for split in ("train", "heldout")})
