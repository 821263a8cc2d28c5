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
from rpg_jax.rewards import Scorer, pool

linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found through /proc")

REWARD = '''
import ctypes, os, signal, socket, sys, time
print("printed at import")

def breed(file, depth):
    """Two children, each of which leaves the session, does the same one less deep, and stays."""
    for _ in range(2 * (depth > 0)):
        if os.fork() == 0:
            os.setsid()
            open(file, "a").write(f"{os.getpid()}\\n")
            breed(file, depth - 1)
            if os.fork():
                os._exit(0)  # the grandchild stays, an orphan
            open(file, "a").write(f"{os.getpid()}\\n")
            time.sleep(1000)

def reward(prompt, response, answer, task):
    print("printed in a call")
    if response == "raise":
        raise KeyError("of mine\\nover two lines")
    if response == "hang":
        time.sleep(1000)
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit(0)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "memory":
        return len(bytearray(1 << 40))
    if response == "group":
        os.killpg(0, signal.SIGKILL)
    if response == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if response == "stdin":
        sys.stdin.readline()
    if response == "fork":
        os.fork()
    if response == "files":
        return len([open(__file__) for _ in range(300)]) / 300
    if response == "private":
        return float(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0)  # PR_GET_DUMPABLE
    if response == "connect":
        socket.create_connection(("127.0.0.1", int(answer)), 5).close()
        return 1.0
    forged = {"pipes": b"{no json\\n", "forge": b'{"value": 1.0, "secret": "guessed"}\\n'}
    for descriptor in range(3, 20) if response in forged else ():
        try:
            os.write(descriptor, forged[response])
        except OSError:
            pass
    if response == "shown":
        return type("Shown", (), {"__repr__": lambda self: 1 / 0})()
    if response == "said":
        raise type("Said", (Exception,), {"__str__": lambda self: 1 / 0})()
    if response == "daemons":
        breed(answer, 2)
    if response == "bomb":
        breed(answer, 5)
        time.sleep(1000)
    if response == "large bomb":
        open(answer, "a").close()
        os.kill(os.getppid(), signal.SIGSTOP)  # the warden, until the bomb is larger than it allows
        breed(answer, 5)
        while len(open(answer).read().split()) <= 16:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGCONT)
        time.sleep(1000)
    if response == "pid":
        open(answer, "a").write(f"{os.getpid()}\\n")
    return float(response == answer) if task == "t" else 0.5
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD)
    return path


def line_of(text):
    return next(n for n, line in enumerate(REWARD.splitlines(), 1) if text in line)


def problem(id, answer="yes", task="t"):
    return Problem(id, task, "prompt", "solution", answer)


def test_survives_everything_and_names_the_problem(file):
    expected = {
        "raise": f"reward function reward: my_reward.py:{line_of('raise KeyError(')}: KeyError: 'of mine",
        "hang": "longer than 0.5 s", "exit": "exit status 3", "sys.exit": "SystemExit", "kill": "SIGKILL",
        "memory": "MemoryError", "group": "SIGKILL", "stop": "longer than 0.5 s", "pipes": "it wrote to our pipe",
        "forge": "it wrote to our pipe", "shown": "ZeroDivisionError",
        "said": f"my_reward.py:{line_of('raise type(')}: Said",
    }  # fmt: skip
    items = []
    for i, name in enumerate(expected):
        items += [(problem(100 + i), name), (problem(i), "yes"), (problem(i), "no"), (problem(i, task="u"), "yes")]
    with Scorer(f"{file}:reward", workers=2, timeout_seconds=0.5, memory_mb=512, max_failures=0.3) as scorer:
        scores = scorer.score(items)
    assert scores.correct.dtype == np.float32
    assert scores.correct.tolist() == [0.0, 1.0, 0.0, 0.5] * len(expected)
    for i, (line, says) in enumerate(zip(scores.failures, expected.values(), strict=True)):
        assert line.startswith(f"problem {100 + i} (t): ") and says in line and "\n" not in line


def left(pids):
    """Of the processes that wrote themselves down, those that still run."""
    return [pid for pid in map(int, pids.read_text().split()) if pathlib.Path(f"/proc/{pid}").exists()]


@linux
def test_a_fork_bomb_ends_and_orphans_do_not_outlive_the_scorer(file, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_MOST_PROCESSES", 16)
    bomb, daemons = tmp_path / "bomb", tmp_path / "daemons"
    daemons.touch()
    with Scorer(f"{file}:reward", workers=2, timeout_seconds=20, max_failures=1) as scorer:
        scores = scorer.score([(problem(3, str(bomb)), "large bomb"), (problem(4), "yes")])
        assert scores.correct.tolist() == [0, 1] and len(scores.failures) == 1
        assert "reward function reward: ended its process (it had more than 16 processes)" in scores.failures[0]
        assert len(bomb.read_text().split()) > 16 and not left(bomb)
        scores = scorer.score([(problem(5, str(daemons)), "daemons"), (problem(4), "yes")])
        assert scores.failures == []
        deadline = time.monotonic() + 10
        while len(left(daemons)) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(left(daemons)) >= 6
    assert not left(daemons)


@linux
def test_a_stopped_warden_and_its_stopped_worker_end_with_the_scorer(file, tmp_path):
    pids = tmp_path / "pids"
    with Scorer(f"{file}:reward", workers=1, timeout_seconds=20) as scorer:
        scorer.score([(problem(1, str(pids)), "pid")])
        (worker,) = left(pids)
        stat = pathlib.Path(f"/proc/{worker}/stat").read_text()
        warden = int(stat.rpartition(")")[2].split()[1])
        pids.write_text(f"{warden} {worker}")
        for pid in left(pids):
            os.kill(pid, signal.SIGSTOP)
    assert not left(pids)


@linux
def test_nothing_outlives_a_run_that_is_killed(file, tmp_path):
    pids = tmp_path / "pids"
    code = (
        "from types import SimpleNamespace; from rpg_jax.rewards import Scorer; "  # rpg_jax.data takes 7 s to import
        f"problem = SimpleNamespace(id=0, task='t', prompt='', answer={str(pids)!r}, columns={{}}); "
        f"Scorer({str(file) + ':reward'!r}, workers=1, timeout_seconds=100).score([(problem, 'bomb')])"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not pids.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    run.wait()
    while left(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pids.exists() and not left(pids)


def test_forks_that_return_reading_input_and_questions_larger_than_a_pipe_disturb_no_answer(file):
    long = "ü" * 300_000
    items = [(problem(i), ("fork", "yes", "stdin", "no")[i % 4]) for i in range(40)]
    items += [(problem(40, long), long), (problem(41), long), *items[:4]]
    with Scorer(f"{file}:reward", workers=2) as scorer:
        scores = scorer.score(items)
    assert scores.failures == [] and scores.correct.tolist() == [0, 1, 0, 0] * 10 + [1, 0] + [0, 1, 0, 0]


@linux
def test_files_are_few_and_what_a_function_starts_cannot_look_into_its_worker(file):
    with Scorer(f"{file}:reward", workers=1, max_failures=1) as scorer:
        scores = scorer.score([(problem(0), "files"), (problem(1), "private")])
    assert scores.correct.tolist() == [0, 1] and "Too many open files" in scores.failures[0]


@linux
def test_the_network_is_off_unless_it_is_asked_for_or_a_warning_says_why_not(file, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        item = problem(0, answer=str(server.getsockname()[1])), "connect"
        with Scorer(f"{file}:reward", workers=1, network=True) as scorer:
            assert scorer.score([item]).correct.tolist() == [1]
        with Scorer(f"{file}:reward", workers=1, max_failures=1) as scorer:
            scores = scorer.score([item])
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
            seen += scorer.score([(problem(1), "yes")]).correct.tolist()
    assert seen == [0.25, 0.75]


@pytest.mark.parametrize(("function", "says"), [
    ("reward", "must be one of verifier, dapo, boxed, math_verify, or of the form FILE.py:NAME"),
    ("{folder}/absent.py:reward", "there is no file"),
    ("{folder}/my_reward.py:rewrad", "my_reward.py defines no function 'rewrad'; it defines breed, reward"),
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
