"""The installable package: its metadata, the files of its wheel, and what has to be installed for which import."""

import email
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from test_architecture import imports

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rpg_jax").rglob("*.py")}
# Imported only where the user asks for it, with an error that says what to install.
OPTIONAL = {"wandb", "libtpu", "gguf", "reasoning_gym", "textarena"}


def packages(text):
    """Names of the packages in the lines of a requirements file, with their extras."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {re.match(r"[][\w.-]+", line)[0].lower().replace("_", "-") for line in lines if line}


def listed(name):
    return packages((ROOT / name).read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without a network from a copy of the sources that has no trace of an earlier build."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "rpg_jax", folder / "rpg_jax", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", *(path.name for path in ROOT.glob("requirements*.txt"))):
        shutil.copy(ROOT / file, folder)
    (folder / "tests").mkdir()
    (folder / "tests" / "conftest.py").touch()
    command = "import setuptools.build_meta as backend; backend.build_wheel('.')"
    built = subprocess.run([sys.executable, "-c", command], cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        yield archive


def test_a_wheel_holds_every_module_and_nothing_else_of_the_repository(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name for name in names if name.endswith(".py")} == MODULES
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rpg_jax").rglob("*") if path.is_file()}
    assert names == {name for name in data if "__pycache__" not in name}


def test_the_metadata_says_what_the_lists_say(wheel):
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    version = re.search(r'__version__ = "(.+)"', (ROOT / "rpg_jax" / "__init__.py").read_text())[1]
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("rpg-jax", version, ">=3.11")
    assert metadata["License-Expression"] == "Apache-2.0"
    required = {extra: set() for extra in ("", "train", "test", "dev", "gguf", "gym", "textarena")}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, extra = line.partition(' ; extra == "' if ' ; extra == "' in line else '; extra == "')
        required[extra.rstrip('"')] |= packages(requirement)
    assert required[""] == {"jax", "numpy"}
    assert required["train"] == listed("requirements.txt")
    for extra in ("test", "dev", "gguf", "gym", "textarena"):
        assert required[extra] == listed(f"requirements-{extra}.txt")


def test_what_is_imported_is_listed_and_nothing_twice():
    """Every package that a module imports is in the core's list or in training's, not merely brought by another one."""
    lists = [path.name for path in ROOT.glob("requirements*.txt")]
    names = [name for file in lists for name in listed(file)]
    assert len(lists) == 10 and len(names) == len(set(names))
    imported = {name.split(".")[0] for module in MODULES for name in imports(module, (ROOT / module).read_text())}
    imported -= sys.stdlib_module_names | OPTIONAL | {"rpg_jax", "configs"}
    of_module = importlib.metadata.packages_distributions()
    owners = {name: {owner.lower().replace("_", "-") for owner in of_module[name]} for name in imported}
    known = listed("requirements-core.txt") | listed("requirements.txt") | {"jaxlib"}
    assert not {name for name, packages in owners.items() if not packages & known}


def test_the_objectives_and_their_enumeration_load_jax_and_numpy_alone():
    rest = ("optax", "orbax", "grain", "tensorflow_datasets", "absl", "ml_collections", "pandas", "matplotlib")
    command = f"import sys, rpg_jax.objectives, rpg_jax.exact; print({set(rest)} & {{*sys.modules}})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", command], env=environment, cwd="/", capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr
