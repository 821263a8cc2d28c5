"""The logs of a run: what is on disk after a write, a kill and a resume, and what a watcher sees."""

import json
import math
import os
import re
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rpg_jax.data import Problem
from rpg_jax.run.summary import write_summary
from rpg_jax.storage import logs
from rpg_jax.storage.logs import Progress, RunLog, jsonable, read_jsonl, write_json_atomic
from rpg_jax.storage.responses import ResponseLog
from rpg_jax.training.evaluation import Answered


def open_log(path, step=0, **settings):
    return RunLog(path, step, **{"config": {}, "tensorboard": False, **settings})


def test_rows_and_samples_are_on_disk_when_write_returns(tmp_path):
    for _ in range(2):  # the second is a run from its beginning, whose logs start empty
        with open_log(tmp_path) as log:
            samples = [{"response": "Answer: 7\n"}, {"response": "é"}]
            log.write({"step": 0, "train/reward": np.float32(0.5)}, samples=samples)
            assert read_jsonl(tmp_path / "metrics.jsonl") == ([{"step": 0, "train/reward": 0.5}], 0)
            rows, _ = read_jsonl(tmp_path / "samples.jsonl")
            assert rows == [{"step": 0, "response": "Answer: 7\n"}, {"step": 0, "response": "é"}]


def test_numbers_become_json_and_those_that_are_not_finite_null(tmp_path):
    value = {"a": jnp.float32(2.5), "b": np.arange(2), "c": (np.int64(1), math.inf), "d": [jnp.nan], 3: True, "n": None}
    assert jsonable(value) == {"a": 2.5, "b": [0, 1], "c": [1, None], "d": [None], "3": True, "n": None}
    with open_log(tmp_path) as log:
        log.write({"step": 1, "a": float("nan"), "b": np.float32("-inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "a": None, "b": None}


@pytest.mark.parametrize("tail", ["", '{"step": 5, "x', '{"step": 5}', "\0\0"])
def test_resume_cuts_back_to_the_restored_step(tmp_path, tail):
    kept = None
    with open_log(tmp_path) as log:
        for step in range(1, 5):
            sampled = dict(samples=[{"n": 0}, {"n": 1}], heldout=[{"n": 2}])
            log.write({"step": step, "x": step}, **sampled, look=[{"ids": np.arange(step, dtype=np.int32)}])
            kept = log.rows() if step == 2 else kept
    for name in ("metrics", "samples", "heldout"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write(tail)
    with open_log(tmp_path, 2, rows=kept) as log:
        log.write({"step": 3, "x": -3}, look=[{"ids": np.zeros(0, np.int32)}] * 2)
        assert log.rows()["look"] == 4
    assert [row["step"] for row in logs.read_table(tmp_path / "look.parquet").to_pylist()] == [1, 2, 3, 3]
    rows, dropped = read_jsonl(tmp_path / "metrics.jsonl")
    assert rows == [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 3, "x": -3}] and dropped == 0
    assert [row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")[0]] == [1, 1, 2, 2]
    assert read_jsonl(tmp_path / "heldout.jsonl") == ([{"step": 1, "n": 2}, {"step": 2, "n": 2}], 0)


def test_a_checkpoint_knows_the_rows_that_it_was_saved_with(tmp_path, capfd):
    with open_log(tmp_path) as log:
        log.write({"step": 0, "x": 0.25}, heldout=[{"n": 0}])
        at_the_start = log.rows()
        log.write({"step": 1, "x": 1.5}, samples=[{"n": 1}])
        at_one = log.rows()
        log.write({"step": 1, "late": 2}, heldout=[{"n": 3}])  # an evaluation that a resume finished
        rows = log.rows()
        log.write({"step": 2})
    whole = {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in rows if name != "look"}
    open_log(tmp_path, 1, rows=rows).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")[0]] == [0, 1, 1]
    with open_log(tmp_path, 1, rows=rows) as log:
        assert log.rows() == rows
        log.write({"step": 2})
    assert whole == {name: (tmp_path / f"{name}.jsonl").read_bytes() for name in whole}
    open_log(tmp_path, 1, rows=at_one).close()  # the evaluation of step 1 will be done again
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")[0]] == [0, 1]
    # A run that was stopped before its first step keeps what it evaluated at step 0.
    open_log(tmp_path, 0, rows=at_the_start).close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")[0]] == [0]
    assert capfd.readouterr().err == ""
    open_log(tmp_path, 1, rows=rows).close()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"warning: {tmp_path}/metrics.jsonl has lost 2 rows since step 1 was saved" and len(lines) == 3


def test_cutting_back_replaces_the_file_atomically(tmp_path, monkeypatch):
    with open_log(tmp_path) as log:
        for step in (1, 2):
            log.write({"step": step})
    before, synced = (tmp_path / "metrics.jsonl").read_bytes(), []

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        open_log(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and len(synced) == 1


def test_only_an_unfinished_last_line_is_dropped_and_a_row_without_a_step_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_jsonl(path) == ([], 0)
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_jsonl(path) == ([{"step": 1}, {"step": 2}], 1)
    for broken in ('{"st', "7", ""):
        path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is not a JSON object"):
            read_jsonl(path)
    for line, words in (("{}", "'step' is absent"), ('{"step": "x"}', "'step' is 'x'")):
        path.write_text(f'{{"step": 1}}\n{line}\n')
        with pytest.raises(ValueError, match=f"metrics.jsonl, line 2: {words}"):
            open_log(tmp_path, 1)


def test_write_json_atomic_keeps_the_old_file_on_failure(tmp_path):
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"accuracy_after": np.float64(0.9), "x": float("inf")})
    assert json.loads(path.read_text()) == {"accuracy_after": 0.9, "x": None}
    with pytest.raises(TypeError):
        write_json_atomic(path, {"x": object()})
    assert json.loads(path.read_text())["accuracy_after"] == 0.9
    assert os.listdir(tmp_path) == ["summary.json"]


def test_only_the_first_process_writes(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    with open_log(tmp_path, tensorboard=True) as log, log.progress("RL", 0, 1) as progress:
        log.write({"step": 1}, samples=[{"response": ""}])
        progress(1)
    assert not os.listdir(tmp_path) and capfd.readouterr().err == ""


def events(folder):
    """Every event in a TensorBoard folder, in order: the TFRecord format read by hand."""
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def test_tensorboard_events_and_their_purge(tmp_path):
    with open_log(tmp_path, tensorboard=True) as log:
        log.write({"step": 1, "train/reward": 0.5, "train/bad": float("nan"), "text": "no number"})
    values = [(e.step, v.tag, v.simple_value) for e in events(tmp_path / "tensorboard") for v in e.summary.value]
    assert values == [(1, "train/reward", 0.5)]
    with open_log(tmp_path, 1, tensorboard=True) as log:
        log.write({"step": 2, "train/reward": 0.8})
    starts = [e.step for e in events(tmp_path / "tensorboard") if e.HasField("session_log")]
    assert starts[-1] == 2  # TensorBoard hides what it has from this step on


def test_wandb_keeps_its_run_id_over_a_resume(tmp_path, monkeypatch):
    wandb = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = wandb.init.return_value.__enter__.return_value = wandb.init.return_value
    for step in (0, 1):
        with open_log(tmp_path, step, wandb="project", config={"seed": 0}) as log:
            log.write({"step": step + 1, "train/reward": 0.5, "train/bad": float("nan")})
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"] and re.fullmatch(r"[0-9a-f]{8}", first["id"])
    assert first["project"] == "project" and first["resume"] == "allow" and first["config"] == {"seed": 0}
    assert run.define_metric.call_args_list == [mock.call("*", step_metric="step")] * 2
    assert run.log.call_args_list == [mock.call({"step": step, "train/reward": 0.5}) for step in (1, 2)]
    assert run.__exit__.call_count == 2


def test_progress_in_a_pipe_is_plain_lines(capfd, monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 10.5, 40.0, 40.1])
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(clock))
    with Progress("RL", 2, 6) as progress:
        progress(2)  # nothing to tell a time from
        progress(3, reward=0.123456)
        progress(4, reward=1)  # half a second later: too soon
        progress(5, reward=-1.0)
        progress(6, reward=2.0)  # the last one always shows
    assert capfd.readouterr().err.splitlines() == [
        "RL 2/6 | 00:05 gone",
        "RL 3/6 | reward 0.123 | 00:10 gone, about 00:30 left",
        "RL 5/6 | reward -1 | 00:40 gone, about 00:13 left",
        "RL 6/6 | reward 2 | 00:40 gone, about 00:00 left",
    ]


# The responses of an evaluation.


def test_responses_of_an_evaluation_are_read_back(tmp_path):
    problems = [Problem(7, "gcd", "4 and 6?", "", "2"), Problem(8, "gcd", "9 and 6?", "", "3")]
    arrays = np.float32([1, 0]), np.int32([1, 1]), np.array([True, True])
    answered = Answered(problems[0], ["2", "3"], *arrays, [], [None] * 2)
    ResponseLog(tmp_path, {"k": 2}, problems).write(answered)
    file = tmp_path / "responses.jsonl"
    (again,) = ResponseLog(tmp_path, {"k": 2}, problems).answered()
    assert again.texts == answered.texts and again.correct.tolist() == [1, 0]
    file.write_text(file.read_text().replace("}", ', "crc32": 7}'))  # as 0.2 wrote them
    assert ResponseLog(tmp_path, {"k": 2}, problems).missing() == [1]
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match="settings.json is not a JSON object; give another --out"):
        ResponseLog(tmp_path, {"k": 2}, problems)


def test_the_summary_has_the_first_and_the_last_evaluation(tmp_path):
    names = [f"eval/{task}/mean@4{end}" for task in ("sums", "all") for end in ("", "_low", "_high")]
    log, totals = tmp_path / "metrics.jsonl", {"seconds": 1.0, "tokens": 2, "compilations_after_warmup": 0}
    drawn = []

    def summary(*rows):
        log.write_text("".join(json.dumps({"step": step} | row) + "\n" for step, row in enumerate(rows)))
        return write_summary(tmp_path, totals, lambda rows, file: drawn.append(rows))

    low, high, last = (dict.fromkeys(names, score) for score in (0.25, 0.75, 0.5))
    written = summary(low, high, {"train/skipped_updates": 3}, last)
    assert written["skipped_updates"] == 3
    assert [written[name] for name in ("accuracy_before", "accuracy_after", "best_accuracy")] == [0.25, 0.5, 0.75]
    assert written["tasks"] == {"sums": {"before": (0.25,) * 3, "after": (0.5,) * 3}} and len(drawn[0]) == 4
    with pytest.raises(ValueError, match=r"metrics.jsonl has no evaluation any more; put its rows back"):
        summary({}, {})
