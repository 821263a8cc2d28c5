"""Ends a job that makes no progress, and prints what its threads were doing. A pod is paid for even while it hangs."""

import faulthandler
import os
import sys
import threading
import time

import jax

from rpg_jax.training.phases import COMPILED

GRACE_SECONDS = 10  # then the process is ended from C, in case a library holds the interpreter's lock
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


class Watchdog:
    """Ends the process with status 1 when `tick` was not called for `seconds`; 0 turns it off. A context manager.

    The time that XLA takes to compile does not count.
    """

    def __init__(self, seconds: float):
        self._seconds, self._closed = seconds, threading.Event()
        self._last, self._compiling = time.monotonic(), set()  # the threads that compile

    def tick(self) -> None:
        """Progress was made."""
        self._last = time.monotonic()
        self._compiling.discard(threading.get_ident())
        if self._seconds and not self._compiling and not self._closed.is_set():
            faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__)

    def __enter__(self):
        if self._seconds:
            jax.monitoring.register_event_duration_secs_listener(self._listen)
            self.tick()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def _listen(self, event, _seconds, **_):
        if event == _LOWERED and not self._closed.is_set():  # XLA compiles the program next
            self._compiling.add(threading.get_ident())
            faulthandler.cancel_dump_traceback_later()
        elif event == COMPILED:
            self.tick()

    def _watch(self):
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            silent = time.monotonic() - self._last
            if silent > self._seconds and not self._compiling:
                print(
                    f"error: no progress for {silent:.0f} s, more than --watchdog_seconds={self._seconds:g}: the job "
                    f"hangs, or needs a larger value; what each thread was doing:",
                    file=sys.stderr,
                    flush=True,
                )
                faulthandler.dump_traceback(sys.__stderr__)
                os._exit(1)
