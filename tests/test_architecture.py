"""Imports point downward only (docs/architecture.md), read from the source of every module, functions included."""

import ast
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from rpg_jax import __main__ as listing

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rpg_jax"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in [*PACKAGE.rglob("*.py"), *ROOT.glob("configs/**/*.py")])
LONGEST = 400  # lines of a file

# Folder (or module) -> what of rpg_jax it may import beside itself.
MATHEMATICS = {"objectives", "types"}
STEP = MATHEMATICS | {"models", "parallel", "sampling", "data", "rewards", "environments", "gym", "answer"}
FLOORS = {
    "types": set(),
    "objectives": {"types"},
    "gym": set(),
    "answer": set(),
    "rewards": {"gym", "answer"},  # runs in worker processes, which must not load jax
    "environments": {"rewards", "gym", "answer"},  # in worker processes, too
    "exact": {"objectives"},
    "models": MATHEMATICS,
    "parallel": MATHEMATICS,
    "data": MATHEMATICS | {"gym", "answer"},
    "sampling": MATHEMATICS | {"models", "parallel"},
    "training": STEP,
    "storage": STEP | {"training", "configs"},
    "run": STEP | {"training", "storage", "exact", "lacking", "configs"},  # lacking is of __init__.py
    "lab": STEP | {"training", "storage", "exact", "run"},
}
# Commands may import every floor, in functions: flags are parsed before anything slow is imported.
COMMANDS = {"train", "evaluate", "verify", "prepare", "convert", "plan", "sweep", "report", "tradeoff", "look"}
FLAGS = {"absl", "ml_collections"}  # of the floors that read configs and of commands only
# Installed only where they are used, or slow to import and used by few calls: imported where they are used.
OPTIONAL = {"jax.experimental", "math_verify", "matplotlib", "pyarrow", "tensorboardX", "tensorflow_datasets"}
OPTIONAL |= {"gguf", "reasoning_gym", "textarena", "tokenizers", "wandb"}


def imports(module: str, source: str, inside_functions=False) -> set[str]:
    """Absolute dotted names of everything that a module imports, or of what its functions import."""
    package = module.removesuffix(".py").split("/")[:-1]
    tree, names = ast.parse(source), set()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    for node in (inner for top in functions for inner in ast.walk(top)) if inside_functions else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def faults(module: str, source: str) -> list[str]:
    """The imports of a module that its floor forbids."""
    names = imports(module, source) - {"rpg_jax.InputError"}  # every floor raises it
    top, _, rest = module.removesuffix(".py").partition("/")
    ours = {name for name in names if name.split(".")[0] in ("rpg_jax", "configs")}
    others = {name: name.split(".")[0] for name in names - ours}
    if top == "configs":
        allowed = {"rpg_jax.gym"}  # stands on nothing
        return sorted(ours - allowed - {name for name in ours if name.startswith("configs")}) + sorted(
            name for name, root in others.items() if root not in {"ml_collections"} | sys.stdlib_module_names
        )
    floor = rest.split("/")[0]
    if floor in COMMANDS:
        allowed = {*FLOORS, "configs", floor}
    else:
        allowed = FLOORS.get(floor, set()) | {floor}
    bad = {name for name in ours if (name.split(".") + [""])[name.startswith("rpg_jax")] not in allowed}
    if floor in FLOORS and floor not in ("storage", "run", "lab"):
        bad |= {name for name, root in others.items() if root in FLAGS}
    if floor in ("objectives", "types"):
        bad |= {name for name, root in others.items() if root not in {"jax"} | sys.stdlib_module_names}
    if floor in ("rewards", "environments"):
        bad |= {name for name, root in others.items() if root in {"jax", "jaxlib", "flax", "optax"}}
    lazy = imports(module, source, inside_functions=True) if floor not in COMMANDS else set()
    return sorted(bad | {name for name in lazy if not any(f"{name}.".startswith(f"{one}.") for one in OPTIONAL)})


@pytest.mark.parametrize("module", MODULES)
def test_a_module_keeps_the_rules(module):
    """Its imports point downward, only commands define flags, what is checked of an input raises an `InputError`, as
    `rpg_jax.run.cli` takes other errors for bugs, and files stay short."""
    source = (ROOT / module).read_text()
    nodes = list(ast.walk(ast.parse(source)))
    assert not faults(module, source)
    is_command = module.removeprefix("rpg_jax/").removesuffix(".py").split("/")[0] in COMMANDS
    if not is_command and module != "rpg_jax/run/cli.py":  # whose functions the commands call
        assert not [node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("DEFINE_")]
    raised = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    assert "ValueError" not in {getattr(getattr(error, "func", error), "id", None) for error in raised}
    assert source.count("\n") <= LONGEST, f"a file of more than {LONGEST} lines is for splitting"


def test_every_module_has_a_floor():
    tops = {module.removeprefix("rpg_jax/").split("/")[0].removesuffix(".py") for module in MODULES}
    assert tops - {"configs", "__init__", "__main__"} == FLOORS.keys() | COMMANDS


PARSED = """
import contextlib, io, sys
import rpg_jax.{command} as command
from rpg_jax.run import cli
statuses = []
for words in (["--help"], ["--sedd=3"]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            cli.run(command.main, ["{command}", *words])
        except SystemExit as left:
            statuses.append(left.code)
slow = {{"jax", "numpy", "pandas", "orbax", "tensorflow_datasets", "matplotlib", "pyarrow"}} & {{*sys.modules}}
print(statuses, slow, errors.getvalue().startswith("error: Unknown command line flag 'sedd'"))
"""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_and_a_mistyped_flag_are_answered_before_anything_slow_is_imported(command):
    code = PARSED.format(command=command)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[0, 2] set() True\n", done.stdout + done.stderr


PRINTED = """
import sys
from rich.table import Table
from rpg_jax.run import cli, target
def main(options):
    if "%s" == "table":
        target.print_table(Table(title="t", *"ab"))
    raise BrokenPipeError("a worker's")
cli.run(main, ["x"])
"""


@pytest.mark.parametrize(("words", "closed", "status", "error"), [
    (["-m", "rpg_jax"], 1, -signal.SIGPIPE, ""),
    (["-m", "rpg_jax.train", "--help"], 1, 141, ""),
    (["-m", "rpg_jax.report", "--sedd=3"], 2, 141, ""),
    (["-m", "rpg_jax.report", "--sedd=3"], 1, 2, "error: Unknown command line flag 'sedd'"),
    (["-c", PRINTED % "table"], 1, 141, ""),
    (["-c", PRINTED % "nothing"], None, 1, "BrokenPipeError: a worker's"),
])  # fmt: skip
def test_a_closed_pipe_ends_a_command_silently(words, closed, status, error):
    reader, writer = os.pipe()
    os.close(reader)
    streams = {1: subprocess.PIPE, 2: subprocess.PIPE} | ({closed: writer} if closed else {})
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=streams[1], stderr=streams[2], text=True)
    os.close(writer)
    assert done.returncode == status
    assert error in done.stderr if error else not done.stderr


def test_commands_are_listed_and_near_words_named(capsys):
    assert listing.main([]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[2:]]
    assert {name for name, text in lines if text.endswith(".")} == COMMANDS
    for word, line in {
        "trian": "there is no command 'trian'; write python -m rpg_jax.train",
        "train": "write python -m rpg_jax.train",
        "xyz": f"there is no command 'xyz'; there are: {', '.join(listing.COMMANDS)}",
    }.items():
        assert listing.main([word]) == 2 and capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize("missing", ["absl", "jax"])
def test_a_package_that_is_not_installed_is_named_with_the_mend(missing, tmp_path):
    """Flags need absl. JAX is imported by what does the work."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rpg_jax.train", "--config=configs/quickstart.py", f"--workdir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    mend = 'is not installed: pip install ".[train]" brings what the commands need\n'
    assert (done.returncode, done.stderr) == (2, f"error: the package {missing} {mend}")


@pytest.mark.parametrize(("module", "source"), [
    ("rpg_jax/models/deep/a.py", "from ...sampling import generate"), ("rpg_jax/training/a.py", "import absl"),
    ("rpg_jax/models/a.py", "def f():\n    import numpy"), ("rpg_jax/training/a.py", "from configs import base"),
    ("rpg_jax/rewards/a.py", "import jax.numpy as jnp"), ("rpg_jax/objectives/a.py", "import numpy as np"),
    ("rpg_jax/run/a.py", "from rpg_jax.lab.planning import chips"), ("rpg_jax/new.py", "from rpg_jax import types"),
    ("rpg_jax/evaluate.py", "from rpg_jax import train"), ("configs/a.py", "from rpg_jax.run import build"),
    ("configs/a.py", "import jax"),
])  # fmt: skip
def test_a_forbidden_import_is_found(module, source):
    """That allowed ones pass, every module shows."""
    assert faults(module, source)
