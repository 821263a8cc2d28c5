"""Runs commands, as many at once as fit, each at most once at a time even when several pools share their folder."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from rpg_jax.lab.sweeping import machine

PREEMPTED = 75  # a command's status when it was stopped after saving
POLL_SECONDS = 0.5
QUIET_SECONDS = 60.0  # between two lines of progress while nothing ends


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    command: list[str]
    folder: pathlib.Path  # for its output, `log.txt`; made if need be
    prepare: Callable  # () -> None, called before the command is
    is_done: Callable  # () -> bool
    steps: Callable  # () -> steps it has logged


@dataclasses.dataclass
class Running:
    task: Task
    process: subprocess.Popen
    lock: contextlib.ExitStack
    slot: int
    begun: float


def lock(path):
    """(ExitStack that holds a file's lock, descriptor); a process that gets the descriptor holds the lock as well.

    Returns (None, None) when another holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None, None
        return stack.pop_all(), file.fileno()


class Pool:
    """Runs tasks to their end, or until told to stop.

    Args:
      at_once: the most that run at once; each gets its share of the cores.
      by_memory: whether memory limits that further.
      should_stop: () -> bool; once true, commands are sent SIGTERM and waited for.
    """

    def __init__(self, tasks, at_once: int, by_memory: bool, should_stop: Callable):
        self.waiting, self.running, self.failed, self.elsewhere = list(tasks), [], {}, set()
        self.total, self.by_memory, self.should_stop = len(self.waiting), by_memory, should_stop
        self.cores = machine.share_cores(min(at_once, self.total))
        self.largest, self.seconds, self.told, self.stopped = 0.0, [], time.monotonic(), False

    def run(self) -> dict:
        """Returns {name: exit status} of the tasks that failed; a line on stdout tells of each that ends."""
        try:
            self.watch()
        finally:  # an error of the pool's own leaves nothing behind that runs
            for one in self.running:
                one.process.terminate()
            for one in self.running:
                one.process.wait()
        return self.failed

    def watch(self) -> None:
        """Starts tasks and sees to their end until none is left, or none runs and it was told to stop."""
        while self.running or (self.waiting and not self.should_stop()):
            for one in list(self.running):
                self.largest = max(self.largest, machine.resident_memory(one.process.pid)[1])
                if one.process.poll() is not None:
                    self.running.remove(one)
                    self.ended(one)
            if self.should_stop() and not self.stopped:
                self.stopped = True
                for one in self.running:
                    one.process.terminate()
            if not self.should_stop():
                self.start()
            if self.running and time.monotonic() - self.told > QUIET_SECONDS:
                self.tell("running " + ", ".join(f"{one.task.name} (step {one.task.steps()})" for one in self.running))
            time.sleep(POLL_SECONDS)

    def start(self) -> None:
        """Starts what fits of what waits; what another pool runs stays at the end of the queue until it is done."""
        for _ in range(len(self.waiting)):
            if len(self.running) == len(self.cores) or not self.fits():
                return
            task = self.waiting.pop(0)
            try:
                self.begin(task)
            except OSError as error:  # a disk that is full, or may not be written
                self.failed[task.name] = 1
                self.tell(f"{task.name} cannot be started: {error}", sys.stderr)

    def fits(self) -> bool:
        """Whether memory allows another; beside a first one only after it has shown, in a step, how much it takes."""
        if not self.by_memory or not self.running:
            return True
        seen = self.seconds or any(one.task.steps() > 0 for one in self.running)
        pids = [one.process.pid for one in self.running]
        return bool(seen) and machine.room(pids, max(1.1 * self.largest, machine.FIRST_GUESS))

    def begin(self, task) -> None:
        """Starts a task, unless it is done by now; puts it back while another process runs it."""
        held, descriptor = lock(task.folder.with_name(f".{task.folder.name}.lock"))
        if held is None:
            self.waiting.append(task)
            if task.name not in self.elsewhere:
                self.elsewhere.add(task.name)
                self.tell(f"{task.name} is run by another process, which is waited for")
            return
        with held:
            if task.is_done():
                return
            slot = min(set(range(len(self.cores))) - {one.slot for one in self.running})
            task.prepare()
            with (task.folder / "log.txt").open("a") as output, _on(self.cores[slot]):
                # In a session of its own, so that Ctrl-C comes to it as the SIGTERM on which it saves.
                process = subprocess.Popen(
                    task.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    pass_fds=[descriptor], start_new_session=True,
                )  # fmt: skip
            self.running.append(Running(task, process, held.pop_all(), slot, time.monotonic()))

    def ended(self, one) -> None:
        status, spent = one.process.returncode, time.monotonic() - one.begun
        one.lock.close()
        if status == 0 and one.task.is_done():
            self.seconds.append(spent)
            self.tell(f"{one.task.name} done in {spent:.0f} s")
        elif status == PREEMPTED:
            self.waiting.append(one.task)
            self.tell(f"{one.task.name} stopped after saving")
        elif self.stopped and status == -signal.SIGTERM:
            self.waiting.append(one.task)
            self.tell(f"{one.task.name} stopped while it started")
        else:
            self.failed[one.task.name] = status if status > 0 else 1
            how = f"was killed ({signal.Signals(-status).name})" if status < 0 else f"failed with status {status}"
            self.tell(f"{one.task.name} {how}: {last_line(one.task.folder / 'log.txt')}", sys.stderr)

    def tell(self, text, file=None) -> None:
        """A line with the count of what has ended and a guess of the time left."""
        ended = self.total - len(self.waiting) - len(self.running)
        left = ""
        if self.seconds and ended < self.total:
            minutes = sum(self.seconds) / len(self.seconds) * (self.total - ended) / len(self.cores) / 60
            left = f" | about {minutes:.0f} min left"
        print(f"[{ended}/{self.total}] {text}{left}", file=file or sys.stdout, flush=True)
        self.told = time.monotonic()


def last_line(path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1]} (see {path})" if lines else f"see {path}"


@contextlib.contextmanager
def _on(cores):
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
