"""Imports point downward only (the table in the README and architecture.md), read from the source of every module."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rpg_jax"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
LONGEST = 400  # lines of a file

# Folder (or module) -> what of rpg_jax it may import beside itself. Modules at the top are entry points: all below.
FLOORS = {
    "training": {"sampling", "data", "rewards", "models", "parallel", "objectives", "types"},
    "reporting": {"settings"},
    "sweeping": set(),
    "planning": {"sampling", "models", "parallel", "objectives", "types"},
    "exact": {"objectives"},
    "sampling": {"models", "parallel", "objectives", "types"},
    "data": {"objectives", "types"},
    "rewards": set(),  # floor 0 imports jax, and rewards run in processes that must not
    "models": {"objectives", "types"},
    "parallel": {"objectives", "types"},
    "objectives": set(),
    "types": set(),
    "settings": set(),
}


def imports(module: str, source: str) -> set[str]:
    """Absolute dotted names of everything that a module of rpg_jax imports, at any depth of its code."""
    package = ["rpg_jax", *module.removesuffix(".py").split("/")[:-1]]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def faults(module: str, source: str) -> list[str]:
    """The imports of a module that its floor forbids."""
    names = imports(module, source)
    floor = module.removesuffix(".py").split("/")[0]
    others = {name for name in names if name.split(".")[0] != "rpg_jax"}
    bad = set()
    if floor in FLOORS:
        bad |= {name for name in names - others if (name.split(".") + [""])[1] not in FLOORS[floor] | {floor}}
        bad |= {name for name in others if name.split(".")[0] in {"absl", "ml_collections"}}
    if floor in {"objectives", "types"}:
        allowed = {"jax"} | sys.stdlib_module_names
        bad |= {name for name in others if name.split(".")[0] not in allowed}
    if floor == "rewards":
        bad |= {name for name in others if name.split(".")[0] in {"jax", "jaxlib", "flax", "optax"}}
    return sorted(bad)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    assert not faults(module, (PACKAGE / module).read_text())


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_short(module):
    lines = len((PACKAGE / module).read_text().splitlines())
    assert lines <= LONGEST, f"rpg_jax/{module} has {lines} lines; a file of {LONGEST} is for splitting"


def test_every_folder_has_a_floor():
    folders = {module.split("/")[0] for module in MODULES if "/" in module}
    assert folders <= FLOORS.keys()


def test_reward_workers_do_not_load_jax():
    command = "import sys, rpg_jax.rewards; sys.exit(bool({'jax', 'jaxlib'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("models/a.py", "from rpg_jax.sampling import generate"),
        ("models/a.py", "import rpg_jax.training.loop"),
        ("models/a.py", "from rpg_jax import training"),
        ("models/a.py", "from ..training import loop"),
        ("models/a.py", "from .. import sampling"),
        ("models/deep/a.py", "from ...sampling import generate"),
        ("models/a.py", "def f():\n    from rpg_jax.training.loop import run"),
        ("training/a.py", "from rpg_jax import cli"),
        ("training/a.py", "from rpg_jax.train import main"),
        ("training/a.py", "from ml_collections import ConfigDict"),
        ("training/a.py", "if True:\n    import absl.flags"),
        ("training/a.py", "from rpg_jax.exact import certify"),
        ("exact/a.py", "from rpg_jax.types import Rollout"),
        ("rewards/a.py", "import jax.numpy as jnp"),
        ("rewards/a.py", "from rpg_jax.data import problems"),
        ("objectives/a.py", "import numpy as np"),
        ("objectives/a.py", "from rpg_jax.types import TrainBatch"),
        ("types.py", "import flax"),
        ("types.py", "from rpg_jax import objectives"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("training/a.py", "from rpg_jax.training.logs import RunLog\nfrom . import loop\nfrom rpg_jax import parallel"),
        ("train.py", "from absl import flags\nfrom rpg_jax import build, cli\nfrom rpg_jax.training import loop"),
        ("objectives/a.py", "import dataclasses\nimport jax.numpy as jnp\nfrom .divergences import rkl"),
        ("data/tasks/a.py", "from ..problems import Problem\nimport numpy as np"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert not faults(module, source)
