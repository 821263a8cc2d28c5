"""Scoring responses: built-in verifiers in this process, a user's function in worker processes that may die."""

import dataclasses
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

from rpg_jax.rewards.verifiers import VERIFIERS

_WORKER = pathlib.Path(__file__).with_name("worker.py")
_START_SECONDS = 60.0  # to import the user's file


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a call of `Scorer.score` returns: N verdicts and the failures among them."""

    correct: np.ndarray  # f32[N], 1 right, 0 wrong, between is partial credit; 0 where the function failed
    failures: list[str]  # one line for each sample whose scoring failed, naming its problem


class Scorer:
    """Scores responses with the built-in verifiers or with a user's function.

    The user's function, `NAME(prompt: str, response: str, answer: str, task: str) -> float in 0..1`, runs in `workers`
    processes. One that raises, hangs, dies, takes too much memory or returns anything else fails its sample: the sample
    counts as wrong and is reported, and its worker is replaced if need be. Close the scorer, or use it in a `with`.
    """

    def __init__(self, function=None, workers=2, timeout_seconds=10.0, memory_mb=4096, max_failures=0.25):
        """`function` is None for the built-in verifiers, or "FILE.py:NAME".

        Args:
          workers: processes; timeout_seconds: for one sample, after which its worker is killed.
          memory_mb: address space of a worker, MiB.
          max_failures: the largest share of one call's samples that may fail.

        Raises:
          ValueError: when the function cannot be loaded, or for a setting out of range.
        """
        if workers < 1:
            raise ValueError(f"reward workers={workers} must be at least 1")
        if timeout_seconds <= 0 or memory_mb < 64:
            raise ValueError(f"reward {timeout_seconds=} must be positive and {memory_mb=} at least 64")
        if not 0 <= max_failures <= 1:
            raise ValueError(f"reward {max_failures=} is a share of the samples and must be in 0..1")
        self._function, self._max_failures = function, max_failures
        self._workers = []
        if function is not None:
            file, name = _parse(function)
            self._workers = [_Worker(file, name, timeout_seconds, memory_mb) for _ in range(workers)]
            try:
                for worker in self._workers:
                    worker.start()
                for worker in self._workers:
                    worker.wait_until_ready()
            except _Failure as failure:
                self.close()
                raise ValueError(f"reward function {function!r} cannot be loaded: {failure}") from None

    def score(self, items: Sequence) -> Scores:
        """Scores N pairs (problem, response); a problem has `id`, `task`, `prompt` and `answer`.

        Raises:
          ValueError: a task without a built-in verifier.
          RuntimeError: more than `max_failures` of the samples failed.
        """
        if self._function is None:
            return Scores(np.array([_verify(problem, response) for problem, response in items], np.float32), [])
        correct, failures = np.zeros(len(items), np.float32), {}
        queue = SimpleQueue()
        for index in range(len(items)):
            queue.put(index)
        for _ in self._workers:
            queue.put(None)

        def drain(worker):
            while (index := queue.get()) is not None:
                problem, response = items[index]
                try:
                    correct[index] = worker.ask([problem.prompt, response, problem.answer, problem.task])
                except _Failure as failure:
                    failures[index] = f"problem {problem.id} ({problem.task}): reward function {failure}"

        with ThreadPoolExecutor(len(self._workers)) as threads:
            list(threads.map(drain, self._workers))
        lines = [failures[index] for index in sorted(failures)]
        if len(lines) > self._max_failures * len(items):
            raise RuntimeError(
                f"reward function {self._function!r} failed on {len(lines)} of {len(items)} samples, more than "
                f"max_failures={self._max_failures:g} of them; the first: {lines[0]}"
            )
        return Scores(correct, lines)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Failure(Exception):
    """Why a sample has no score."""


class _Worker:
    """A process that answers one question at a time, started again when it did not."""

    def __init__(self, file, name, timeout_seconds, memory_mb):
        self._command = [sys.executable, str(_WORKER), file, name, str(memory_mb)]
        self._timeout = timeout_seconds
        self._process = None

    def start(self):
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # killing its group takes along what it started
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def wait_until_ready(self):
        self._receive(_START_SECONDS)

    def ask(self, question) -> float:
        if self._process is None:
            self.start()
            self.wait_until_ready()
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it died between two questions; reading tells
        return self._receive(self._timeout)

    def _receive(self, seconds) -> float:
        """The value in the next line that the worker writes, or a _Failure; a worker without an answer is killed."""
        deadline, line = time.monotonic() + seconds, b""
        stdout = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise _Failure(f"took longer than {seconds:g} s")
                part = os.read(stdout.fileno(), 1 << 16)
                if not part:
                    raise _Failure(f"ended its process ({_describe(self.kill())})")
                line += part
        reply = json.loads(line)
        if "error" in reply:
            raise _Failure(reply["error"])
        return reply["value"]

    def kill(self):
        """Ends the process group and returns the process's own exit status, if it had ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            status = process.wait(timeout=0.2) if process.poll() is None else process.returncode
        except subprocess.TimeoutExpired:
            status = None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        process.stdin.close()
        process.stdout.close()
        return status


def _describe(status):
    if status is None:
        return "its output was closed"
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _verify(problem, response) -> bool:
    if problem.task not in VERIFIERS:
        raise ValueError(f"task {problem.task!r} has no built-in verifier; known: {', '.join(VERIFIERS)}")
    return VERIFIERS[problem.task](response, problem.answer)


def _parse(function: str) -> tuple[str, str]:
    file, _, name = function.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"reward function {function!r} must be of the form FILE.py:NAME")
    if not pathlib.Path(file).is_file():
        raise ValueError(f"reward function {function!r}: there is no file {file!r}")
    return file, name
