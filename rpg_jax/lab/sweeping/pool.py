"""Runs commands, as many at once as fit, each at most once at a time even when several pools share their folder."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from rpg_jax.lab.sweeping import machine
from rpg_jax.run.cli import PREEMPTED
from rpg_jax.storage.workdir import lock

POLL_SECONDS = 0.5
QUIET_SECONDS = 60.0  # between two lines of progress while no task ends


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    command: list[str]
    folder: pathlib.Path  # where its output goes, to `log.txt`
    prepare: Callable[[], None]  # called before the command starts; makes the folder
    is_done: Callable[[], bool]
    steps: Callable[[], int]  # RL steps that it has logged


@dataclasses.dataclass
class Running:
    task: Task
    process: subprocess.Popen
    lock: contextlib.ExitStack
    slot: int  # index of its share of the cores
    begun: float


class Pool:
    """Runs tasks until all have ended, or until it is asked to stop.

    Args:
      at_once: the most that run at once; each gets its share of the cores.
      should_stop: once true, commands are sent SIGTERM and waited for.
    """

    def __init__(self, tasks: Sequence[Task], at_once: int, should_stop: Callable[[], bool]):
        self.waiting, self.running, self.failed, self.elsewhere = list(tasks), [], {}, set()
        self.total, self.should_stop = len(self.waiting), should_stop
        self.cores = machine.share_cores(min(at_once, self.total))
        self.seconds, self.last_report, self.stopped = [], time.monotonic(), False

    def run(self) -> dict[str, int]:
        """Returns {name: exit status} of the tasks that failed; prints a line whenever a task ends."""
        try:
            self.watch()
        finally:  # after an error of the pool itself no process may be left running
            for run in self.running:
                run.process.terminate()
            for run in self.running:
                run.process.wait()
        return self.failed

    def watch(self) -> None:
        """Starts tasks and waits for them until none is left, or until it was asked to stop and none runs."""
        while self.running or (self.waiting and not self.should_stop()):
            for run in list(self.running):
                if run.process.poll() is not None:
                    self.running.remove(run)
                    self.ended(run)
            if not self.should_stop():
                self.start()
            elif not self.stopped:
                self.stopped = True
                for run in self.running:
                    run.process.terminate()
            if self.running and time.monotonic() - self.last_report > QUIET_SECONDS:
                steps = ", ".join(f"{run.task.name} (step {run.task.steps()})" for run in self.running)
                self.report(f"running {steps}")
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Starts as many waiting tasks as fit; those that another pool runs go to the end of the queue."""
        for _ in range(len(self.waiting)):
            if len(self.running) == len(self.cores):
                return
            task = self.waiting.pop(0)
            try:
                self.begin(task)
            except OSError as error:  # a disk that is full, or may not be written
                self.failed[task.name] = 1
                self.report(f"{task.name} cannot be started: {error}", sys.stderr)

    def begin(self, task: Task) -> None:
        """Starts a task unless it is done by now; puts it back into the queue while another process runs it."""
        held, descriptor = lock(task.folder.with_name(f".{task.folder.name}.lock"))
        if held is None:
            self.waiting.append(task)
            if task.name not in self.elsewhere:
                self.elsewhere.add(task.name)
                self.report(f"{task.name} is run by another process, which is waited for")
            return
        with held:
            if task.is_done():
                return
            slot = min(set(range(len(self.cores))) - {run.slot for run in self.running})
            task.prepare()
            with (task.folder / "log.txt").open("a") as output, _pinned_to(self.cores[slot]):
                # In a session of its own, so that Ctrl-C reaches it as the SIGTERM on which it saves.
                process = subprocess.Popen(
                    task.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    pass_fds=[descriptor], start_new_session=True,
                )  # fmt: skip
            self.running.append(Running(task, process, held.pop_all(), slot, time.monotonic()))

    def ended(self, run: Running) -> None:
        """Records how a process ended; a task that was stopped waits for the next pool."""
        name, status, spent = run.task.name, run.process.returncode, time.monotonic() - run.begun
        run.lock.close()
        if status == 0 and run.task.is_done():
            self.seconds.append(spent)
            self.report(f"{name} done in {spent:.0f} s")
        elif status == PREEMPTED or (self.stopped and status == -signal.SIGTERM):
            self.waiting.append(run.task)
            self.report(f"{name} stopped {'after saving' if status == PREEMPTED else 'while it started'}")
        else:
            self.failed[name] = status if status > 0 else 1
            how = f"was killed ({signal.Signals(-status).name})" if status < 0 else f"failed with status {status}"
            self.report(f"{name} {how}: {last_line(run.task.folder / 'log.txt')}", sys.stderr)

    def report(self, text: str, file=None) -> None:
        """Prints a line with the number of tasks that have ended and an estimate of the time left."""
        ended, estimate = self.total - len(self.waiting) - len(self.running), ""
        if self.seconds and ended < self.total:
            minutes = sum(self.seconds) / len(self.seconds) * (self.total - ended) / len(self.cores) / 60
            estimate = f" | about {minutes:.0f} min left"
        print(f"[{ended}/{self.total}] {text}{estimate}", file=file or sys.stdout, flush=True)
        self.last_report = time.monotonic()


def last_line(path: pathlib.Path) -> str:
    """The last line of a log that is not blank, and where to read on."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1]} (see {path})" if lines else f"see {path}"


@contextlib.contextmanager
def _pinned_to(cores: list[int]):
    """Children started inside may use these cores only."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
