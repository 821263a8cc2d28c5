"""Trainings as processes: forks of a zygote or new interpreters, waited for with a limit, and cleaned up after."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

MARK = "FAULTS_PROCESS"  # in the environment of every process of a campaign, of reward workers too
LINGER_SECONDS = 10.0  # that workers have to notice that their training is gone


class Ended(NamedTuple):
    """How a command ended."""

    status: int | None  # -N for signal N; None if it was still running at its time limit and was killed
    out: str
    err: str
    seconds: float
    left: list[str]  # commands of processes that it left behind


class Zygote:
    """Starts commands of rpg_jax as forks (`zygote.main`). A context manager."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._count = folder, 0
        command = [sys.executable, "-m", "rpg_jax.lab.faults.zygote"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._process = subprocess.Popen(command, **pipes)

    def ask(self, order: dict) -> int | None:
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, name: str, *arguments: str, cold: bool = False, most_bytes: int | None = None, **environment: str
    ) -> "Running":
        """Starts `python -m rpg_jax.NAME ARGUMENTS`: a fork, or with `cold` a new interpreter."""
        self._count += 1
        streams = [str(self._folder / f"{self._count}.{stream}") for stream in ("out", "err")]
        environment |= {MARK: f"{self._process.pid}-{self._count}"}
        if not cold:
            order = dict(module=f"rpg_jax.{name}", arguments=list(arguments), environment=environment)
            pid = self.ask({"start": order | dict(streams=streams, most_bytes=most_bytes)})
            return Running(pid, lambda: self.ask({"poll": pid}), streams, environment[MARK])
        with open(streams[0], "w") as out, open(streams[1], "w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", f"rpg_jax.{name}", *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env=os.environ | environment, start_new_session=True,
            )  # fmt: skip
        return Running(process.pid, process.poll, streams, environment[MARK])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        for pid in marked(f"{self._process.pid}-"):
            _kill(pid, signal.SIGKILL)


class Running:
    """A command that was started."""

    def __init__(self, pid: int, poll: Callable[[], int | None], streams: Sequence[str], mark: str):
        self.pid, self._poll, self._streams, self._mark = pid, poll, streams, mark
        self._begin, self._status = time.monotonic(), None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self._status is None:
            self._status = self._poll()
        return self._status

    def err(self) -> str:
        """What it has written on stderr so far."""
        file = pathlib.Path(self._streams[1])
        return file.read_text(errors="replace") if file.exists() else ""

    def send(self, number: int) -> None:
        """Sends it a signal, if it is still running."""
        if self.poll() is None:
            _kill(self.pid, number)

    def workers(self) -> list[int]:
        """Process ids of its reward workers and of their wardens."""
        return [pid for pid in marked(f"{self._mark}\0") if pid != self.pid]

    def wait(self, seconds: float) -> Ended:
        """Waits for its end; kills it at the limit. What it left behind is killed after `LINGER_SECONDS`."""
        limit = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < limit:
            time.sleep(0.01)
        status = self.poll()
        if status is None:
            self.send(signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.01)
        took, linger = time.monotonic() - self._begin, time.monotonic() + LINGER_SECONDS
        while (left := self.workers()) and time.monotonic() < linger:
            time.sleep(0.05)
        commands = [_command(pid) for pid in left]
        for pid in left:
            _kill(pid, signal.SIGKILL)
        out, err = (pathlib.Path(file).read_text(errors="replace") for file in self._streams)
        if "Traceback" not in err:  # else they are kept, to be read
            for file in self._streams:
                os.unlink(file)
        return Ended(status, out, err, took, commands)


def marked(mark: str) -> list[int]:
    """Living processes whose environment has a mark that begins with `mark`; none where there is no /proc."""
    found, text = [], f"{MARK}={mark}".encode()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (folder / "environ").read_bytes() and _state(folder) not in "ZX":
                found.append(int(folder.name))
    return found


def _state(folder: pathlib.Path) -> str:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "?"


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
