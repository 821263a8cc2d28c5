"""The phases of a run: names in a trace, wall time, what XLA compiled, and what to lower when memory runs out."""

import contextlib
import sys
import time
from collections.abc import Iterator

import jax
from tqdm import tqdm

from rpg_jax import InputError
from rpg_jax.parallel import multihost

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event, one for each program
SHARD = "spread it over more devices (mesh.fsdp)"
# What to do, for each phase, when the device's memory is too small for it.
REMEDIES = {
    "state": SHARD,
    "warm start": "lower warm_start.microbatch_rows or learner.logprob_chunk, or set model.remat=full",
    "reference": f"use reference.mode=iterative, which keeps no second policy, or {SHARD}",
    "rollout": "lower rollout.slots",
    "experience": "lower learner.scoring_rows (unset: learner.microbatch_rows) or learner.logprob_chunk",
    "update": "lower learner.microbatch_rows or learner.logprob_chunk, or set model.remat=full",
    "evaluation": "lower rollout.slots (--slots of evaluate)",
}
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "Out of memory"  # the latter of a program that the CPU client had under way
COMPILING = {"evaluation", "rollout", "experience", "update"}  # that begin with it, and have not begun in this process


def say(text: str) -> None:
    """Prints a line on the first process's stderr, above the progress bars there."""
    if multihost.is_first():
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


class OutOfMemory(InputError):
    """A device's memory was too small for a phase; says which, and what to lower."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Runs a phase, one of `REMEDIES`, under its name in a trace; JAX's out-of-memory error becomes `OutOfMemory`.

    The first one of a process says that it compiles.

    Programs run asynchronously, so wait for their results inside.
    """
    if name in COMPILING:
        COMPILING.remove(name)
        say(f"compiling: {name}")
    try:
        with jax.profiler.TraceAnnotation(name):
            yield
    except jax.errors.JaxRuntimeError as error:
        if not any(text in str(error) for text in OUT_OF_MEMORY):
            raise
        reason = " ".join(str(error).splitlines()[0].split())[:200].rstrip(" .")
        raise OutOfMemory(
            f"out of memory in phase {name!r} ({reason}): {REMEDIES[name]}; "
            f"python -m rpg_jax.plan says what each phase takes"
        ) from error


class Clock:
    """Wall time of the phases of a step, under `time/<name>`."""

    def __init__(self, **seconds: float):
        self.seconds, self._mark = dict(seconds), time.perf_counter()

    def lap(self, name: str) -> None:
        """Adds the time since the last lap, or since the start, to a phase."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now


class CompilationCounter:
    """`count` grows by one for every program compiled since it was made."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.count += event == COMPILED
