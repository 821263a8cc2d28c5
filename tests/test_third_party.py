"""What can be known of the comparisons without the peers: they parse, explain themselves, and fail in a line."""

import json
import pathlib
import sys

import processes
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*benchmark.py", "parity.py")
    for path in (ROOT / "third_party").glob(f"*/{pattern}")
    if path.parent.name != "common"
)


def run(script, *arguments):
    return processes.execute(ROOT / script, *arguments, timeout=120, JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_a_line_where_the_peer_is_not_installed(script, tmp_path):
    done = run(script, "--help")
    assert len(SCRIPTS) == 9 and done.returncode == 0, done.stderr
    assert "--peer_python" in done.stdout and "--json" in done.stdout
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
