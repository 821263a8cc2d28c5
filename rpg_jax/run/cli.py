"""The wrapper of every entry point: flags in; one line and an exit status out.

Exit statuses: 0 done, 2 the user's mistake (one line, no traceback), 75 preempted after saving, 1 anything else.
"""

import contextlib
import difflib
import errno
import itertools
import math
import os
import pathlib
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable

from absl import flags, logging
from ml_collections.config_dict import RequiredValueError

from rpg_jax import lacking
from rpg_jax.run import compiler
from rpg_jax.storage.settings import flatten

PREEMPTED = 75
_STORAGE_ERRORS = (
    errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE,
    errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT,
)  # fmt: skip
_INPUT_ERRORS = (  # what libraries raise about input that makes no sense
    ValueError, TypeError, LookupError, AttributeError, ImportError, OSError, SyntaxError, ArithmeticError, flags.Error,
    RequiredValueError,
)  # fmt: skip
_STATUSES = ("UNKNOWN: ", "INTERNAL: ", "UNAVAILABLE: ", "ABORTED: ", "CANCELLED: ", "DEADLINE_EXCEEDED: ")


def stop_event() -> threading.Event:
    """An event that SIGTERM and the first SIGINT set; a second SIGINT ends the process at once."""
    stop = threading.Event()

    def interrupted(number, _):
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, interrupted)
    return stop


class Mistake(Exception):
    """Something that the user can mend; its text is the one line that they see."""


@contextlib.contextmanager
def door():
    """Where user input enters: what a library raises about it inside becomes a `Mistake`."""
    try:
        yield
    except _INPUT_ERRORS as error:
        if _is_of_xla(error):
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise Mistake(" ".join(str(text).split())) from error


@contextlib.contextmanager
def in_words():
    """Where a run may find that it cannot go on: what it says of that becomes a `Mistake`; JAX's own errors stay."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if _is_of_xla(error):
            raise
        raise Mistake(" ".join(str(error).split())) from error


def _is_of_xla(error) -> bool:
    """Whether XLA raised it; of a lost process it tells in a ValueError, too."""
    return type(error).__name__ == "JaxRuntimeError" or str(error).startswith(_STATUSES)


def _is_of_storage(error) -> bool:
    """Whether a disk is full, read-only or broken, or a file on it is not what it should be."""
    return _disk_error(error) is not None or (isinstance(error, OSError) and error.errno in _STORAGE_ERRORS)


def _disk_error(error) -> str | None:
    """What is wrong with a disk that takes no more, as libraries in C++ mention it in their own errors."""
    reasons = map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))
    return next((reason for reason in reasons if reason.lower() in str(error).lower()), None)


def _silence_full_disks() -> None:
    """Threads and destructors say nothing of a full disk: they would print tracebacks around the line of the run."""
    of_threads, of_destructors = threading.excepthook, sys.unraisablehook

    def unless_of_storage(hook):
        return lambda failure: None if _is_of_storage(failure.exc_value) else hook(failure)

    threading.excepthook, sys.unraisablehook = map(unless_of_storage, (of_threads, of_destructors))


def _one_line(error) -> str:
    """Its text; of a traceback that ml_collections puts around what a config file raises, only what was raised."""
    if not isinstance(error, _INPUT_ERRORS):
        return f"the config file raises {type(error).__name__}: {' '.join(str(error).split())}"
    before, trace, after = str(error).partition("Error whilst parsing config file:")
    return " ".join((before + after.strip().splitlines()[-1] if trace else before).split())


# Sections of a config whose keys are the user's. So are those of `objective` where its name is FILE.py:NAME.
OPEN = ("data.tasks", "data.template_options", "reward.weights")


def is_open(section: str, objective: str | None) -> bool:
    """Whether a section may be given keys that the config lacks, where `objective.name` is `objective`."""
    return section in OPEN or (section == "objective" and ":" in str(objective))


def _unknown_key(argv: list[str]) -> str | None:
    """A line about the first --config.KEY that the config may not have, with keys that are near; the flags take any."""
    given = _given(argv)
    overrides = {name.removeprefix("config."): value for name, value in given.items() if name.startswith("config.")}
    file = given.get("config")
    if not overrides or file is None:
        return None
    settings = {}
    with contextlib.suppress(Exception):  # the config file itself may be what cannot be read
        settings = flags.FLAGS["config"].parser.parse(file).to_dict()
    objective = overrides.get("objective.name", flatten(settings).get("objective.name"))
    for key in overrides if settings else ():
        parts, section, level, users = key.split("."), [], settings, False
        for part in parts:
            users = users or is_open(".".join(section), objective)
            if users and isinstance(level, dict) and len(section) == len(parts) - 1:
                break
            if not isinstance(level, dict) or part not in level:
                near = difflib.get_close_matches(key, flatten(settings), 3)
                there = f"near ones: {', '.join(near)}" if near else f"there are: {', '.join(level)}"
                place = f" in {'.'.join(section)}" if section else ""
                return f"--config.{key}: the config has no key {part!r}{place}; {there}"
            section, level = [*section, part], level[part]
    return None


def _given(argv: list[str]) -> dict[str, str]:
    """The flags of a command line, and of its --flagfile, as text; the last of each name."""
    words = flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=True)
    given = {}
    for word, after in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            given[name.lstrip("-")] = value if equals else after
    return given


MAY_BE_EMPTY = ("solution_field",)  # prepare then reads no worked solutions


def _check_values(given: list[flags.Flag]) -> None:
    """Raises flags.Error for a flag without a value, such as --workdir=, and for one that is not a finite number."""
    for flag in given:
        if flag.value in ("", []) and flag.name not in MAY_BE_EMPTY:
            raise flags.Error(f"--{flag.name} is empty; give it a value, or leave it out: {flag.help}")
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise flags.Error(f"--{flag.name}={flag.value} is not a finite number: {flag.help}")


def run(main: Callable, argv: list[str] | None = None, *, arguments: bool = False, leave: Callable = sys.exit):
    """Parses the flags of main's module, calls `main(options) -> exit status or None`, and leaves with the status.

    `options` has the value of every flag under its name, the words that are no flags as `arguments` (refused unless
    `arguments` is true), and as `given` the names of the flags that were on the command line. `--help` prints the
    docstring of main's module and its flags. A `Mistake`, a flag that does not parse, or a disk that is full, read-only
    or lacks a file ends in one line and status 2. `leave(status)` ends the process; training in many processes has its
    own.
    """
    argv = list(sys.argv if argv is None else argv)
    _silence_full_disks()
    logging.set_verbosity(logging.ERROR)
    os.environ.update(compiler.libtpu_arguments(os.environ))  # before JAX looks for devices
    module = sys.modules[main.__module__]
    if {"--help", "-h", "--helpfull"} & set(argv):
        print((module.__doc__ or "").strip(), flags.FLAGS.module_help(module), sep="\n")
        sys.exit(0)
    try:
        _find_configs(argv)
        if unknown := _unknown_key(argv):
            raise flags.Error(unknown)
        words = flags.FLAGS(argv)[1:]
        own = flags.FLAGS.get_key_flags_for_module(module)
        _check_values([flag for flag in own if flag.present])
        if words and not arguments:
            raise flags.Error(f"unexpected argument {words[0]!r}; options start with --")
    except Exception as error:  # a config file is Python, and may raise anything
        sys.exit(_refused(_one_line(error)))
    options = types.SimpleNamespace(**{flag.name: flag.value for flag in own})
    options.arguments, options.given = words, {flag.name for flag in own if flag.present}
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of rpg_jax/__init__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main(options) or 0
    except Mistake as mistake:
        status = _refused(str(mistake))
    except KeyboardInterrupt:
        print("interrupted before there was anything to save", file=sys.stderr)
        status = 128 + signal.SIGINT
    except Exception as error:
        if line := lacking(error):
            sys.exit(_refused(line))
        if _is_of_storage(error):
            threading.excepthook = sys.unraisablehook = lambda failure: None  # of what the error has left half done
            reason = getattr(error, "strerror", None) or _disk_error(error) or str(error)
            where = getattr(error, "filename", None) or "while writing"
            status = _refused(f"{reason}: {where}; what was saved before is intact")
        else:
            traceback.print_exc()
            status = 1
    if status in (0, PREEMPTED):
        sys.exit(status)
    leave(status)


def _find_configs(argv: list[str]) -> None:
    """Lets a config that is named by its path import its neighbours as `configs.NAME`, from whatever folder."""
    for word in argv:
        file = pathlib.Path(word.removeprefix("--config=").partition(":")[0]).absolute()
        if file.suffix == ".py":
            sys.path += [str(folder.parent) for folder in file.parents if folder.name == "configs"]


def _refused(message: str) -> int:
    """Prints one line on stderr; the status of a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    return 2
