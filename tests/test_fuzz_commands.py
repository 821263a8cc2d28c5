"""Command lines that nobody should write: status 2 and a line that names a flag or a file, before any work begins."""

import functools
import json
import pathlib

import hypothesis
import pytest
from fuzzing import NUMBERS, WORDS, begin, budget, call, imported
from hypothesis import strategies as st
from test_architecture import COMMANDS

from rpg_jax.lab import verification
from rpg_jax.lab.planning import command as planning
from rpg_jax.lab.sweeping import command as sweeping
from rpg_jax.lab.sweeping import warm_starts
from rpg_jax.lab.tradeoff import command as tradeoff
from rpg_jax.run import evaluate, train

ROOT = pathlib.Path(__file__).parent.parent
FILES = {
    "rows.jsonl": '{"problem": "1+1", "answer": 2}\n', "config.json": "[]", "not_python.py": "def f(:",
    "sweep.py": "CONFIG, SEEDS, VARIANTS = 3, 'x', [1]", "file.gguf": "GGUF" + 40 * "x", "empty.parquet": "",
}  # fmt: skip
WORK = [  # what is expensive, or does not end; in its place the line is "accepted"
    (train, "train"), (evaluate, "evaluate"), (planning, "plan_in_process"), (planning, "plan"),
    (verification, "find"), (tradeoff.measure, "_situations"), (sweeping, "Pool"), (warm_starts, "prepare"),
    (warm_starts, "train_in_process"),
]  # fmt: skip
ARGUMENTS = [*FILES, "folder", f"{ROOT}/configs/quickstart.py", f"{ROOT}/configs/quickstart.py:smoke"]
ARGUMENTS += [f"{ROOT}/configs/sweeps/small.py", f"{ROOT}/tests/data/my_objective.py:f", "gym:chain_sum(size=-1)"]
ARGUMENTS += ["gym:(", "best", "v5p:2x2x4", "h100:8", "1:2", "2:1", "0,1", "lognormal:1", "fkl", "dapo"]
VALUE = st.one_of(st.sampled_from(ARGUMENTS), NUMBERS.map(str), WORDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("commands")
        patch.chdir(folder)
        for module, name in WORK:
            patch.setattr(module, name, begin)
        for name, text in FILES.items():
            (folder / name).write_text(text)
        (folder / "folder").mkdir()
        (folder / "folder" / "metrics.jsonl").write_text(json.dumps({"step": "x"}) + "\n[]\nnull\n")
        yield folder


@functools.cache
def flags_of(command):
    """{name: whether it is a switch} of a command's flags, but for that which asks the network who else is there."""
    from absl import flags

    with imported(command) as module:
        own = flags.FLAGS.get_key_flags_for_module(module)
        return {flag.name: flag.boolean for flag in own if flag.name != "multihost"}


@st.composite
def command_line(draw, command):
    """Some of the command's flags with some values, perhaps a flag that does not exist, perhaps words."""
    flags = flags_of(command)
    words = []
    for name in draw(st.lists(st.sampled_from(sorted(flags)), max_size=5, unique=True)):
        words.append(f"--{name}" if flags[name] and draw(st.booleans()) else f"--{name}={draw(VALUE)}")
    if draw(st.integers(0, 3)) == 0:
        words.append(draw(st.one_of(VALUE, WORDS.map("--x{}".format), VALUE.map("--config.steps={}".format))))
    return words


@pytest.mark.parametrize("command", sorted(COMMANDS))
@budget(10)
@hypothesis.given(data=st.data())
def test_a_command_line_is_refused_by_a_line_or_begins(folder, command, data):
    words = data.draw(command_line(command))
    if "\0" not in "".join(words):  # the system passes on no such argument
        status, line = call(command, *words)
        parts = [part for word in words for part in word.lstrip("-").split("=", 1)]
        given = [text for part in parts for text in (" ".join(part.split()), repr(part)) if text]
        offenders = [*flags_of(command), "--help", *given]
        assert not status or line == "error: accepted" or any(name in line for name in offenders), f"{words}: {line}"
