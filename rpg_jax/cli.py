"""The wrapper of every entry point: flags in; one line and an exit status out.

Exit statuses: 0 done, 2 the user's mistake (one line, no traceback), 75 preempted after saving, 1 anything else.
"""

import contextlib
import errno
import sys
import traceback

from absl import flags, logging

PREEMPTED = 75
_STORAGE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT)
_STATUSES = ("UNKNOWN: ", "INTERNAL: ", "UNAVAILABLE: ", "ABORTED: ", "CANCELLED: ", "DEADLINE_EXCEEDED: ")


class Mistake(Exception):
    """Something that the user can mend; its text is the one line that they see."""


@contextlib.contextmanager
def door():
    """Where user input enters: what a library raises about it inside becomes a `Mistake`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, OSError, SyntaxError) as error:
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


def fail(message: str):
    """Prints one line on stderr and leaves with the status of a user's mistake."""
    print(f"error: {message}", file=sys.stderr)
    leave(2)


def leave(status: int):
    """Exits. A process of a job that failed leaves without the others, who may never come to their end."""
    if status not in (0, PREEMPTED) and "jax" in sys.modules:
        from rpg_jax.parallel import multihost

        multihost.leave(status)
    sys.exit(status)


def _one_line(error) -> str:
    """Its text; of a traceback that ml_collections puts around what a config file raises, only what was raised."""
    if error.args and isinstance(error.args[0], KeyError):  # as ml_collections raises it
        return f"the config has no key {error.args[0].args[0]}, which a --config.KEY on the command line names"
    before, trace, after = str(error).partition("Error whilst parsing config file:")
    return " ".join((before + after.strip().splitlines()[-1] if trace else before).split())


def run(main, argv=None, arguments=False):
    """Parses absl flags, calls `main(argv) -> exit status or None`, and exits.

    Words that are no flags are refused unless `main` takes `arguments`.
    `--help` prints the docstring of main's module and its flags. A `Mistake`, a flag that does not parse, or a disk
    that is full or read-only ends in one line and status 2.
    """
    argv = list(sys.argv if argv is None else argv)
    logging.set_verbosity(logging.ERROR)
    module = sys.modules[main.__module__]
    if {"--help", "-h", "--helpfull"} & set(argv):
        print((module.__doc__ or "").strip(), flags.FLAGS.module_help(module), sep="\n")
        if "rpg_jax.job" in sys.modules:
            print(flags.FLAGS.module_help("rpg_jax.job"))
        sys.exit(0)
    try:
        rest = flags.FLAGS(argv)
        if rest[1:] and not arguments:
            raise flags.Error(f"unexpected argument {rest[1]!r}; options start with --")
    except (
        flags.Error,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        OSError,
        SyntaxError,
        ImportError,
    ) as error:
        fail(_one_line(error))
    try:
        status = main(rest)
    except Mistake as mistake:
        fail(str(mistake))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
            fail(f"{error.strerror}: {error.filename or 'while writing'}; what was saved before is intact")
        traceback.print_exc()
        status = 1
    leave(status or 0)
