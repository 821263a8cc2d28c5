"""What can be known of the comparisons without the peers: they parse, explain themselves, and fail in a line."""

import json
import pathlib
import sys

import jax
import processes
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOUND = [path for name in ("*benchmark.py", "parity.py") for path in (ROOT / "third_party").glob(f"*/{name}")]
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in FOUND if path.parent.name != "common")


def run(script, *arguments):
    return processes.execute(ROOT / script, *arguments, timeout=120, JAX_PLATFORMS="cpu")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_a_line_where_the_peer_is_not_installed(script, tmp_path):
    done = run(script, "--help")
    assert len(SCRIPTS) == 9 and done.returncode == 0, done.stderr
    assert "--peer_python" in done.stdout and "--json" in done.stdout
    bare = tmp_path / "python"  # this interpreter without its site-packages: surely without the peer
    processes.fake(bare, f'PYTHONPATH={tmp_path} exec "{sys.executable}" -S "$@"')
    (tmp_path / "numpy.py").write_text("")  # the scripts import it for arrays
    done = run(script, f"--peer_python={bare}")
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip()
    assert "\n" not in line and "is not installed in" in line and "requirements.txt" in line, done.stderr


def test_the_gpu_benchmark_runs_in_small(tmp_path):
    """Ours in full, beside a made-up peer, of which one variant ends their process late and the other is written."""
    peer, file = tmp_path / "peer", tmp_path / "found.json"
    replies = dict(versions=dict(versions=dict(torch="2")), eager=dict(seconds=1e3, peak=7), compiled=dict(seconds=1))
    cases = "".join(f"{name}) echo '{json.dumps(reply)}';;" for name, reply in replies.items())
    cases = cases.replace("compiled)", "compiled) n=1$n; [ $n != 111 ] || exit;")
    processes.fake(peer, f"while read step; do case $step in {cases} esac; done")
    works = ["update:plain", "update:packed"]
    script, flags = ROOT / "third_party/transformers/gpu_benchmark.py", f"--peer_python={peer} --json={file} --trace"
    flags += f" --works={','.join(works)} --rounds=3 --limit=600 --smoke"
    done = processes.execute(script, *flags.split(), timeout=1800, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [*found["works"]] == works and found["device"] == "cpu" and found["versions"]["jax"] == jax.__version__
    for one in (*found["works"].values(), found["peer"]["eager"]["update:plain"]):
        seconds, tokens = one["seconds"], sum(one["lengths"])
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"] and one["rounds"] == 3
        assert one["tokens_per_second"] == pytest.approx(tokens / seconds["median"])
        assert one["share"] == pytest.approx(one["least"] / seconds["median"])
    assert found["works"]["update:packed"]["kernels"] == {"failed": "it has no stream of a GPU"}  # a CPU has none
    assert found["peer"].keys() == {"versions", "eager"} and one["seconds"]["median"] == 1e3 and one["peak"] == 7
    assert done.stdout.count("compiled is left out: its process ended") == 1 and "1000000.00 ms [" in done.stdout
    done = processes.execute(script, "--alone", "--smoke", JAX_PLATFORMS="cuda")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "does JAX find one? " in done.stderr and not done.stderr.endswith(": \n")


def test_kernels_of_a_trace_are_those_of_streams(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "third_party/transformers")
    import gpu_ours

    launch = "events {{ metadata_id: {} offset_ps: {} duration_ps: {} }}".format
    lines = {  # times in ps
        "Stream #1(Compute)": launch(1, 0, 2_000_000) + launch(2, 3_000_000, 500_000) + launch(1, 5_000_000, 1_000_000),
        "Stream #2(MemcpyD2H)": launch(3, 8_000_000, 2_000_000),
        "XLA Ops": launch(2, 0, 9_000_000_000),
    }
    lines = "".join(f'lines {{ name: "{name}" {events} }}' for name, events in lines.items())
    names = "".join(f'event_metadata {{ key: {n} value {{ id: {n} name: "k{n}" }} }}' for n in (1, 2, 3))
    text = "".join(f'planes {{ name: "{name}" {lines} {names} }}' for name in ("/device:GPU:0", "/host:CPU"))
    proto = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    found = gpu_ours.kernels(jax.profiler.ProfileData.from_serialized_xspace(proto).planes)
    assert (found["busy"], found["span"], found["launches"]) == (pytest.approx(5.5e-6), pytest.approx(10e-6), 4)
    top = ("k1", 3e-6, 2), ("k3", 2e-6, 1), ("k2", 5e-7, 1)
    assert found["top"] == [[name, pytest.approx(seconds), count] for name, seconds, count in top]


def test_our_side_takes_a_step_of_every_case(monkeypatch):
    """Each builder of ours runs, here at a tiny size."""
    monkeypatch.syspath_prepend(ROOT / "third_party/common")
    import ours

    shape = dict(vocab=32, hidden=8, mlp=8, layers=1, heads=2, kv_heads=1, head_dim=4)
    for build in ours.BUILDERS.values():
        build(shape, dict(rows=8, prompt=3, new=5, samples=4, responses=16, mean=3))()
    assert len(ours.BUILDERS) == 4
