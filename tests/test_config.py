"""Configs: every key is read, and names what it should."""

import ast
import inspect
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from functools import partial

import pytest
from fuzzing import call

from configs import base, word_problems
from configs.quickstart import get_config as quickstart
from rpg_jax.objectives import RECIPES, clips
from rpg_jax.rewards import Scorer
from rpg_jax.run import build, states, train
from rpg_jax.storage import workdir
from rpg_jax.storage.settings import flatten

ROOT = pathlib.Path(__file__).parent.parent


def section_of(node) -> str | None:
    """`rollout` of the expression `config.rollout`, `model.lora` of `config.model.lora`."""
    root, _, section = ast.unparse(node).partition(".")
    return section if isinstance(node, ast.Attribute) and root == "config" else None


def local_names(function) -> dict[str, str]:
    """Name -> section, of assignments such as `learner, warm = config.learner, config.warm_start`."""
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if both else [(target, value)]
            found |= {ast.unparse(name): section_of(value) for name, value in pairs if section_of(value)}
    return found


def unread(keys, source: str) -> list[str]:
    """The keys that no function reads by name, or by turning their section into keyword arguments.

    Python checks keyword arguments by name. `set_keys(config.SECTION, "KEY", ...)` leaves those keys out.
    """
    read = set()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        names = local_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                section = section_of(node.value) or names.get(ast.unparse(node.value))
                read |= {section_of(node), f"{section}.{node.attr}"}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "set_keys":
                left_out = {word.value for word in node.args[1:]}
                section = section_of(node.args[0])
                read |= {key for key in keys if key.startswith(f"{section}.") and key.split(".")[1] not in left_out}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                read.add(f"{section_of(node.func.value)}.{getattr(node.args[0], 'value', None)}")
            elif isinstance(node, ast.keyword) and node.arg is None and section_of(node.value):
                read |= {key for key in keys if key.startswith(f"{section_of(node.value)}.")}
    return [key for key in keys if key not in read]


@pytest.mark.parametrize("get_config", [quickstart, word_problems.get_config])
def test_every_key_is_read(get_config):
    source = "".join(file.read_text() for file in sorted((ROOT / "rpg_jax" / "run").glob("*.py")))
    keys = [key for key in flatten(get_config().to_dict()) if not key.startswith("data.tasks.")]
    if "data.train" in keys:  # `build_data` makes keyword arguments of the section when problems are generated only
        source = source.replace("set_keys(config.data)", "{}")
    assert len(keys) > 60 and not unread(keys, source)


def test_every_key_is_explained_with_its_unit():
    """A config has no other keys: `configs/base.py` refuses those that it does not define."""
    keys = re.findall(r"^ +(\w+)=(?!dict)\w+\(.*?\),(.*)$", (ROOT / "configs" / "base.py").read_text(), re.MULTILINE)
    assert len(keys) > 80 and not [name for name, comment in keys if not re.match(r"  # \[[^\]]+\] .", comment)]


def test_keys_that_are_unknown_are_named_and_those_that_are_forgotten_all_at_once():
    """Limits of rewards are not among them: they have defaults."""
    made = partial(base.get_config, base.prepared_sets(train="data/mine"))
    for settings, message in (
        (dict(stepz=1), "has no key stepz"),
        (dict(steps=1, rollout=dict(promts=1)), "has no key rollout.promts; there are: prompts, samples"),
        (dict(steps=1, evaluation=3), "evaluation is 3; it must be a section"),
    ):
        with pytest.raises(ValueError, match=message):
            made(**settings)
    with pytest.raises(ValueError, match="has no default for data.train"):
        base.prepared_sets()
    with pytest.raises(ValueError, match="an experiment must set ") as refused:
        made(rollout=dict(samples=4), optimizer=dict(warmup_steps=1))
    missing = """
        steps rollout.prompts rollout.max_prompt rollout.max_new rollout.slots objective.name learner.minibatch_prompts
        learner.microbatch_rows optimizer.learning_rate evaluation.every evaluation.k checkpoint.every
    """.split()
    assert str(refused.value).partition(": ")[0] == f"configs/base.py has no default for {', '.join(missing)}"
    defaults = inspect.signature(Scorer.__init__).parameters
    for key, limit in dict(workers=2, timeout_seconds=10.0, memory_mb=4096, max_failures=0.25).items():
        assert base.KEYS["reward"][key].default == defaults[key].default == limit, key


def test_a_config_finds_its_base_from_any_folder(tmp_path):
    """A copy of the repository that is not installed, named by its path."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    command = [sys.executable, "-P", "-m", "rpg_jax.train", f"--config={tmp_path}/configs/sweeps/small.py:smok"]
    installed = tmp_path / "site" / "rpg_jax"
    installed.parent.mkdir()
    installed.symlink_to(ROOT / "rpg_jax")
    environment = os.environ | {"PYTHONPATH": str(installed.parent)}
    done = subprocess.run(command, cwd=tmp_path / "site", env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "unknown variant 'smok' of configs/quickstart.py" in done.stderr, done.stderr


def begun(monkeypatch, *words, file=f"{ROOT}/configs/quickstart.py:smoke"):
    """(Exit status, what is said, the config) of `train` with these words, where training is left out."""
    configs = []
    monkeypatch.setattr(train, "main", lambda options, **_: configs.append(options.config))
    return *call("train", f"--config={file}", "--workdir=unused", *words), *(configs or [None])


def test_a_section_of_the_users_own_keys_takes_any_flag(monkeypatch, tmp_path):
    words = """
        data.template_options.enable_thinking=False data.template_options.effort=high reward.weights.short=0.5
        objective.name=mine.py:loss objective.tau=2 objective.clip=none
    """.split()
    file = f"{ROOT}/configs/word_problems.py"
    status, said, config = begun(monkeypatch, *(f"--config.{word}" for word in words), file=file)
    assert (status, said) == (0, "")
    assert config.data.template_options.to_dict() == dict(enable_thinking=False, effort="high")
    assert config.reward.weights.to_dict() == dict(short=0.5)
    assert (config.objective.tau, config.objective.clip) == (2, "none")
    (tmp_path / "flags").write_text("--config.data.template_options.a={'b': 1e-3}\n")
    words = f"--flagfile={tmp_path}/flags", "--config.data.template_options.c=x"
    status, said, config = begun(monkeypatch, *words, file=file)
    assert (status, said) == (0, "") and config.data.template_options.to_dict() == dict(a=dict(b=1e-3), c="x")
    status, said, config = begun(monkeypatch, "--config.data.tasks.countdown.new=[1,2]")
    assert (status, said) == (0, "") and config.data.tasks.countdown.new == [1, 2]


@pytest.mark.parametrize(("words", "message"), [
    ("objective.tau=2", "--config.objective.tau: the config has no key 'tau' in objective; "),
    ("objective.name=grpo objective.betta=2", "near ones: objective.beta"),
    ("reward.weight.a=2", "has no key 'weight' in reward; "), ("data.tasks.mine.a=2", "no key 'mine' in data.tasks; "),
    ("steps.a=2", "has no key 'a' in steps"),
])  # fmt: skip
def test_elsewhere_an_unknown_key_is_refused(monkeypatch, words, message):
    status, said, _ = begun(monkeypatch, *(f"--config.{word}" for word in words.split()))
    assert status == 2 and message in said, said


def test_a_config_that_is_none_is_one_line_and_a_bug_in_one_stays_a_bug(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "syntax.py").write_text("def get_config(:")
    (tmp_path / "none.py").write_text("def get_config():\n    pass\n")
    (tmp_path / "other.py").write_text("x = 1")
    (tmp_path / "bug.py").write_text("def get_config():\n    return 1 / 0\n")
    for name, says in {
        f"{ROOT}/configs/quickstar.py": f"did you mean {ROOT}/configs/quickstart.py?",
        f"{ROOT}/configs/quickstart.py:smokee": "unknown variant 'smokee'", "syntax.py": "syntax.py, line 1",
        "none.py": "returns a NoneType", "none.py:smoke": "does not take 'smoke'", "other.py": "has no get_config",
    }.items():  # fmt: skip
        status, said = call("train", f"--config={name}")
        assert status == 2 and says in said, said
    with pytest.raises(ZeroDivisionError):  # Python then prints where
        call("train", "--config=bug.py")


def test_unset_keys_are_not_passed_on_and_the_quickstart_takes_every_objective_by_flags():
    config = quickstart()
    settings = build.set_keys(config.objective, "name")
    assert "clip_low" not in settings and settings["clip"] == "rpg" and "name" not in settings
    for name in (*RECIPES.keys() - {"cispo"}, "docs/tempered.py:tempered"):
        config.objective.update(dict(name=name, clip=None))
        assert build.build_objective(config).name == name


def test_a_flag_without_a_value_unsets_its_key_also_in_a_config_that_was_saved_with_an_empty_text(monkeypatch):
    emptied = "objective.clip= objective.beta= objective.mine= model.size= rollout.slots="
    words = f"objective.name=mine.py:loss objective.beta=1 rollout.delay= {emptied} rollout.delay=2".split()
    words = [f"--config.{word}" for word in ("data.directory=~/d", *words)]
    apart = [part for word in words for part in (word.split("=") if word.endswith("=") else [word])]  # --config.KEY ''
    for given in (words, apart):
        status, said, config = begun(monkeypatch, *given)
        assert (status, said) == (0, "") and config.rollout.delay == 2
        assert config.data.directory == os.path.expanduser("~/d")
    assert config.objective.clip is config.objective.beta is config.objective.mine is config.model.size is None
    with pytest.raises(ValueError, match="rollout.slots is unset; it must be at least 1"):
        base.check(config)
    data = base.prepared_sets(train="mine", heldout="held", tokenizer="", template_options=dict(a=""))
    assert data.tokenizer is data.template_options.a is None
    saved = json.loads(quickstart().to_json_best_effort())
    saved["objective"]["clip"] = saved["model"]["checkpoint"] = ""
    again = base.completed(saved)
    assert again["objective"]["clip"] is again["model"]["checkpoint"] is None


def defined(keys=base.KEYS, prefix=""):
    """{"section.key": `base.Key`} of the quickstart's config."""
    found = {}
    for name, key in (keys | {"data": base.GENERATED} if keys is base.KEYS else keys).items():
        found |= defined(key, f"{prefix}{name}.") if isinstance(key, dict) else {f"{prefix}{name}": key}
    return found


@pytest.mark.parametrize("value", [math.nan, -2, "1", None, 1e40])
def test_numbers_outside_of_their_bounds_are_refused(value):
    for name, key in defined().items():
        if key.bound.kinds[-1] not in (int, float) or not key.bound.must_be or (value is None and key.default is None):
            continue
        shown = "unset" if value is None else rf"{re.escape(repr(value))}(\.0)?"
        with pytest.raises(ValueError, match=rf"^{name} is {shown}; it must be "):
            build.build_settings(changed(name, value))


def test_every_default_is_within_its_bounds_and_only_the_registrys_numbers_have_none():
    keys = defined() | {f"data.{name}": key for name, key in base.PREPARED.items()}
    given = {name: key for name, key in keys.items() if key.default not in (None, base.Required, {})}
    assert not [name for name, key in given.items() if key.bound.refuses(key.default)]
    unbound = {name.removeprefix("objective.") for name, key in keys.items() if not key.bound.must_be}
    assert unbound == {"alpha", "beta", "control", "z_old", "sampler_correction", *clips.BOUNDS}


@pytest.mark.parametrize(("key", "value", "message"), [
    ("objective.name", 3, "objective.name is 3; it must be text"),
    ("rollout.routes", "replay", "rollout.routes is 'replay'; it must be one of recompute, record"),
    ("rollout.weights_dtype", "bfloat16", "weights_dtype is 'bfloat16'; it must be one of int8, float8_e4m3fn"),
    ("model.scan", 1, "model.scan is 1; it must be True or False"),
    ("data.directory", "a\0b", "data.directory is 'a\\x00b'; it must be text without null characters"),
    ("data.tasks", 3, "data.tasks is 3; it must be a section"), ("rollout", 3, "rollout is 3; it must be a section"),
    ("rollout.samples", {"a": 1}, "rollout.samples is {'a': 1}; it must be at least 1"),
])  # fmt: skip
def test_values_of_another_type_are_refused(key, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build.build_settings(changed(key, value))


def changed(key, value):
    """The quickstart's config with one value, whatever its type."""
    config = quickstart()
    section, _, name = key.rpartition(".")
    with config.ignore_type():
        (config[section] if section else config)[name] = value
    return config


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
    path, folder = workdir.open_workdir(tmp_path / "run", config, accept_change=True)
    assert workdir.read_config(tmp_path / "run").steps == 3  # until a checkpoint is found to fit
    workdir.record(path, folder, config)
    assert workdir.read_config(tmp_path / "run").steps == 7
    for text in ("{", "[" * 100_000):
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(ValueError, match="not JSON"):
            workdir.open_workdir(tmp_path / "run", config, accept_change=False)
    for text in ("[]", "{}", "3"):
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json is not the config of a run"):
            workdir.open_workdir(tmp_path / "run", config, accept_change=False)


@pytest.mark.parametrize(("settings", "heldout", "flag", "judge"), [
    ({}, None, None, "verifier"), ({"reward.functions": "short=mine.py:f,boxed"}, None, None, "mine.py:f"),
    ({"reward.functions": ["mine.py:f", "boxed"], "evaluation.function": "boxed"}, None, None, "boxed"),
    ({"reward.functions": "mine.py:f", "evaluation.function": "mine.py:g"}, None, "math_verify", "math_verify"),
    ({"reward.functions": None, "evaluation.function": None}, "other.jsonl", None, "dapo"),
])  # fmt: skip
def test_a_run_is_evaluated_by_what_gives_its_accuracy_alone(monkeypatch, settings, heldout, flag, judge):
    config = quickstart("smoke")
    config.reward.weights = dict(short=0.5)
    config.update_from_flattened_dict(settings)
    monkeypatch.setattr(states.workdir, "read_config", lambda folder: config)
    monkeypatch.setattr(states, "build_run", lambda config: config)
    _, run = states.read_run("anywhere", heldout, flag)
    assert (run.reward.function, run.reward.functions, run.evaluation.function) == (judge, None, None)
    assert not run.reward.weights.to_dict()
