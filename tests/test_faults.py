"""The campaign of faults: its verdicts, and its verifier."""

import pytest
from faults import verifiers
from faults.bench import LOST, SAME, TOLD, Ended, explained, verdict

REFUSED = "error: config.json is not JSON; restore it\n"
TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: x\n"


@pytest.mark.parametrize(("status", "err", "left", "difference", "outcome", "words"), [
    (0, "", [], "", SAME, ""),
    (0, "warning: a.jsonl was altered\n", [], "a.jsonl differs", TOLD, "a.jsonl was altered"),
    (0, "warning: something else\n", [], "a.jsonl differs", LOST, "a.jsonl differs"),
    (0, "", [], "step 3: train/loss is 1 in place of 2", LOST, "train/loss"), (2, REFUSED, [], "", TOLD, "restore it"),
    (2, REFUSED + REFUSED, [], "", LOST, "2 lines that explain it"), (1, "", [], "", LOST, "exit status 1"),
    (0, TRACEBACK, [], "", LOST, "a traceback: ValueError: x"), (0, "", [7], "", LOST, "left 1 processes behind"),
    (None, "RL 2/4\n", [], "", LOST, "no end within the limit; its last line: RL 2/4"),
])  # fmt: skip
def test_verdicts(status, err, left, difference, outcome, words):
    found, line = verdict(Ended(status, err, left), difference, ("a.jsonl",))
    assert found == outcome and words in line
    assert explained(Ended(75, ""), (0, 75)) == "" != explained(Ended(75, ""))


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
