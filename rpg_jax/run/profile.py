"""A trace of some steps of a run, for xprof: https://docs.jax.dev/en/latest/profiling.html."""

import pathlib
import re
from collections.abc import Iterator

import jax

from rpg_jax import InputError


def window(text: str | None, steps: int) -> range:
    """The RL steps that --profile=START:STOP names, as a slice of a run's `steps` would; none if the flag is unset.

    Raises ValueError for other text.
    """
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not int(match[1]) < int(match[2]) <= steps:
        raise InputError(
            f"--profile={text}: expected START:STOP, the first RL step to trace and the one to stop before, "
            f"0 <= START < STOP <= {steps}, such as --profile={steps // 2}:{steps // 2 + 1}"
        )
    return range(int(match[1]), int(match[2]))


def traced(steps: range, window: range, folder: pathlib.Path) -> Iterator[int]:
    """Yields `steps`, each annotated with its number, and writes a trace of those in `window` into `folder`.

    Every process of a job writes its own trace. If the loop ends early, the trace is written as far as it came.
    """
    options, running = jax.profiler.ProfileOptions(), False
    options.python_tracer_level = 0  # calls of Python functions would fill most of the trace
    try:
        for step in steps:
            if step in window and not running:
                jax.profiler.start_trace(folder, profiler_options=options)
                running = True
            with jax.profiler.StepTraceAnnotation("rl_step", step_num=step):
                yield step
            if running and step + 1 not in window:
                jax.profiler.stop_trace()
                running = False
    finally:
        if running:
            jax.profiler.stop_trace()
