"""The wrapper of every entry point: flags in; one line and an exit status out.

Exit statuses: 0 done, 2 the user's mistake (an `InputError`: one line), 75 preempted after saving, 141 nobody reads its
output any more, 1 anything else: a bug of somebody's code, with its traceback.
"""

import contextlib
import difflib
import functools
import inspect
import itertools
import math
import os
import pathlib
import re
import runpy
import select
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable

from absl import flags, logging
from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from rpg_jax import InputError, lacking
from rpg_jax.run import compiler
from rpg_jax.storage.disk import storage_errno
from rpg_jax.storage.settings import flatten

PREEMPTED = 75
flags.disclaim_key_flags()  # what is defined here belongs to the module that calls


def define_objective() -> None:
    """The flags that name a function of the user's own, and what it is held against."""
    flags.DEFINE_string("objective", None, "FILE.py:NAME of a function to examine instead of the built-in ones")
    flags.DEFINE_string("divergence", None, "with --objective: the divergence of its target; default none")
    flags.DEFINE_float("beta", None, "with --objective: its coefficient; default 0")
    flags.DEFINE_string("level", None, "with --objective: token or sequence; default token")
    flags.DEFINE_string("declares", None, "with --objective: what it claims to be; with a comma, on and off policy")


def stop_event() -> threading.Event:
    """An event that SIGTERM and the first SIGINT set, which the first process says; a second SIGINT ends the process at
    once."""
    stop, is_first = threading.Event(), os.environ.get("JAX_PROCESS_ID", "0") == "0"

    def told(number, _):
        if is_first and not stop.is_set():  # not with print, which may be what the signal interrupts
            os.write(2, b"\n" * os.isatty(2) + b"stopping after saving; Ctrl-C again ends at once\n")
        stop.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    return stop


def names_of(file: str, title: str) -> dict:
    """What a user's Python file defines; `title` says who names it. What the file raises stays as it is."""
    path = pathlib.Path(file)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], 1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise InputError(f"{title}: there is no file {file}{hint}")
    return runpy.run_path(file)


def read_config(spec: str, title: str) -> ConfigDict:
    """The config of FILE.py or FILE.py:VARIANT, which is an argument of its `get_config`."""
    file, colon, variant = spec.partition(":")
    make, words = names_of(file, title).get("get_config"), [variant] if colon else []
    try:
        inspect.signature(make).bind(*words)
    except TypeError as error:
        if make is None:
            raise InputError(f"{title}: the file has no get_config; name the file of an experiment") from None
        raise InputError(f"{title}: get_config does not take {variant or 'no variant'!r}: {error}") from None
    config = make(*words)
    if not isinstance(config, ConfigDict):
        raise InputError(f"{title}: get_config returns a {type(config).__name__}; expected a ConfigDict")
    return config


# Sections of a config whose keys are the user's. So are those of `objective` where its name is FILE.py:NAME.
OPEN = ("data.tasks", "data.template_options", "reward.weights")


def is_open(section: str, objective: str | None) -> bool:
    """Whether a section may be given keys that the config lacks, where `objective.name` is `objective`."""
    return section in OPEN or (section == "objective" and ":" in str(objective))


def _check_config(given: dict[str, str]) -> None:
    """Raises InputError for a config file that is none, or a --config.KEY that it may not have; the flags take any."""
    overrides = {name.removeprefix("config."): value for name, value in given.items() if name.startswith("config.")}
    settings = _plain(read_config(given["config"], f"--config={given['config']}"))
    objective = overrides.get("objective.name", flatten(settings).get("objective.name"))
    for key in overrides:
        parts, section, level, users = key.split("."), [], settings, False
        for part in parts:
            users = users or is_open(".".join(section), objective)
            if users and isinstance(level, dict) and len(section) == len(parts) - 1:
                break
            if not isinstance(level, dict) or part not in level:
                near = difflib.get_close_matches(key, flatten(settings), 3)
                there = f"near ones: {', '.join(near)}" if near else f"there are: {', '.join(level)}"
                place = f" in {'.'.join(section)}" if section else ""
                raise InputError(f"--config.{key}: the config has no key {part!r}{place}; {there}")
            section, level = [*section, part], level[part]


def _plain(config: ConfigDict) -> dict:
    """A config as dicts, with None where a key lacks its value."""
    plain = {}
    for key in config:
        value = None
        with contextlib.suppress(RequiredValueError):
            value = config[key]
        plain[key] = _plain(value) if isinstance(value, ConfigDict) else value
    return plain


def _given(words: list[str]) -> dict[str, str]:
    """The flags among words as text; the last of each name."""
    given = {}
    for word, after in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            given[name.lstrip("-")] = value if equals else after
    return given


MAY_BE_EMPTY = ("solution_field",)  # prepare then reads no worked solutions


def _check_values(given: list[flags.Flag]) -> None:
    """Raises InputError for a flag without a value, such as --workdir=, and for one that is not a finite number."""
    for flag in given:
        if flag.value in ("", []) and flag.name not in MAY_BE_EMPTY:
            raise InputError(f"--{flag.name} is empty; give it a value, or leave it out: {flag.help}")
        if isinstance(flag.value, float) and not math.isfinite(flag.value):
            raise InputError(f"--{flag.name}={flag.value} is not a finite number: {flag.help}")


def run(main: Callable, argv: list[str] | None = None, *, arguments: bool = False, leave: Callable = sys.exit):
    """Parses the flags of main's module, calls `main(options) -> exit status or None`, and leaves with the status.

    `options` has the value of every flag under its name, the words that are no flags as `arguments` (refused unless
    `arguments` is true), and as `given` the names of the flags that were on the command line. `--help` prints the
    docstring of main's module and its flags. An `InputError`, a flag that does not parse, a file that is no Python, and
    a full or read-only disk end in one line and status 2. `leave(status)` ends the process; training in many processes
    has its own.
    """
    status = _piped(functools.partial(_status, main, list(sys.argv if argv is None else argv), arguments))
    if status in (0, PREEMPTED):
        sys.exit(status)
    leave(status)


def _status(main, argv: list[str], arguments: bool) -> int:
    logging.set_verbosity(logging.ERROR)
    os.environ.update(compiler.libtpu_arguments(os.environ))  # before JAX looks for devices
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name; JAX refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")  # of a GPU's memory, in place of three quarters
    module = sys.modules[main.__module__]
    if {"--help", "-h", "--helpfull"} & set(argv):
        given = flags.FLAGS.module_help(module).replace(f"{module.__name__}:", "Flags:", 1)
        print((module.__doc__ or "").strip(), given, sep="\n")
        return 0
    try:
        options = _parsed(argv, module, arguments)
    except (InputError, SyntaxError) as error:
        return _refused(error)
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # of rpg_jax/__init__.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(options) or 0
    except (InputError, SyntaxError) as error:
        return _refused(error)
    except KeyboardInterrupt:
        print("interrupted before there was anything to save", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        raise
    except Exception as error:
        if line := lacking(error):
            return _refused(line)
        if code := storage_errno(error, causes=False):
            where = getattr(error, "filename", None) or "while writing"
            return _refused(f"{os.strerror(code)}: {where}; what was saved before is intact")
        traceback.print_exc()
        return 1


def _piped(command: Callable[[], int]) -> int:
    """The status of a command whose output is written by then: 128 + SIGPIPE, and silence, where nobody reads it any
    more, as behind `| head`."""
    try:
        status = command()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        return status
    except BrokenPipeError:
        left = [stream for stream in (sys.stdout, sys.stderr) if stream and _is_left(stream)]
        for stream in left:  # what it still holds would be an error at the end of the process
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if left:
            return 128 + signal.SIGPIPE
        traceback.print_exc()
        return 1


def _is_left(stream) -> bool:
    poll = select.poll()
    try:
        poll.register(stream, 0)
    except (OSError, ValueError):  # no file of the system's
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def need(options, **flags: str) -> None:
    """Raises InputError unless all of these flags are given, each with its form; before anything slow is imported."""
    if not all(getattr(options, name) for name in flags):
        forms = " and ".join(f"--{name}={form}" for name, form in flags.items())
        raise InputError(f"{forms} are needed; see --help")


def _parsed(argv: list[str], module: types.ModuleType, arguments: bool) -> types.SimpleNamespace:
    """The options of a command, from its flags; raises InputError for words that are none."""
    try:
        words = flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=True)
    except flags.Error as error:  # a --flagfile
        raise InputError(error) from None
    joined: list[str] = []
    for word in words:  # a shell expands ~ at the beginning of a word alone
        word = re.sub(r"(?<=[=,])~[^/,]*", lambda home: os.path.expanduser(home[0]), word)
        if not word and joined and joined[-1].startswith("--config.") and "=" not in joined[-1]:
            joined[-1] += "="  # --config.KEY '' in two words
        else:
            joined.append(word)
    given, emptied = _given(joined), list[str]()
    _find_configs(joined)
    if "config" in flags.FLAGS and given.get("config"):
        _check_config(given)
        emptied = [word for word in joined if re.fullmatch(r"--config\.[^=]*=", word)]
    try:
        words = flags.FLAGS([argv[0], *(word for word in joined if word not in emptied)])[1:]
    except (flags.Error, ValueError, TypeError, LookupError, AttributeError) as error:  # of ml_collections
        raise InputError(error) from None
    own = flags.FLAGS.get_key_flags_for_module(module)
    _check_values([flag for flag in own if flag.present])
    if words and not arguments:
        raise InputError(f"unexpected argument {words[0]!r}; options start with --")
    options = types.SimpleNamespace(**{flag.name: flag.value for flag in own})
    options.arguments, options.given = words, {flag.name for flag in own if flag.present}
    for name in (word[2:-1] for word in emptied):
        if not given[name]:
            unset(options.config, name.removeprefix("config."))
    return options


def unset(config: ConfigDict, key: str) -> None:
    """Takes the value of a key away, as --config.SECTION.KEY= does; a list is then empty."""
    *sections, name = key.split(".")
    section = functools.reduce(ConfigDict.__getitem__, sections, config)
    section[name] = () if isinstance(_plain(section).get(name), tuple) else None


def _find_configs(argv: list[str]) -> None:
    """Lets a config that is named by its path import its neighbours as `configs.NAME`, from whatever folder."""
    for word in argv:
        file = pathlib.Path(word.removeprefix("--config=").partition(":")[0]).absolute()
        if file.suffix == ".py":
            sys.path += [str(folder.parent) for folder in file.parents if folder.name == "configs"]


def _refused(error: Exception | str) -> int:
    """Prints one line on stderr; the status of a user's mistake."""
    if isinstance(error, SyntaxError):
        error = f"{error.filename}, line {error.lineno}: {error.msg}"
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
