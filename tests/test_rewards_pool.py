"""A user's reward function may do anything; the run goes on."""

import os
import time

import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.rewards import Scorer

REWARD = """
import os, signal, subprocess, sys, time
print("printed at import")

def reward(prompt, response, answer, task):
    print("printed in a call")
    if response == "raise":
        raise KeyError("of mine\\nover two lines")
    if response == "hang":
        time.sleep(1000)
    if response == "spin":
        while True:
            pass
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(0)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "memory":
        return len(bytearray(1 << 40))
    if response == "nan":
        return float("nan")
    if response == "none":
        return None
    if response == "large":
        return 2.0
    if response == "child":
        subprocess.Popen(["sleep", "1000"]).wait()
    if response == "pid":
        open(answer, "a").write(f"{os.getpid()}\\n")
    return float(response == answer) if task == "t" else 0.5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return path


def problem(id, answer="yes", task="t"):
    return Problem(id, task, "prompt", "solution", answer)


def test_survives_everything_and_names_the_problem(file):
    expected = {
        "raise": "KeyError: 'of mine",
        "hang": "longer than 0.5 s",
        "spin": "longer than 0.5 s",
        "exit": "exit status 3",
        "sys.exit": "SystemExit",
        "kill": "SIGKILL",
        "memory": "MemoryError",
        "nan": "returned nan, not a number in 0..1",
        "none": "TypeError",
        "large": "returned 2.0, not a number in 0..1",
        "child": "longer than 0.5 s",
    }
    items = []
    for i, name in enumerate(expected):
        items += [(problem(100 + i), name), (problem(i), "yes"), (problem(i), "no"), (problem(i, task="u"), "yes")]
    with Scorer(f"{file}:reward", workers=2, timeout_seconds=0.5, memory_mb=512, max_failures=0.3) as scorer:
        for _ in range(2):
            scores = scorer.score(items)
            assert scores.correct.dtype == np.float32
            assert scores.correct.tolist() == [0.0, 1.0, 0.0, 0.5] * len(expected)
            assert len(scores.failures) == len(expected)
            for i, (line, says) in enumerate(zip(scores.failures, expected.values(), strict=True)):
                assert line.startswith(f"problem {100 + i} (t): ") and says in line and "\n" not in line


def test_stops_when_too_many_fail(file):
    items = [(problem(7), "raise"), (problem(8), "raise"), (problem(9), "yes"), (problem(9), "yes")]
    with Scorer(f"{file}:reward", workers=1, max_failures=0.5) as scorer:
        assert len(scorer.score(items).failures) == 2
        with pytest.raises(RuntimeError, match="failed on 2 of 3 samples, more than max_failures=0.5.*problem 7"):
            scorer.score(items[:3])
        assert scorer.score([]).correct.shape == (0,)


def test_workers_start_fast_and_end_with_the_scorer(file, tmp_path):
    start, pids = time.monotonic(), tmp_path / "pids"
    with Scorer(f"{file}:reward", workers=2) as scorer:
        scorer.score([(problem(0, answer=str(pids)), "pid")] * 50)
        assert time.monotonic() - start < 5
        running = {int(line) for line in pids.read_text().split()}
    assert 1 <= len(running) <= 2 and os.getpid() not in running
    for pid in running:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("reward", "must be of the form FILE.py:NAME"),
        ("{folder}/my_reward.py", "must be of the form FILE.py:NAME"),
        ("{folder}/absent.py:reward", "there is no file"),
        ("{folder}/my_reward.py:rewrad", "defines no function 'rewrad'"),
        ("{folder}/broken.py:reward", "SyntaxError"),
        ("{folder}/dies.py:reward", "exit status 4"),
    ],
)
def test_a_function_that_cannot_be_loaded(file, function, says):
    (file.parent / "broken.py").write_text("def reward(:\n")
    (file.parent / "dies.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(ValueError, match=says) as error:
        Scorer(function.format(folder=file.parent))
    assert "\n" not in str(error.value)


def test_settings_out_of_range():
    for bad in (dict(workers=0), dict(timeout_seconds=0), dict(memory_mb=1), dict(max_failures=1.5)):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Scorer(**bad)


def test_builtin_verifiers_run_in_process():
    items = [(problem(0, "12", "arithmetic"), "Answer: 12"), (problem(1, "12", "arithmetic"), "Answer: 13")]
    with Scorer() as scorer:
        scores = scorer.score(items)
        assert scores.correct.tolist() == [1.0, 0.0] and scores.failures == []
        with pytest.raises(ValueError, match="task 'mine' has no built-in verifier"):
            scorer.score([(problem(0, task="mine"), "x")])
