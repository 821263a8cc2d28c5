"""Configs: every key is read, and names what it should."""

import importlib.util
import pathlib
import re
from functools import partial

import pytest

from rpg_jax.objectives import RECIPES
from rpg_jax.run import build
from rpg_jax.storage import workdir
from rpg_jax.storage.settings import flatten

ROOT = pathlib.Path(__file__).parent.parent


def get_config(name, variant=""):
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(variant)


quickstart = partial(get_config, "quickstart")


@pytest.mark.parametrize("name", ["quickstart", "word_problems"])
def test_every_key_is_read(name):
    """By name, or by expanding its section into a function's keyword arguments, which Python checks."""
    source = "".join(file.read_text() for file in sorted((ROOT / "rpg_jax" / "run").glob("*.py")))
    for short, section in dict(warm="warm_start", settings="warm_start", section="model").items():
        source += re.sub(rf"(?<![\w.]){short}\.", f"config.{section}.", source)
    config = get_config(name)
    expanded = set(re.findall(r"(?:given\(|\*\*)config\.(\w+)[,)]", source))
    expanded -= set() if "tasks" in config.data else {"data"}  # of real sets each key is read by name
    for key in flatten(config.to_dict()):
        section, *rest = key.split(".")
        read = re.search(rf"config\.{section}\.{rest[0]}\b" if rest else rf"config\.{section}\b", source)
        assert section in expanded or read, f"nothing reads config.{key}"


def test_unset_keys_are_not_passed_on():
    section = quickstart().objective
    given = build.given(section, "name")
    assert "clip_low" not in given and given["clip"] == "rpg" and "name" not in given
    section.clip = ""  # as the flag --config.objective.clip= leaves it
    assert "clip" not in build.given(section)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "cispo"] + ["docs/tempered.py:tempered"])
def test_the_quickstart_takes_every_objective_by_flags(name):
    config = quickstart()
    config.objective.update(dict(name=name, clip=""))
    assert build.build_objective(config).name == name


def test_variants():
    assert quickstart("smoke").steps < quickstart().steps
    with pytest.raises(ValueError, match="smoke"):
        quickstart("smok")


def test_workdir_names_the_keys_that_differ(tmp_path):
    config = quickstart("smoke")
    workdir.open_workdir(tmp_path / "run", config, accept_change=False)
    assert workdir.read_config(tmp_path / "run").to_dict() == config.to_dict()
    config.mesh.data, config.log.tensorboard = 1, False  # where and how loudly, not what
    workdir.open_workdir(tmp_path / "run", config, accept_change=False)
    config.objective.beta, config.steps = 0.5, 7
    workdir.open_workdir(tmp_path / "run", config, accept_change=False)  # nothing has begun
    workdir.open_workdir(tmp_path / "run", quickstart("smoke"), accept_change=False)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"objective.beta: None -> 0.5; steps: 3 -> 7.*--accept_config_change"):
        workdir.open_workdir(tmp_path / "run", config, accept_change=False)
    assert workdir.read_config(tmp_path / "run").steps == 3
    workdir.open_workdir(tmp_path / "run", config, accept_change=True)
    assert workdir.read_config(tmp_path / "run").steps == 7
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        workdir.open_workdir(tmp_path / "run", config, accept_change=False)
