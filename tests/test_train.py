"""`python -m rpg_jax.train` as a user runs it: what it leaves, kills and resumes, and what it refuses."""

import errno
import json
import os
import pathlib
import re
import signal
import time
from functools import partial

import jax
import numpy as np
import pytest
from fuzzing import call, outcome
from PIL import Image
from processes import AS_USERS, metrics, run, start, succeed

from rpg_jax.run import build, cli, states
from rpg_jax.storage import workdir
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.storage.logs import read_table

CONFIG = "--config=configs/quickstart.py:smoke"


def train_arguments(path, *more):
    """Of the smoke run, with the least model."""
    data = path.parent / "data"
    return CONFIG, f"--workdir={path}", f"--config.data.directory={data}", "--config.model.size=micro", *more


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def final_state(path):
    config = workdir.read_config(path)
    run_ = build.build_run(config)
    with Checkpoints(path / "checkpoints") as checkpoints:
        step, saved, extra = checkpoints.restore(states.abstract(run_, partial(states.build_state, run_)))
    return step, saved, extra["cursor"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def finished(folder):
    path = folder / "whole"
    succeed("train", *train_arguments(path))
    return path


def test_a_run_leaves_what_it_promises(finished):
    written = rows(finished)
    assert [row["step"] for row in written] == [0, 1, 2, 3]
    train = "reward accuracy entropy response_length kl_behavior_k3 clip_fraction effective_sample_size grad_norm"
    keys = {f"train/{name}" for name in (train + " sampler_logp_gap ratio_max clip_fraction_ceiling").split()}
    keys |= {"time/rollout", "time/reward", "time/update"}
    keys |= {"throughput/rollout_tokens_per_second", "throughput/update_tokens_per_second"}
    assert all(keys <= row.keys() for row in written[1:])
    for task in ("arithmetic", "countdown", "sorting", "all"):
        for name in ("mean@4", "mean@4_low", "mean@4_high", "pass@4"):
            assert [f"eval/{task}/{name}" in row for row in written] == [True, False, True, True]
    assert all(row["train/sampler_logp_gap_max"] < 1e-3 for row in written[1:])
    assert all(0 < row["train/effective_sample_size"] <= 1 + 1e-6 for row in written[1:])
    summary = json.loads((finished / "summary.json").read_text())
    assert {"accuracy_before", "wall_seconds", "versions"} <= summary.keys()
    assert summary["compilations_after_warmup"] == 0
    assert summary["accuracy_after"] == written[-1]["eval/all/mean@4"]
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "response", "reward"} <= samples[0].keys()
    looked = read_table(finished / "look.parquet").to_pylist()  # whole minibatches of the second of two updates
    assert [(row["step"], row["update"]) for row in looked] == [(2, 3)] * 8 + [(3, 5)] * 8
    for step in (2, 3):  # what the update saw: the largest ratio of the step is among them, unless it is the first's, 1
        log_ratios = [np.subtract(row["current_logp"], row["behavior_logp"]) for row in looked if row["step"] == step]
        largest = np.exp(np.concatenate(log_ratios).max())
        np.testing.assert_allclose(largest, written[step]["train/ratio_max"], rtol=1e-4)
    assert {age for row in looked for age in row["age"]} == {1} and all(row["prompt"] for row in looked)
    heldout = [json.loads(line) for line in (finished / "heldout.jsonl").read_text().splitlines()]
    assert [row["step"] for row in heldout] == [0] * 4 + [2] * 4 + [3] * 4
    assert len({(row["task"], row["problem"], row["prompt"]) for row in heldout}) == 4
    assert {"arithmetic", "countdown", "sorting"} == {row["task"] for row in heldout[:3]}
    assert all({"response", "answer", "correct"} <= row.keys() for row in heldout)
    assert json.loads((finished / "config.json").read_text())["objective"]["clip"] == "rpg"
    assert Image.open(finished / "figures" / "training.png").size[0] > 600
    assert list(finished.glob("**/events.out.tfevents.*"))


def differences(page: str, keys, source: str) -> tuple[list[str], list[str]]:
    """Between keys of metrics.jsonl and the first column of the page's tables: (the keys that it lacks, its names that
    no key has and that the source does not spell either)."""
    wild = lambda match: r"\d+" if match[0] == "K" else ".+"  # noqa: E731
    names = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`[^|]+`) \|", page, re.MULTILINE)))
    patterns = {name: re.sub(r"\b(TASK|NAME)\b|K(?=$|_)", wild, name) for name in names}
    unlisted = sorted(key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns.values()))
    absent = [name for name in names if not any(re.fullmatch(patterns[name], key) for key in keys)]
    spelled = {name: (name, name.partition("/")[2].replace("NAME", "{name}")) for name in absent}
    return unlisted, [name for name, texts in spelled.items() if not any(f'"{text}"' in source for text in texts)]


def test_every_metric_is_on_its_page_and_the_page_has_no_other(folder, finished):
    runs = [path for path in folder.iterdir() if (path / "metrics.jsonl").exists()]
    keys = {key for path in runs for row in rows(path) for key in row} - {"step"}
    root = pathlib.Path(__file__).parents[1]
    page = (root / "docs/metrics.md").read_text()
    source = "".join(file.read_text() for file in (root / "rpg_jax").rglob("*.py"))
    assert finished in runs and len(keys) > 70 and differences(page, keys, source) == ([], [])
    more = page + "| `train/made_up` | share | no |\n"
    assert differences(page, {"train/made_up"}, source)[0] and differences(more, keys, source)[1] == ["train/made_up"]


def test_training_again_does_nothing_more(finished):
    before = metrics(finished)
    status, _, err = outcome("train", *train_arguments(finished))
    assert status == 0 and "finished before; nothing to do" in err, err
    assert metrics(finished) == before
    config = (finished / "config.json").read_text()
    other = "--config.model.size=tiny", "--accept_config_change"
    status, _, err = outcome("train", *train_arguments(finished, *other))
    assert status == 2 and "does not fit" in err and (finished / "config.json").read_text() == config


def interrupted(path, number, reached, arguments):
    """The exit status and stderr of a training process that is sent a signal once `reached(path)`."""
    process, (_, errors) = start("train", *arguments(path), **AS_USERS)
    deadline = time.monotonic() + 300
    while not reached(path):
        assert process.is_alive(), errors.read()
        assert time.monotonic() < deadline, "never came so far"
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join(120)
    errors.seek(0)
    return process.exitcode, errors.read()


def metrics_hold(count):
    def found(path):
        file = path / "metrics.jsonl"
        return file.exists() and file.read_text().count("\n") >= count

    return found


def test_a_run_that_is_killed_and_preempted_again_and_again_is_bit_exact(folder):
    """kill -9 in the warm start, SIGTERM after a step, kill -9 after another, with the compiler as users have it.

    A rollout is drawn from the policy of three updates ago, one and a half steps, half of the groups under way go on in
    the next step, and the reference is renewed after the second.
    """
    settings = """
        rollout.prompts=2 learner.minibatch_prompts=1 optimizer.warmup_steps=0
        rollout.delay=3 behavior.source=sampler rollout.carry_over=True rollout.oversample=2.0 rollout.max_age=6
        reference.mode=every reference.every=4 seed=1
    """  # with this seed the last step trains a token of the first policy
    whole, path = folder / "delayed", folder / "interrupted"
    of = lambda path: train_arguments(path, *(f"--config.{setting}" for setting in settings.split()))  # noqa: E731
    in_the_warm_start = lambda path: (path / "warm_start" / "3").exists()  # noqa: E731
    assert interrupted(path, signal.SIGKILL, in_the_warm_start, of)[0] == -signal.SIGKILL
    status, err = interrupted(path, signal.SIGTERM, metrics_hold(2), of)
    assert status == 75 and "stopping after saving" in err and re.search(r"goes on at update [3-6] of the warm", err)
    step = len(rows(path)) - 1
    assert step < 3 and f"saved step {step}; the same command goes on" in err
    status, err = interrupted(path, signal.SIGKILL, metrics_hold(3), of)  # at its start, if step 2 was over before
    assert status == -signal.SIGKILL and (step == 2 or f"goes on at step {step}" in err)
    for each in (whole, path):
        said = succeed("train", *of(each), **AS_USERS).stderr
    assert re.search(r"goes on at step [12]", said) and re.search(r"responses of the evaluation (\d+)/\1 ", said)
    assert metrics(whole) == metrics(path) and len(metrics(whole)) == 4
    trained = rows(whole)[1:]
    assert [row["train/policy_age_max"] for row in trained] == [1, 3, 5]
    assert [row["train/reference_age"] for row in trained] == [2, 4, 2]
    gap = [abs(row["train/kl_reference_k2"] - row["train/kl_behavior_k2"]) for row in trained]
    assert max(gap[:2]) < 1e-6 < gap[2], "only in the last step the reference is another policy than that which drew"
    assert not {"train/entropy", "train/sampler_logp_gap"} & trained[-1].keys(), "what nothing computed"
    (step, saved, cursor), (other_step, other, other_cursor) = final_state(whole), final_state(path)
    assert len(saved.past) == 2 and [int(policy.version) for policy in saved.past] == [3, 5]
    assert saved.pending.begun.tolist() == [2] * 2 and 0 < saved.pending.rollout.loss_mask.sum() < 8 * 36
    assert (step, cursor) == (other_step, other_cursor)
    # The models of two runs are equal, but no one object, so that their trees have other structures.
    for (path, leaf), same in zip(jax.tree_util.tree_leaves_with_path(saved), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(leaf, same, err_msg=str(path))


MINE = """
import jax.numpy as jnp

def broken(logp): return 0 * jnp.log(logp)
"""
REWARD = """
def flaky(prompt, response, answer, task):
    if task == "sorting": raise KeyError("no such thing")
    return float(len(response) % 2)
"""


def test_a_reward_that_raises_is_named_and_counted_and_a_run_that_applies_no_update_says_why_and_fails(folder):
    """The loss is NaN, and its gradient 0."""
    (folder / "broken.py").write_text(MINE)
    (folder / "flaky.py").write_text(REWARD)
    flags = "warm_start.steps=0", "steps=1", f"objective.name={folder}/broken.py:broken", "objective.clip="
    flags += f"reward.functions=verifier,{folder}/flaky.py:flaky", "reward.weights={'flaky': 0.5}"
    flags += "evaluation.function=flaky", "reward.max_failures=0.9", "model.checkpoint="
    done = run("train", *train_arguments(folder / "flaky", *(f"--config.{flag}" for flag in flags)))
    assert done.returncode == 1 and "no update of this run was applied, 2 were not finite" in done.stderr, done.stderr
    assert "step 1: update 1 of 2 was skipped: the loss is NaN: all of its inputs are finite" in done.stderr
    row = rows(folder / "flaky")[-1]
    assert row["train/reward_failures"] > 0 and row["eval/sorting/mean@4"] == 0
    assert row["train/reward/flaky"] == row["train/accuracy"] > 0 and row["train/reward/verifier"] == 0
    assert "warning: problem" in done.stderr and "(sorting)" in done.stderr and "no such thing" in done.stderr


REFUSED = {
    "--workdir=": "--workdir is empty; give it a value",
    "--watchdog_seconds=nan": "--watchdog_seconds=nan is not a finite number", "--config.objective.beta=much": "much",
    "--config.rollout.max_prompt=5 --config.rollout.max_new=20": "rollout.max_prompt",
    "--config.data.heldout_size=0": "held", "--config.reward.function=nofile.py:f": "nofile.py",
    "--config.rollout.max_new=2000": "exceed", "--config.reference.every=3": "reference.every",
    "--config.optimizer.decay=linear": "decay",
    "--config.behavior.source=sampler --config.objective.sampler_correction=2.0": "unset objective.sampler_correction",
    "--config.behavior.source=proximal": "at most objective.sampler_correction: set it",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_mistakes_are_met_at_the_door(folder, flags):
    status, line = call("train", *train_arguments(folder / "refused", *flags.split()))
    assert status == 2 and REFUSED[flags] in line
    assert not (folder / "refused" / "metrics.jsonl").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENAMETOOLONG])
def test_a_file_that_cannot_be_written_is_one_line(number, capsys):
    def main(options):
        raise OSError(number, os.strerror(number), "file")

    with pytest.raises(SystemExit) as left:
        cli.run(main, ["main"])
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: {os.strerror(number)}: file; what was saved before is intact\n"
