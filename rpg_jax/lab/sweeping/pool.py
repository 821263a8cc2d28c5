"""Runs commands, some at once, each at most once at a time even when several pools share their folder."""

import dataclasses
import glob
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

from rpg_jax.run.cli import PREEMPTED
from rpg_jax.storage.workdir import lock

POLL_SECONDS = 0.5
QUIET_SECONDS = 60.0  # between two lines of progress while no task ends
A_RUN = 2**30  # bytes of memory that a run is taken to need
ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    command: list[str]
    folder: pathlib.Path  # where its output goes, to `log.txt`
    prepare: Callable[[], None]  # called before the command starts; makes the folder
    is_done: Callable[[], bool]


class Pool:
    """Runs tasks, a thread for each of at most `at_once`, which get equal shares of the cores, until all have ended or
    `should_stop()` is true: then commands are sent SIGTERM and waited for."""

    def __init__(self, tasks: Sequence[Task], at_once: int, should_stop: Callable[[], bool]):
        self.tasks, self.at_once, self.should_stop = tasks, min(at_once, len(tasks)), should_stop
        self.broken, self.running, self.failed, self.seconds, self.ended = threading.Event(), [], {}, [], 0
        self.cores = queue.SimpleQueue()
        for share in share_cores(self.at_once):
            self.cores.put(share)

    def run(self) -> dict[str, int]:
        """Returns {name: exit status} of the tasks that failed; prints a line whenever a task ends."""
        with futures.ThreadPoolExecutor(self.at_once) as threads:
            left = {threads.submit(self.take, task) for task in self.tasks}
            while left:
                done, left = futures.wait(left, QUIET_SECONDS, futures.FIRST_COMPLETED)
                for future in done:
                    future.result()  # raises an error of the pool itself
                if not done:
                    self.report(f"running {', '.join(task.name for task in list(self.running))}")
        return self.failed

    def stops(self) -> bool:
        """Whether no further task may start, and those that run are to end."""
        return self.broken.is_set() or self.should_stop()

    def take(self, task: Task) -> None:
        """Runs a task unless it is done by now, or told to stop before; waits while another process runs it."""
        cores, waited = self.cores.get(), False
        try:
            while not self.stops():
                held, descriptor = lock(task.folder.with_name(f".{task.folder.name}.lock"))
                if held is not None:
                    with held:
                        if task.is_done():
                            self.ended += 1
                        else:
                            self.start(task, cores, descriptor)
                    return
                if not waited:
                    self.report(f"{task.name} is run by another process, which is waited for")
                waited = True
                time.sleep(POLL_SECONDS)
        except OSError as error:  # a disk that is full, or may not be written
            self.fail(task.name, 1, f"cannot be started: {error}")
        except BaseException:
            self.broken.set()
            raise
        finally:
            self.cores.put(cores)

    def start(self, task: Task, cores: list[int], descriptor: int) -> None:
        """Starts a task that nobody else runs, and waits for it; no process is left running after an error."""
        task.prepare()
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)  # of this thread and what it starts
        begun, is_told = time.monotonic(), False
        with (task.folder / "log.txt").open("a") as output:
            # In a session of its own, so that Ctrl-C reaches it as the SIGTERM on which it saves.
            process = subprocess.Popen(
                task.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=[descriptor],
                start_new_session=True,
            )  # fmt: skip
        self.running.append(task)
        try:
            while process.poll() is None:
                if not is_told and self.stops():
                    is_told = True
                    process.terminate()
                time.sleep(POLL_SECONDS)
        finally:
            process.terminate()
            status = process.wait()
            self.running.remove(task)
        if status == 0 and task.is_done():
            self.ended += 1
            self.seconds.append(time.monotonic() - begun)
            self.report(f"{task.name} done in {self.seconds[-1]:.0f} s")
        elif status == PREEMPTED or (is_told and status == -signal.SIGTERM):
            self.report(f"{task.name} stopped {'after saving' if status == PREEMPTED else 'while it started'}")
        else:
            how = f"was killed ({signal.Signals(-status).name})" if status < 0 else f"failed with status {status}"
            log = task.folder / "log.txt"
            last = log.read_text(errors="replace").strip().rpartition("\n")[2].strip()
            self.fail(task.name, max(status, 1), f"{how}: {last} (see {log})")

    def fail(self, name: str, status: int, how: str) -> None:
        self.failed[name] = status
        self.ended += 1
        self.report(f"{name} {how}", sys.stderr)

    def report(self, text: str, file=None) -> None:
        """Prints a line with the number of tasks that have ended and an estimate of the time left."""
        estimate, total = "", len(self.tasks)
        if self.seconds and self.ended < total:
            minutes = sum(self.seconds) / len(self.seconds) * (total - self.ended) / self.at_once / 60
            estimate = f" | about {minutes:.0f} min left"
        print(f"[{self.ended}/{total}] {text}{estimate}", file=file or sys.stdout, flush=True)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def carries() -> int:
    """Runs at once: one for each core and GiB of free memory, or one if there are accelerators, which a run takes."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"
    if not on_cpu and any(glob.glob(pattern) for pattern in ACCELERATORS):
        return 1
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else sys.maxsize
    return max(1, min(len(cores()), pages * os.sysconf("SC_PAGE_SIZE") // A_RUN))


def share_cores(at_once: int) -> list[list[int]]:
    """The cores of each of `at_once` runs: equal shares, or one core each where there are more runs than cores."""
    have = cores()
    return [have[run::at_once] if at_once <= len(have) else [have[run % len(have)]] for run in range(at_once)]
