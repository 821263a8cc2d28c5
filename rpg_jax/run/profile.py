"""A trace of some steps of a run, for xprof: https://docs.jax.dev/en/latest/profiling.html."""

import re

import jax


def window(text: str | None, steps: int) -> range:
    """The RL steps that "START:STOP" names, as a slice of the `steps` of a run does; none for None.

    Raises ValueError for anything else.
    """
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or not int(match[1]) < int(match[2]) <= steps:
        raise ValueError(
            f"--profile={text}: expected START:STOP, the first RL step to trace and the one to stop before, "
            f"0 <= START < STOP <= {steps}, such as --profile={steps // 2}:{steps // 2 + 1}"
        )
    return range(int(match[1]), int(match[2]))


def traced(steps: range, window: range, folder):
    """Yields `steps`, each annotated with its number; writes a trace of those in `window` into `folder`.

    Every process of a job writes its own. A trace that is cut short, by `close()` too, is written as far as it came.
    """
    options, running = jax.profiler.ProfileOptions(), False
    options.python_tracer_level = 0  # Python's own calls would be most of the trace
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
