"""Commands called in this process with what nobody should give them: bounds on time and memory, and what must be said.

Continuous integration tries a few seeded examples of each test. To try thousands, and to see how many were refused:

    FUZZ=50 launch/test.sh -n0 --hypothesis-show-statistics tests/test_fuzz_*.py [--hypothesis-seed=1]
"""

import contextlib
import copy
import importlib
import io
import json
import os
import resource
import signal
import sys
from unittest import mock

import hypothesis
import pyarrow
import pytest
from absl import flags
from hypothesis import strategies as st

from rpg_jax import InputError
from rpg_jax.run import cli

pyarrow.array(["x"])  # its allocator reserves a GiB at once, which is not the fault of a call under `bounded`
FACTOR = float(os.environ.get("FUZZ", "0.25"))  # times the examples that a test names; unset, in continuous integration
SECONDS, MEMORY = 60, 1 << 30  # of one call; bytes over what the process had before it


def budget(examples: int):
    """Decorates a test: it gets a quarter as many examples, always the same ones, or FUZZ times as many random ones."""
    return hypothesis.settings(
        max_examples=round(examples * FACTOR), derandomize="FUZZ" not in os.environ, database=None,
        print_blob="FUZZ" in os.environ, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip


NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**63, 10**30]),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")]),
    st.floats(),
)
WORDS = st.one_of(  # without slashes: a command may write where a word says
    st.sampled_from(["", " ", "0", "-1", "nan", "none", "None", "default", ".x", "\x00", "a\nb", "absent.py", "x:y"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/~."), max_size=12),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab_1", min_size=1), values, max_size=3),
    max_leaves=4,
)


class Hang(BaseException):
    """A call took longer than it may."""


@contextlib.contextmanager
def bounded(seconds: int):
    """Raises Hang after so many seconds; no more than MEMORY can be allocated in addition to what there is now."""
    with open("/proc/self/status") as status:
        data = next(int(line.split()[1]) for line in status if line.startswith("VmData")) << 10

    def hang(*_):
        raise Hang(f"took longer than {seconds} s")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    before = resource.getrlimit(resource.RLIMIT_DATA)
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def imported(command: str):
    """The module of a command as if no other had been imported here: commands share names of flags."""
    registry = {table: part for table, part in vars(flags.FLAGS).items() if isinstance(part, dict)}
    saved = {
        table: {key: value[:] if isinstance(value, list) else value for key, value in part.items()}
        for table, part in registry.items()
    }
    for module, owned in flags.FLAGS.flags_by_module_dict().items():
        for flag in [flag.name for flag in owned]:
            if module.startswith("rpg_jax.") or flag.startswith("config."):
                delattr(flags.FLAGS, flag)
    name = f"rpg_jax.{command}"
    package, _, own_name = name.rpartition(".")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, name, raising=False)
        patch.setattr(importlib.import_module(package), own_name, None, raising=False)
        try:
            yield importlib.import_module(name)
        finally:
            sys.modules.pop(name, None)  # its flags go, so nobody else may take it for imported
            for table, part in registry.items():
                part.clear()
                part.update(saved[table])


def outcome(command: str, *arguments: str) -> tuple[int, str, str]:
    """(Exit status, stdout, stderr) of `python -m rpg_jax.COMMAND ARGUMENTS`, in this process."""
    out, err, argv = io.StringIO(), io.StringIO(), [command, *arguments]
    with imported(command) as module, pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        patch.setattr(sys, "argv", argv)  # where ml_collections looks for --config.KEY
        patch.setattr(sys, "path", sys.path[:])
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out), pytest.raises(SystemExit) as left:
            cli.run(module.main, argv, arguments=command in ("report", "sweep"))  # as their last lines do
    return left.value.code, out.getvalue(), err.getvalue()


def call(command: str, *arguments: str, seconds: int = SECONDS) -> tuple[int, str]:
    """(Exit status, what it said on stderr in its one line) of what `outcome` runs.

    Fails unless the status is 0 or 2, and 2 goes with one line and no traceback, within the bounds on time and memory.
    """
    with bounded(seconds):
        status, _, said = outcome(command, *arguments)
    complaints = [line for line in said.split("\n") if line.startswith("error: ")]
    assert "Traceback" not in said and status in (0, 2), f"{command} {arguments}: status {status}\n{said}"
    assert len(complaints) == (status == 2), f"{command} {arguments}\n{said}"
    if hypothesis.currently_in_test_context():
        hypothesis.event("refused" if status and complaints != ["error: accepted"] else "accepted")
    return status, "".join(complaints)


def begin(*_, **__):
    """In place of what is expensive: input that comes so far was accepted."""
    raise InputError("accepted")


@st.composite
def damaged_bytes(draw, data: bytes):
    """Bytes cut, changed, lengthened or announced to be huge, at one place or a few."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        kind = draw(st.sampled_from(["cut", "flip", "huge", "insert", "remove", "repeat"]))
        huge = draw(st.sampled_from([2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 2**40]))
        new, skipped = {
            "cut": (b"", len(data)), "flip": (draw(st.binary(min_size=1, max_size=1)), 1), "remove": (b"", 32),
            "huge": (huge.to_bytes(8, "little"), 8), "insert": (draw(st.binary(max_size=9)), 0),
            "repeat": (data[at // 2 : at], 0),
        }[kind]  # fmt: skip
        data = data[:at] + new + data[at + skipped :]
    return data


def places(value, path=()):
    """The paths of everything inside JSON's objects and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


@st.composite
def damaged_json(draw, value):
    """JSON's values with one to three of them replaced, removed or moved elsewhere; as text."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(places(value))
        if not paths:
            break
        *above, last = draw(st.sampled_from(paths))
        inside = value
        for key in above:
            inside = inside[key]
        if draw(st.integers(0, 3)):
            inside[last] = draw(VALUES)
        else:
            del inside[last]
    return json.dumps(value)
