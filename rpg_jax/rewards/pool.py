"""Worker processes that call a user's function or environment, under limits of time, memory and network.

They stand on the standard library: pebble and loky unpickle what a worker answers, and end a worker without what it has
started; pebble's also import the trainer's main module, and JAX with it. Here an answer is a line of JSON.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rpg_jax import InputError

_WORKER = pathlib.Path(__file__).with_name("worker.py")
_START_SECONDS = 300.0  # to import the function's file, which takes 5 s of CPU time for some packages


class Failure(Exception):
    """The reason why a response has no score."""


def file_and_name(kind: str, spec: str, others: str, form: str = "FILE.py:NAME") -> tuple[str, str]:
    """The two parts of FILE.py:NAME. Raises InputError for another form, of which `others` are known, or no file."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise InputError(f"{kind} {spec!r} must be one of {others}, or of the form {form}")
    if not os.path.isfile(file):
        raise InputError(f"{kind} {spec!r}: there is no file {file!r}")
    return file, name


class Pool:
    """`workers` processes, each of which answers one question at a time and is replaced when it dies or hangs."""

    def __init__(self, where, name, workers, timeout_seconds, memory_mb, network=False, kind="function"):
        """Starts the workers; `where` is a Python file or a module, which holds the function, or environment, `name`.

        Prints a warning where `network` is false and this machine cannot take a process off the network.

        Raises Failure: the function cannot be loaded.
        """
        file = os.path.abspath(where) if where.endswith(".py") else where  # the function may change the folder
        arguments = [file, name, str(memory_mb), str(int(network)), kind]
        self._workers = [_Worker(arguments, timeout_seconds) for _ in range(workers)]
        self._threads, self._free = ThreadPoolExecutor(workers), deque(self._workers)  # a thread waits for each worker
        try:
            reason, *_ = self._threads.map(_Worker.start, self._workers)
        except BaseException:
            self.close()
            raise
        if reason:
            print(f"warning: {where}:{name} has the network, although it should not ({reason})", file=sys.stderr)

    def submit(self, question: dict, before: Iterable[dict] = ()) -> Future:
        """What the worker answers to a question {name: value}; its result raises Failure where the call fails.

        As long as that is None, the worker is asked all that comes `before`, and then again, each within its own time.
        """
        return self._threads.submit(self._ask, question, before)

    def _ask(self, question: dict, before: Iterable[dict]) -> Any:
        worker = self._free.popleft()  # nobody else asks it: it may keep an object from one question to the next
        try:
            answer = worker.ask(question)
            while answer is None:
                *_, answer = (worker.ask(each) for each in (*before, question))
            return answer
        finally:
            self._free.append(worker)

    def close(self) -> None:
        """Ends the workers with all of their sessions; questions that have no answer fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.closed = True
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()


class _Worker:
    """A process, started again when it has ended. `kill` is for any thread, the rest for one at a time."""

    def __init__(self, arguments, seconds):
        # -P: the function cannot import the modules of this folder by accident. -B: bytecode would outlive an edit of
        # the function's file in the same second that leaves its size as it is.
        self._python = [sys.executable, "-P", *["-B"] * arguments[0].endswith(".py"), str(_WORKER)]
        path = [str(_WORKER.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]  # it may import rpg_jax
        self._environment = os.environ | dict(PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1")
        self._environment |= dict(OPENBLAS_NUM_THREADS="1", PYTHONHASHSEED="0")  # every worker orders its sets alike
        self._arguments, self._seconds, self.closed = arguments, seconds, False
        self._process = self._connection = self._replies = None

    def start(self) -> str:
        """Starts the process; why the function can reach the network although it should not, if so."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = [*self._python, str(theirs.fileno()), *self._arguments]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=2, env=self._environment, pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this process only
            )  # fmt: skip
        self._replies = self._connection.makefile()
        if self.closed:  # meanwhile
            self.kill()
        return self._exchange({}, _START_SECONDS)

    def ask(self, question: dict) -> Any:
        if self._process is None:
            self.start()
        return self._exchange(question, self._seconds)

    def _exchange(self, question: dict, seconds: float) -> Any:
        """The value that comes back. A process that gives none in time, or can give no other, is ended."""
        try:
            self._connection.settimeout(seconds)
            self._connection.sendall(json.dumps(question).encode() + b"\n")
            reply = self._replies.readline()
        except TimeoutError:
            self.stop()
            raise Failure(f"took longer than {seconds:g} s") from None
        except OSError:  # the connection is broken, or closed
            reply = ""
        if not reply.endswith("\n"):
            raise Failure(f"ended its process ({self.stop()})")
        message = json.loads(reply)
        if message.get("last"):
            self.stop()
        if "error" in message:
            raise Failure(message["error"])
        return message["value"]

    def kill(self) -> None:
        """Ends the process with its session, elsewhere than on Linux its group, and what waits for its answer."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for name in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if os.getsid(int(name)) == process.pid:  # a group of its own, as the command timeout has
                        os.kill(int(name), signal.SIGKILL)
            with contextlib.suppress(OSError):  # it is closed
                self._connection.shutdown(socket.SHUT_RDWR)

    def stop(self) -> str:
        """`kill`, and waits for the end; how the process ended."""
        self.kill()
        process, self._process = self._process, None
        if process is None:
            return "closed"
        for stream in self._replies, self._connection, process.stdin:
            stream.close()
        code = process.wait()
        return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
