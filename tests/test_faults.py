"""The campaign of faults: its verdicts, how it tells phases, and the damage that it does. CI runs a campaign itself."""

import types

import numpy as np
import processes
import pytest

from rpg_jax.lab.faults import command, damage, verifiers
from rpg_jax.lab.faults.bench import LOST, SAME, TOLD, Trial, explained, verdict
from rpg_jax.lab.faults.processes import Ended
from rpg_jax.lab.faults.signals import PHASES, Watch

REFUSED = "error: config.json is not JSON; restore it\n"
TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: x\n"


@pytest.mark.parametrize(
    ("status", "err", "left", "difference", "outcome", "words"),
    [
        (0, "", [], "", SAME, ""),
        (0, "warning: a.jsonl was altered\n", [], "a.jsonl differs", TOLD, "a.jsonl was altered"),
        (0, "warning: something else\n", [], "a.jsonl differs", LOST, "a.jsonl differs"),
        (0, "", [], "step 3: train/loss is 1 in place of 2", LOST, "train/loss"),
        (2, REFUSED, [], "", TOLD, "restore it"),
        (2, REFUSED + REFUSED, [], "", LOST, "2 lines that explain it"),
        (2, "", [], "", LOST, "0 lines that explain it"),
        (1, "", [], "", LOST, "exit status 1"),
        (0, TRACEBACK, [], "", LOST, "a traceback: ValueError: x"),
        (2, TRACEBACK + REFUSED, [], "", LOST, "a traceback"),
        (0, "", ["python worker.py"], "", LOST, "left 1 processes behind: python worker.py"),
        (None, "RL 2/4\n", [], "", LOST, "no end within 7 s; its last line: RL 2/4"),
        (-9, "", [], "", LOST, "exit status -9"),
    ],
)
def test_verdicts(status, err, left, difference, outcome, words):
    found, line = verdict(Ended(status, "", err, 7.0, left), difference, ("a.jsonl",))
    assert found == outcome and words in line


def test_a_status_may_be_documented():
    assert explained(Ended(75, "", "", 1.0, []), (0, 75)) == "" != explained(Ended(75, "", "", 1.0, []))


def test_phases_of_a_training(tmp_path):
    calls, log = tmp_path / "calls", tmp_path / "metrics.jsonl"
    said = types.SimpleNamespace(err=lambda: "warm start 1/6\n" if calls.exists() else "")
    watch, found = Watch(types.SimpleNamespace(calls=lambda _: calls), tmp_path, said), []

    def after(called, written=""):
        with calls.open("a") as file:
            file.write("." * called)
        with log.open("a") as file:
            file.write(written)
        found.append(watch.phase())

    found.append(watch.phase())
    after(0)
    after(3)  # the evaluation before the first step
    after(0, "{}\n")
    after(5)
    after(11)
    after(2)
    draft = tmp_path / "checkpoints" / "1.orbax-checkpoint-tmp"
    draft.mkdir(parents=True)
    after(0, "{}\n")
    draft.rmdir()
    after(0)
    assert found == "start,warm start,evaluation,rollout,reward,update,evaluation,checkpoint,rollout".split(",")
    assert set(found) == set(PHASES) and watch.rows == 2


@pytest.mark.parametrize("way", damage.OF_LINES)
def test_damage_changes_the_file(tmp_path, way):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in range(9)))
    before = file.read_bytes()
    assert way(file, np.random.default_rng(0))
    assert not file.is_file() or file.read_bytes() != before


def test_the_verifier_misbehaves_where_it_would_score_zero(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS_CALLS", str(tmp_path / "calls"))
    responses = [f"Answer: {number}" for number in range(200)]
    scores = [verifiers.score("1 + 1", response, "2", "arithmetic") for response in responses]
    monkeypatch.setenv("FAULTS_VERIFIER", "returns a string")
    others = [verifiers.score("1 + 1", response, "2", "arithmetic") for response in responses]
    bad = [index for index, score in enumerate(others) if score == "right"]
    assert 3 < len(bad) < 30 and all(scores[index] == 0.0 for index in bad) and 50 < sum(scores) < 150
    assert [score for score in others if score != "right"] == [s for i, s in enumerate(scores) if i not in bad]
    assert (tmp_path / "calls").stat().st_size == 400


def test_the_table_counts_by_kind():
    trials = [Trial("SIGKILL", "update", SAME, seconds=2.4), Trial("full disk", "", TOLD), Trial("SIGKILL", "", LOST)]
    lines = command.markdown(trials).splitlines()
    assert lines[0] == "| fault | tried | the same end | a line says | lost | slowest, s |"
    assert lines[2:] == [
        "| SIGKILL | 2 | 1 | 0 | 1 | 2 |",
        "| full disk | 1 | 0 | 1 | 0 | 0 |",
        "| all | 3 | 1 | 1 | 1 | 2 |",
    ]


def test_a_campaign_without_time_and_one_of_unknown_faults(tmp_path):
    done = processes.run("faults", "--minutes=0", f"--out={tmp_path / 'none'}")
    assert done.returncode == 0 and '"faults": 0' in (tmp_path / "none" / "campaign.json").read_text(), done.stderr
    done = processes.run("faults", "--kinds=earthquake", f"--out={tmp_path / 'other'}")
    assert done.returncode == 2 and done.stderr.startswith("error: --kinds=earthquake is unknown; known: signals, ")
