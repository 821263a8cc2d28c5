"""Worker processes that call a reward function, each under a warden that ends whatever the function started."""

import contextlib
import json
import os
import pathlib
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np

_HERE = pathlib.Path(__file__).parent
_START_SECONDS = 60.0  # to import the function's file
_STOP_SECONDS = 10.0  # for a warden to kill its worker and all that it started
_MOST_PROCESSES = 64  # that a worker may have started


class Failure(Exception):
    """The reason why a sample has no score."""


class Pool:
    """`workers` processes, each of which scores one sample at a time and is replaced when it dies or hangs."""

    def __init__(self, where, name, workers, timeout_seconds, memory_mb, network=False):
        """Starts the workers; `where` is a Python file or a module, which holds the function `name`.

        Prints a warning where `network` is false and this machine cannot take a process off the network.

        Raises:
          Failure: the function cannot be loaded.
        """
        self._workers = [_Worker(where, name, timeout_seconds, memory_mb, network) for _ in range(workers)]
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.wait_until_ready()
            if reason := self._workers[0].network:
                print(f"warning: {where}:{name} has the network, although it should not ({reason})", file=sys.stderr)
        except BaseException:
            self.close()
            raise

    def try_out(self, question: dict) -> None:
        """Calls the function once; raises Failure where the call fails."""
        self._workers[0].ask(question)

    def map(self, questions: Sequence[dict]) -> tuple[np.ndarray, dict[int, str]]:
        """The function's values f32[N] for N questions {name: value}, 0 for failures; {index: reason} of failures."""
        values, failures = np.zeros(len(questions), np.float32), {}
        queue = SimpleQueue()
        for index in [*range(len(questions)), *[None] * len(self._workers)]:
            queue.put(index)

        def drain(worker):
            while (index := queue.get()) is not None:
                try:
                    values[index] = worker.ask(questions[index])
                except Failure as failure:
                    failures[index] = str(failure)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            list(threads.map(drain, self._workers))
        return values, dict(sorted(failures.items()))

    def close(self) -> None:
        """Ends the workers and every process that they started."""
        for worker in self._workers:
            worker.stop()


class _Worker:
    def __init__(self, where, name, timeout_seconds, memory_mb, network):
        # -P: the function cannot import the modules of this folder by accident. -B: bytecode would outlive an edit of
        # the function's file in the same second that leaves its size as it is.
        python = [sys.executable, "-P", *(["-B"] if where.endswith(".py") else [])]
        worker = [*python, str(_HERE / "worker.py"), where, name, str(memory_mb), str(int(network))]
        self._command = [*python, str(_HERE / "warden.py"), str(_MOST_PROCESSES), *worker]
        path = [str(_HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),  # functions may import rpg_jax
            "PYTHONHASHSEED": "0",  # every worker orders its sets alike
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._timeout = timeout_seconds
        self._process = None
        self.network = ""  # why the function can reach it although it should not

    def start(self):
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupt from the keyboard reaches this process only
            env=self._environment,
            bufsize=0,
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        with contextlib.suppress(BrokenPipeError):  # it died; its last line gives the reason
            os.write(self._process.stdin.fileno(), self._question(None))

    def wait_until_ready(self):
        self._exchange(b"", _START_SECONDS)

    def _question(self, values: dict | None) -> bytes:
        """A line for the worker, with a new secret, which its answer must repeat."""
        self._secret = secrets.token_hex(16)
        return json.dumps([self._secret, values]).encode() + b"\n"

    def ask(self, question: dict) -> float:
        if self._process is None:
            self.start()
            self.wait_until_ready()
        return self._exchange(self._question(question), self._timeout)

    def _exchange(self, question: bytes, seconds: float) -> float:
        """Writes a question and returns the value in the next line; a worker that gives no line in time is ended."""
        deadline, reply = time.monotonic() + seconds, b""
        stdin, stdout = self._process.stdin, self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if question:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self.stop()
                    raise Failure(f"took longer than {seconds:g} s")
                for key, _ in ready:
                    if key.fileobj is stdout:
                        part = os.read(stdout.fileno(), 1 << 16)
                        reply += part or b'{"dead": "its output was closed"}\n'
                        continue
                    try:
                        question = question[os.write(stdin.fileno(), question[: 1 << 16]) :]
                    except BrokenPipeError:
                        question = b""  # it died; its last line gives the reason
                    if not question:
                        selector.unregister(stdin)
        try:
            message = json.loads(reply.splitlines()[0])
            is_answer = message.get("secret") == self._secret
        except (ValueError, AttributeError):
            message, is_answer = {}, False
        if not is_answer:  # from the warden, or from the function itself
            self.stop()
            raise Failure(f"ended its process ({message.get('dead', 'it wrote to our pipe')})")
        if "value" not in message:
            raise Failure(message["error"])
        if not 0 <= message["value"] <= 1:
            raise Failure(f"answered {message['value']}, not a number in 0..1")
        self.network = message.get("network", self.network)
        return message["value"]

    def stop(self):
        """Ends the process, if it runs, and its descendants."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        process.send_signal(signal.SIGCONT)  # a warden that somebody has stopped would leave its worker behind
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()
