"""Worker processes that call a user's function or environment, each under a warden that ends whatever it started."""

import json
import os
import pathlib
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

_HERE = pathlib.Path(__file__).parent
_START_SECONDS = 300.0  # to import the function's file, which takes 5 s of CPU time for some packages
_STOP_SECONDS = 10.0  # for a warden to kill its worker and all that it started
_MOST_PROCESSES = 64  # that a worker may have started


class Failure(Exception):
    """The reason why a sample has no score."""


class Pool:
    """`workers` processes, each of which scores one sample at a time and is replaced when it dies or hangs."""

    def __init__(self, where, name, workers, timeout_seconds, memory_mb, network=False, kind="function"):
        """Starts the workers; `where` is a Python file or a module, which holds the function, or environment, `name`.

        Prints a warning where `network` is false and this machine cannot take a process off the network.

        Raises Failure: the function cannot be loaded.
        """
        self._workers = [_Worker(where, name, timeout_seconds, memory_mb, network, kind) for _ in range(workers)]
        self._threads, self._free = ThreadPoolExecutor(workers), SimpleQueue()  # a thread waits for each worker
        for worker in self._workers:
            self._free.put(worker)
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

    def submit(self, question: dict, before: Iterable[dict] = ()) -> Future:
        """What the worker answers to a question {name: value}; its result raises Failure where the call fails.

        As long as that is None, the worker is asked all that comes `before`, and then again, each within its own time.
        """
        return self._threads.submit(self._ask, question, before)

    def _ask(self, question: dict, before: Iterable[dict]) -> Any:
        worker = self._free.get()  # nobody else asks it meanwhile: it may keep an object from one question to the next
        try:
            answer = worker.ask(question)
            while answer is None:
                *_, answer = (worker.ask(each) for each in (*before, question))
            return answer
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends the workers and every process that they started; questions that have no answer fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()


class _Worker:
    def __init__(self, where, name, timeout_seconds, memory_mb, network, kind):
        # -P: the function cannot import the modules of this folder by accident. -B: bytecode would outlive an edit of
        # the function's file in the same second that leaves its size as it is.
        python = [sys.executable, "-P", *(["-B"] if where.endswith(".py") else [])]
        worker = [*python, str(_HERE / "worker.py"), where, name, str(memory_mb), str(int(network)), kind]
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

    def wait_until_ready(self):
        self.network = self._exchange(None, _START_SECONDS)["network"]

    def ask(self, question: dict) -> Any:
        if self._process is None:
            self.start()
            self.wait_until_ready()
        return self._exchange(question, self._timeout)["value"]

    def _exchange(self, question: dict | None, seconds: float) -> dict:
        """The next line, in answer to a question; a worker that gives no answer of its own in time is ended."""
        secret = secrets.token_hex(16)  # which the answer must repeat
        reply = self._next_line(json.dumps([secret, question]).encode() + b"\n", seconds)
        try:
            message = json.loads(reply.splitlines()[0]) if reply else {"dead": "its output was closed"}
        except ValueError:
            message = None
        if not isinstance(message, dict) or message.get("secret") != secret:  # of the warden, or of the function itself
            self.stop()
            reason = message.get("dead") if isinstance(message, dict) else None
            raise Failure(f"ended its process ({reason or 'it wrote to our pipe'})")
        if "error" in message:
            raise Failure(message["error"])
        return message

    def _next_line(self, question: bytes, seconds: float) -> bytes:
        """Writes a question, and reads to the end of a line or of the output; raises Failure when time is up."""
        stdin, stdout, deadline, reply = self._process.stdin, self._process.stdout, time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            selector.register(stdin, selectors.EVENT_WRITE)
            while not reply.endswith(b"\n"):
                ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline - time.monotonic()))]
                if not ready:
                    self.stop()
                    raise Failure(f"took longer than {seconds:g} s")
                if stdout in ready:
                    reply += (part := os.read(stdout.fileno(), 1 << 16))
                    if not part:
                        break
                elif stdin in ready:
                    try:
                        question = question[os.write(stdin.fileno(), question[: 1 << 16]) :]
                    except BrokenPipeError:
                        question = b""  # it died; its last line gives the reason
                    if not question:
                        selector.unregister(stdin)
        return reply

    def end(self):
        """Tells the process to end, if it runs, and its descendants."""
        if process := self._process:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # a warden that somebody has stopped would leave its worker behind

    def stop(self):
        """`end`, and waits until all have ended."""
        self.end()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()
        process.stdout.close()
