"""Where a run's checkpoints are, who finds them, and what a run says when memory runs out; the window of a profile."""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import SECONDS, bounded
from test_rollout import loop_settings

from configs import quickstart
from rpg_jax import InputError, parallel
from rpg_jax.run import job, profile, states
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import DamagedCheckpoint
from rpg_jax.training import loop, phases
from rpg_jax.training.rollouts import Rollouts
from rpg_jax.types import Checkpoint, Policy, TrainState


@pytest.fixture
def config():
    return quickstart.get_config("smoke")


def begin(folder):
    (folder / "checkpoints" / "1").mkdir(parents=True)


def test_checkpoints_lie_in_the_workdir_unless_told_otherwise(tmp_path, config):
    path, folder = workdir.open_workdir(tmp_path / "run", config, False)
    assert pathlib.Path(folder) == path and sorted(p.name for p in path.iterdir()) == ["config.json"]
    begin(path)
    with pytest.raises(ValueError, match="--checkpoint_dir="):
        workdir.open_workdir(tmp_path / "run", config, False, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def without(folder, *keys):
    """Takes keys, or sections, out of a run's config.json, as a version wrote it that did not have them."""
    settings = json.loads((folder / "config.json").read_text())
    for section, _, name in (key.partition(".") for key in keys):
        del (settings[section] if name else settings)[name or section]
    (folder / "config.json").write_text(json.dumps(settings))


def test_a_key_that_a_saved_config_lacks_has_its_default_and_a_run_of_0_2_or_before_is_refused(tmp_path, config):
    begin(tmp_path)
    workdir.open_workdir(tmp_path, config, False)
    whole = workdir.read_config(tmp_path).to_dict()
    without(tmp_path, "environment", "rollout.routes", "model.router_balance", "reference.checkpoint", "model.lora")
    assert workdir.read_config(tmp_path).to_dict() == whole
    with config.unlocked():
        config.rollout.routes = "record"
    with pytest.raises(ValueError, match="rollout.routes: 'recompute' -> 'record'"):
        workdir.open_workdir(tmp_path, config, False)
    without(tmp_path, "data.train_size")  # which has no default
    for words in ("data.train_size is unset; it must be", "model is 5; it must be"):
        with pytest.raises(ValueError, match=f"config.json: {words}"):
            workdir.open_workdir(tmp_path, config, False)
        (tmp_path / "config.json").write_text(json.dumps(whole | {"model": 5}))
    for old in ({"digest": "0" * 12}, {"behavior": None}):  # of 0.2, and of before
        settings = {key: value for key, value in (whole | old).items() if value}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match="version 0.2 or before"):
            workdir.read_config(tmp_path)


@pytest.mark.parametrize("settings", [
    {"data": {"train": "mine.py", "heldout": "gym:gcd(size=2)"}},
    {"data": {"train": "gym:gcd(size=2)", "heldout": ("mine.py", "gym:gcd(size=2)")}},
    {"reward.functions": "dapo, brief=mine.py:f"}, {"reward.functions": ["boxed", "mine.py:f"]},
    {"evaluation.function": "mine.py:f"}, {"environment.name": "mine.py:f"},
    {"data": {"train": "a", "heldout": "b", "template": "mine.py"}},
])  # fmt: skip
def test_an_edited_file_of_problems_or_of_a_function_is_another_config(tmp_path, config, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin(tmp_path)
    pathlib.Path("mine.py").write_text("f = 1\n")
    with config.unlocked():
        for key, value in settings.items():
            section, _, name = key.rpartition(".")
            (config[section] if section else config)[name] = value
    for _ in range(2):
        workdir.open_workdir(tmp_path, config, False)
    pathlib.Path("mine.py").write_text("f = 2\n")
    with pytest.raises(ValueError, match="mine.py.* has been edited"):
        workdir.open_workdir(tmp_path, config, False)


def test_another_place_is_remembered_and_knows_the_run(tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "bucket" / "mine"
    path, folder = workdir.open_workdir("run", config, False, "bucket/mine")
    assert pathlib.Path(folder) == place and json.loads((place / "config.json").read_text())["steps"] == config.steps
    begin(place)
    monkeypatch.chdir(tmp_path / "bucket")  # the place's name holds from anywhere
    assert pathlib.Path(workdir.checkpoint_dir(tmp_path / "run")) == place
    with pytest.raises(ValueError, match="bucket/mine, not in"):
        workdir.checkpoint_dir(tmp_path / "run", tmp_path / "other")
    # A new machine has no workdir: the place itself refuses another config, and gives it to readers.
    config.steps += 1
    with pytest.raises(ValueError, match="steps: 3 -> 4"):
        workdir.open_workdir(tmp_path / "new", config, False, f"{place}/")
    assert not (tmp_path / "new").exists()
    assert workdir.read_config(workdir.checkpoint_dir(tmp_path / "new", place)).steps == 3
    workdir.record(*workdir.open_workdir(tmp_path / "new", config, True, place), config)
    assert workdir.read_config(place).steps == 4


@pytest.mark.parametrize("place", ["/proc/rpg", "nothing://bucket/run", "gs://bucket/run"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, config, place):
    if place.startswith("gs:") and importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is installed, and would ask the network")
    with pytest.raises(ValueError) as caught:
        workdir.open_workdir(tmp_path / "run", config, False, place)
    assert place in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_workdir_has_one_training_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = (
        "import sys, time; from rpg_jax.storage import workdir\n"
        "with workdir.alone(sys.argv[1]): print('in', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"in\n"
    with pytest.raises(ValueError, match=rf"is in use: process {process.pid} on .* another --workdir"):
        with workdir.alone(tmp_path / "other", f"{tmp_path}/"):
            pass
    process.kill()
    process.wait()
    with workdir.alone(tmp_path, "gs://bucket/run", tmp_path / "other"), pytest.raises(ValueError, match="is in use"):
        with workdir.alone(tmp_path):
            pass


def test_a_best_checkpoint_that_training_deletes_is_looked_for_again(tmp_path, monkeypatch):
    """Training has gone on whenever a step before the third is read; what is half deleted seems damaged."""
    steps, tried, moves = [1, 2], [], True
    (tmp_path / "checkpoints").mkdir()

    def restore(checkpoints, shapes, base, step):
        tried.append(step)
        if step < 3 or not moves:
            steps[:] = [step + 1, step + 2] if moves else steps
            raise DamagedCheckpoint("its arrays cannot be read")
        return step, "state", {}

    opened = contextlib.nullcontext(types.SimpleNamespace(best_step=lambda: steps[0]))
    fakes = dict(Checkpoints=lambda folder: opened, saved_steps=lambda folder: list(steps), abstract=lambda *_: None)
    for name, fake in (fakes | dict(restore=restore, DELETION_SECONDS=0.0)).items():
        monkeypatch.setattr(states, name, fake)
    assert states.restore_state(tmp_path, None, "best", None) == (3, "state") and tried == [1, 2, 3]
    moves = False
    with pytest.raises(DamagedCheckpoint):
        states.restore_state(tmp_path, None, "best", None)
    assert tried == [1, 2, 3, 3], "what stays where it is is damaged"


def test_the_first_interrupt_lets_a_run_save_and_the_second_ends_it():
    with bounded(SECONDS):  # which sets back the handlers of signals
        for number, then in ((signal.SIGTERM, None), (signal.SIGINT, signal.SIG_DFL)):
            with job.joined() as should_stop:
                assert not should_stop()
                os.kill(os.getpid(), number)
                assert should_stop()
                assert then is None or signal.getsignal(number) == then


def test_an_interrupt_while_a_command_is_imported_prints_nothing(tmp_path):
    (tmp_path / "absl.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    # A suite that a script runs in the background ignores SIGINT, and so would what it starts.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", heed, sys.executable, "-m", "rpg_jax.train"]
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def out_of_memory(*_, **__):
    return jnp.zeros((1 << 50,)).block_until_ready()


REMEDIES = {
    "rollout": "rollout.slots", "experience": "learner.microbatch_rows", "update": "model.remat",
    "reference": "reference.mode=iterative", "evaluation": "rollout.slots",
}  # fmt: skip


@pytest.mark.parametrize("name", REMEDIES)
def test_out_of_memory_names_the_phase_and_what_to_lower(name):
    """JAX's own error, raised in one part of a step whose other parts do nothing."""
    fails = lambda phase, result: out_of_memory if name == phase else lambda *_, **__: result  # noqa: E731
    collected = types.SimpleNamespace(sequences=None, lengths=np.ones(4, int), rewards=None, seconds={})
    parts = mock.MagicMock(score=fails("experience", {}), experience=lambda *_: (jnp.zeros(4), {}), heldout=0)
    parts.policies.current = lambda state: Policy(None, {}, state.step)
    parts.policies.reference = parts.update = parts.evaluate = out_of_memory
    parts.reference.is_due = lambda checkpoint: name == "reference"
    meshes, options = (parallel.make_mesh(),) * 2, dict(steps=1, overlap=False, should_stop=lambda *_: False)
    parts.rollouts = Rollouts(lambda should_stop: fails("rollout", collected), parts.policies, *meshes, **options)
    state = TrainState(jnp.int32(0), {}, None, jnp.zeros(2, int), jnp.float32(0))
    settings = loop_settings(steps=1, prompts=2, samples=2, minibatch_prompts=1, microbatch_rows=2, epochs=1)
    with pytest.raises(InputError) as caught:
        if name == "evaluation":
            loop.evaluated(parts, Checkpoint(state))
        else:
            loop.rl_step(parts, settings, Checkpoint(state), 0)
    text = str(caught.value)
    assert repr(name) in text and REMEDIES[name] in text and "RESOURCE_EXHAUSTED" in text and "rpg_jax.plan" in text
    assert "\n" not in text


def test_a_program_that_runs_out_of_memory_after_it_was_dispatched_and_other_errors_of_jax():
    said = "INTERNAL: Error dispatching computation: Out of memory allocating 21505077856 bytes."  # of a CPU
    with pytest.raises(InputError, match="'update' .* 21505077856 bytes.: lower"), phases.phase("update"):
        raise jax.errors.JaxRuntimeError(said)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), phases.phase("update"):
        raise jax.errors.JaxRuntimeError("INTERNAL: a failure that is nobody's mistake")


def test_only_the_window_of_a_profile_is_traced(monkeypatch):
    assert profile.window("2:4", 10) == range(2, 4) and not profile.window(None, 10)
    for text in ("4:2", "3:3", "-1:2", "1", "a:b", "1:2:3", "9:11", ""):
        with pytest.raises(ValueError, match=r"START:STOP.*STOP <= 10"):
            profile.window(text, 10)
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: calls.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))

    def run(start, window, leave=None):
        calls.clear()
        steps = profile.traced(range(start, 6), window, "folder")
        for step in steps:
            calls.append(step)
            if step == leave:
                steps.close()
        return calls[:]

    assert run(0, range(2, 4)) == [0, 1, "folder", 2, 3, "stop", 4, 5]
    assert run(3, range(2, 4)) == ["folder", 3, "stop", 4, 5]  # resumed within it
    assert run(4, range(2, 4)) == [4, 5]
    assert run(4, range(4, 6)) == ["folder", 4, 5, "stop"]
    assert run(1, range(2, 4), leave=2) == [1, "folder", 2, "stop"]  # preempted within it
