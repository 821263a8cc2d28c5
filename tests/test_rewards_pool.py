"""A user's reward function may do anything; the run goes on."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from rpg_jax.data import Problem
from rpg_jax.rewards import Scorer

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")

REWARD = """
import ctypes, os, signal, socket, subprocess, sys, time
print("printed at import")
eaten = []

def note(file, *pids):
    open(file, "a").writelines(f"{pid}\\n" for pid in pids)

def reward(prompt, response, answer, task):
    print("printed in a call")
    if response == "raise": raise KeyError("of mine\\nover two lines")
    if response == "hang": time.sleep(1000)
    if response == "exit": os._exit(3)
    if response == "sys.exit": sys.exit(0)
    if response == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if response == "memory": return len(bytearray(1 << 40))
    while response == "memory in pieces": eaten.append(bytearray(1 << 24))
    while response == "memory in crumbs": eaten.append([None] * 1000)
    if response == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if response == "stdin": sys.stdin.readline()
    if response == "fork": os.fork()
    if response == "connect":
        socket.create_connection(("127.0.0.1", int(answer)), 5).close()
        return 1.0
    if response == "shown": return type("Shown", (), {"__repr__": lambda self: 1 / 0})()
    if response == "said": raise type("Said", (Exception,), {"__str__": lambda self: 1 / 0})()
    if response.startswith("children"):
        child = os.fork()
        if not child: time.sleep(1000)
        note(answer, os.getpid(), child, subprocess.Popen(["sleep", "1000"]).pid)
        if response == "children": os.setpgid(child, child)  # in a group of its own
        while response == "children, and dies": os._exit(3)
        while response == "children, and hangs": time.sleep(1000)
        while response == "children, and a call of C": ctypes.PyDLL(None).sleep(1000)  # no other thread can run
    return float(response == answer) if task == "t" else 0.5
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return path


def line_of(text):
    return next(n for n, line in enumerate(REWARD.splitlines(), 1) if text in line)


def problem(id, answer="yes", task="t"):
    return Problem(id, task, "prompt", "solution", answer)


HANGS = dict.fromkeys(["hang", "stop"], "longer than 0.5 s")
FAILS = {
    "raise": f"reward function reward: my_reward.py:{line_of('raise KeyError(')}: KeyError: 'of mine",
    "exit": "exit status 3", "sys.exit": "SystemExit", "kill": "signal SIGKILL", "shown": "ZeroDivisionError",
    "said": f"my_reward.py:{line_of('raise type(')}: user_reward.Said",
}  # fmt: skip
PLACES = {"memory": "1 << 40", "memory in pieces": "1 << 24", "memory in crumbs": "* 1000"}
EATS = {name: f"my_reward.py:{line_of(at)}: MemoryError (memory_mb=256)" for name, at in PLACES.items()}


@pytest.mark.parametrize(("seconds", "names", "shown"), [(0.5, HANGS, 0), (60, FAILS, 1), (60, EATS, 0)])
def test_survives_everything_and_names_the_problem(file, capfd, seconds, names, shown):
    """The first bug of a process is shown with its traceback, which a lack of memory is not."""
    items = []
    for i, name in enumerate(names):
        items += [(problem(100 + i), name), (problem(i), "yes"), (problem(i), "no"), (problem(i, task="u"), "yes")]
    with Scorer(f"{file}:reward", workers=2, timeout_seconds=seconds, memory_mb=256, max_failures=0.3) as scorer:
        scores = scorer.submit(items).result()
    assert scores.correct.dtype == np.float32
    assert scores.correct.tolist() == [0.0, 1.0, 0.0, 0.5] * len(names)
    for i, (line, says) in enumerate(zip(scores.failures, names.values(), strict=True)):
        assert line.startswith(f"problem {100 + i} (t): ") and says in line and "\n" not in line
    assert ("Traceback" in capfd.readouterr().err) == shown


def left(pids, seconds=10.0):
    """Of the processes that wrote themselves down, those that still run after so long; None where none did."""
    deadline = time.monotonic() + seconds
    while True:
        running = []
        for pid in map(int, pids.read_text().split() if pids.exists() else []):
            stat = pathlib.Path(f"/proc/{pid}/stat")
            running += [pid] if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX" else []
        if not running or time.monotonic() > deadline:
            return running if pids.exists() else None
        time.sleep(0.01)


@linux
@pytest.mark.parametrize("then", ["", ", and dies", ", and hangs", ", and is stopped"])
def test_nothing_of_a_session_outlives_its_worker(file, tmp_path, then):
    pids = tmp_path / "pids"
    seconds = 2 if then == ", and hangs" else 60
    with Scorer(f"{file}:reward", workers=2, timeout_seconds=seconds, max_failures=1) as scorer:
        scores = scorer.submit([(problem(3, str(pids)), f"children{then}"), (problem(4), "yes")]).result()
        assert scores.correct.tolist() == [0, 1]
        if then in (", and dies", ", and hangs"):
            assert ("exit status 3" if then == ", and dies" else "longer than 2 s") in scores.failures[0]
            assert left(pids) == [] and scorer.submit([(problem(4), "yes")]).result().correct.tolist() == [1]
        else:
            assert scores.failures == [] and len(running := left(pids, 0)) == 3
            if then:
                os.kill(running[0], signal.SIGSTOP)
    assert left(pids) == []


@linux
def test_nothing_outlives_a_run_that_is_killed(file, tmp_path):
    pids = tmp_path / "hangs", tmp_path / "calls"
    code = (
        "from types import SimpleNamespace as Row; from rpg_jax.rewards import Scorer; "  # rpg_jax.data takes 7 s
        "row = lambda file: Row(id=0, task='t', prompt='', answer=file, columns={}); "
        f"items = [(row({str(pids[0])!r}), 'children, and hangs'), "
        f"(row({str(pids[1])!r}), 'children, and a call of C')]; "
        f"Scorer({str(file) + ':reward'!r}, workers=2, timeout_seconds=100).submit(items).result()"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not all(map(pathlib.Path.exists, pids)) and run.poll() is None:
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert [left(each) for each in pids] == [[], []]


def test_forks_that_return_reading_input_and_questions_larger_than_a_pipe_disturb_no_answer(file):
    long = "ü" * 300_000
    items = [(problem(i), ("fork", "yes", "stdin", "no")[i % 4]) for i in range(40)]
    items += [(problem(40, long), long), (problem(41), long), *items[:4]]
    with Scorer(f"{file}:reward", workers=2) as scorer:
        scores = scorer.submit(items).result()
    assert scores.failures == [] and scores.correct.tolist() == [0, 1, 0, 0] * 10 + [1, 0] + [0, 1, 0, 0]


@linux
def test_the_network_is_off_unless_it_is_asked_for_or_a_warning_says_why_not(file, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        item = problem(0, answer=str(server.getsockname()[1])), "connect"
        with Scorer(f"{file}:reward", workers=1, network=True) as scorer:
            assert scorer.submit([item]).result().correct.tolist() == [1]
        with Scorer(f"{file}:reward", workers=1, max_failures=1) as scorer:
            scores = scorer.submit([item]).result()
    warned = f"warning: {file}:reward has the network, although it should not (" in capfd.readouterr().err
    assert scores.correct.tolist() == [warned]
    assert warned or "Network is unreachable" in scores.failures[0]


def test_an_edit_of_the_same_size_within_a_second_is_seen(tmp_path, monkeypatch):
    """Python's bytecode knows its source by size and seconds only."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "bytecode"))
    path, seen = tmp_path / "my_reward.py", []
    for score in (0.25, 0.75):
        path.write_text(f"def reward(prompt, response, answer, task): return {score}")
        os.utime(path, (1e9, 1e9))
        with Scorer(f"{path}:reward", workers=1) as scorer:
            seen += scorer.submit([(problem(1), "yes")]).result().correct.tolist()
    assert seen == [0.25, 0.75]


@pytest.mark.parametrize(("function", "says"), [
    ("reward", "must be one of verifier, dapo, boxed, math_verify, or of the form FILE.py:NAME"),
    ("{folder}/absent.py:reward", "there is no file"),
    ("{folder}/my_reward.py:rewrad", "my_reward.py defines no function 'rewrad'; it defines note, reward"),
    ("{folder}/broken.py:reward", "4096: broken.py:1: SyntaxError: "),
    ("{folder}/imports.py:reward", "4096: broken.py:1: SyntaxError: "),
    ("{folder}/lacks.py:reward", "4096: lacks.py:2: ModuleNotFoundError: No module named 'no_such_module'"),
    ("{folder}/dies.py:reward", "exit status 4"),
])  # fmt: skip
def test_a_function_that_cannot_be_loaded(file, function, says):
    (file.parent / "broken.py").write_text("def reward(:\n")
    (file.parent / "dies.py").write_text("import os\nos._exit(4)\n")
    (file.parent / "imports.py").write_text("\nimport broken\n")
    (file.parent / "lacks.py").write_text("\nimport no_such_module\n")
    with pytest.raises(ValueError, match=says) as error:
        Scorer(function.format(folder=file.parent), workers=1)
    assert "\n" not in str(error.value)
