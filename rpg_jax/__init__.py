"""RPG-JAX: Regularized Policy Gradient (Zhang et al., arXiv 2505.17508) in JAX."""

import signal
import sys

__version__ = "0.2.0"


class InputError(ValueError):
    """What a user can mend. A command says its text in one line; any other error is a bug and shows its traceback."""


def lacking(error: BaseException) -> str | None:
    """A line about a package that a module of ours imports at its top and that is not installed; else None."""
    if not isinstance(error, ModuleNotFoundError) or not error.name or error.name.split(".")[0] == __name__:
        return None
    trace = error.__traceback__
    while trace:
        frame = trace.tb_frame
        if frame.f_code.co_name == "<module>" and str(frame.f_globals.get("__package__")).split(".")[0] == __name__:
            return f'the package {error.name} is not installed: pip install ".[train]" brings what the commands need'
        trace = trace.tb_next
    return None


def _hook(kind, error, trace) -> None:
    if line := lacking(error):
        print(f"error: {line}", file=sys.stderr)
        raise SystemExit(2)
    sys.__excepthook__(kind, error, trace)


# `python -m rpg_jax.COMMAND` imports. Until `run.cli` takes over, Ctrl-C ends it without a traceback, and a package
# that is not installed is named in a line.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _hook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores it in what runs behind
        signal.signal(signal.SIGINT, signal.SIG_DFL)
