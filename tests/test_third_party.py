"""What can be known of the comparisons without the peers: they parse, explain themselves, and fail in a line."""

import ast
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import processes
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*benchmark.py", "parity.py")
    for path in (ROOT / "third_party").glob(f"*/{pattern}")
    if path.parent.name != "common"
)
PEERS = {"torch", "peft", "transformers", "trl", "tunix", "schedulefree", "datasets", "tokenizers"}


def run(script, *arguments):
    return processes.execute(ROOT / script, *arguments, timeout=120, JAX_PLATFORMS="cpu")


def test_every_peer_has_a_script_and_requirements():
    assert len(SCRIPTS) == 9
    for script in SCRIPTS:
        requirements = (ROOT / script).parent / "requirements.txt"
        pins = [line for line in requirements.read_text().splitlines() if line.startswith("torch")]
        assert all("==" in pin for pin in pins), f"{requirements}: an unpinned torch pulls gigabytes"


def test_the_page_names_every_script():
    """Its table has a command for each file that runs by itself, and no other; end_to_end.py runs peer.py."""
    page = (ROOT / "third_party/README.md").read_text()
    programs = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "third_party").glob("*/*.py")
        if "__main__" in path.read_text() and path.name != "peer.py"
    }
    assert set(re.findall(r"\bpython (third_party/\S+\.py)", page)) == programs


@pytest.mark.parametrize("script", SCRIPTS)
def test_peers_are_imported_only_where_they_are_used(script):
    """No peer is imported at the top of a file, so that help and our side work without it."""
    for path in [ROOT / script, *(ROOT / "third_party/common").glob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & PEERS, path


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script):
    done = run(script, "--help")
    assert done.returncode == 0 and "--peer_python" in done.stdout and "--json" in done.stdout, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_peer_that_is_not_installed_is_one_clear_line(script, tmp_path):
    bare = tmp_path / "python"  # this interpreter without its site-packages: surely without the peer
    bare.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    (tmp_path / "numpy.py").write_text("")  # the scripts import it for arrays
    done = run(script, f"--peer_python={bare}")
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip()
    assert "\n" not in line and "is not installed in" in line and "requirements.txt" in line, done.stderr


def test_our_side_of_the_gpu_benchmark_runs_in_small():
    done = run("third_party/transformers/gpu_benchmark.py", "--worker=ours", "--smoke")
    found = json.loads(done.stdout)
    assert found.keys() == {"device", "bandwidth", "matrix", "few", "new", "update"}, done.stderr
    assert all(value > 0 for value in found.values() if isinstance(value, float))


def test_our_side_takes_a_step_of_every_case():
    """Each builder of ours runs: here at a tiny size, in a worker as the benchmark starts it."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import ours\n"
        "shape = dict(vocab=32, hidden=8, mlp=8, layers=1, heads=2, kv_heads=1, head_dim=4)\n"
        "task = dict(rows=8, prompt=3, new=5, samples=4, responses=16, mean=3)\n"
        "for build in ours.BUILDERS.values(): build(shape, task)()\n"
        "print('done', len(ours.BUILDERS))\n"
    )
    done = processes.execute("-c", program, ROOT / "third_party/common", timeout=240)
    assert done.stdout == "done 4\n", done.stderr


@pytest.fixture(scope="module")
def interleave():
    sys.path.insert(0, str(ROOT / "third_party/common"))
    try:
        yield importlib.import_module("interleave")
    finally:
        sys.path.pop(0)


def test_an_idle_worker_takes_no_time_from_the_other(interleave):
    """A worker with a thread that spins without end advances during its turns alone."""
    program = (
        "import sys, threading, time\n"
        "threading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\n"
        "for line in sys.stdin: print('{\"seconds\": 1.0}', flush=True)\n"
    )
    command = [sys.executable, "-c", program]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ticks():  # of the processor's time, as /proc counts them: 100 a second
        fields = pathlib.Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    try:
        for _ in range(2):
            assert interleave.turn(worker, "theirs", "update:m1") == {"seconds": 1.0}
            os.waitpid(worker.pid, os.WUNTRACED)
            before = ticks()
            time.sleep(0.3)
            assert ticks() == before
    finally:
        worker.kill()
        worker.wait()
