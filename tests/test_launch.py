"""The launchers: their syntax, and what they do with the Python that is there. Nothing is downloaded."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from processes import fake

from launch import rows_as_they_come

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_scripts_parse_and_can_be_started():
    for script in (*(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK), script


def test_a_pod_is_not_made_for_a_file_that_would_not_be_sent(tmp_path):
    (mine := tmp_path / "mine.py").touch()
    flags = ["--workdir=runs/x", "--checkpoint_dir=gs://b/x", f"--config.objective.name={mine}:f"]
    command = [ROOT / "launch" / "tpu_pod.sh", "--dry-run", "--name=a", "--zone=z", "--type=v5p-8", "--", *flags]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and f"git does not track {mine}" in refused.stderr and not refused.stdout


@pytest.fixture
def clone(tmp_path):
    """The launchers in a repository of their own, whose requirements are one comment."""
    root = tmp_path / "a clone"
    for folder in ("launch", ".ci"):
        shutil.copytree(ROOT / folder, root / folder)
    for file in ("requirements.txt", "third_party/transformers/requirements.txt"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("# nothing\n")
    for purpose in ("core", "test", "dev", "gguf", "gym", "cuda12", "cuda13"):
        (root / f"requirements-{purpose}.txt").write_text(f"# {purpose}\n" * purpose.startswith("cuda"))
    fake(root / ".venv-transformers" / "bin" / "python", "")
    return root


def run(command, tmp_path, **environment):
    """A launcher's outcome, called from a folder elsewhere, with nothing on stdin and without CUDA if not told."""
    how = dict(env={"PATH": "/usr/bin:/bin", "CI": "true", "RPG_JAX": "cpu"} | environment, stdin=subprocess.DEVNULL)
    return subprocess.run(command, cwd=tmp_path, **how, capture_output=True, text=True, timeout=300)


def test_an_old_python_is_one_clear_line(clone, tmp_path):
    tools = tmp_path / "tools"
    for name in ("python3", "python"):
        fake(tools / name, 'if [[ "$1" == --version ]]; then echo "Python 3.9.2"; else exit 1; fi')
    for name in ("dirname", "bash"):
        (tools / name).symlink_to(shutil.which(name))
    for script in ("launch/setup.sh", "launch/test.sh", "launch/quickstart.sh", ".ci/run"):
        result = run([tools / "bash", clone / script], tmp_path, PATH=str(tools))
        assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
        assert "error: Python 3.11 or newer is needed and Python 3.9.2 was found; " in result.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "launch").glob("*.sh")))
def test_help_is_the_comment_at_the_top_and_runs_nothing(clone, tmp_path, script):
    calls, file = fake_venv(clone), clone / "launch" / script
    if script in ("audit.sh", "check.sh", "parity.sh", "setup.sh"):
        refused = run(["bash", file, "--frobnicate"], tmp_path)
        assert (refused.returncode, refused.stdout) == (2, "") and refused.stderr.startswith("error: unexpected argum")
    for words in [["--help"], ["-h"], ["--config.seed=1", "--help"]] if script != "common.sh" else []:
        shown = run(["bash", file, *words], tmp_path)
        assert (shown.returncode, shown.stderr) == (0, "") and not calls()
        assert shown.stdout.startswith(file.read_text().split("\n")[1].removeprefix("# ") + "\n")


def fake_venv(clone, more=""):
    """A .venv whose python notes its arguments, answers setup's questions with the real one, and then does `more`."""
    log = clone / "calls"
    answer = f'if [[ "$1" == -c ]]; then exec "{sys.executable}" "$@"; fi'
    fake(clone / ".venv" / "bin" / "python", f'{answer}\necho "$*" >> "{log}"\n{more}')
    fake(clone / ".venv" / "bin" / "shellcheck", "")
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_requirements_are_installed_once_for_each_change(clone, tmp_path):
    calls = fake_venv(clone)
    for text, expected in (("# nothing", 1), ("# nothing", 1), ("# something else", 2)):
        (clone / "requirements.txt").write_text(f"{text}\n")
        assert run(["bash", clone / "launch/setup.sh"], tmp_path).returncode == 0
        assert len(calls()) == expected and "pip install" in calls()[-1]
    digest = hashlib.sha256(b"# something else\n").hexdigest()
    assert (clone / ".venv" / "requirements.sha256").read_text().strip() == digest


MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\nGCC version: gcc 12.3.0"
# What nvidia-smi prints, or the version of the kernel's module. A Volta, 7.0, is one that CUDA 13 has left behind.
NEW, WRONG = "580.159.04, 9.0", "RPG_JAX is 'cuda'; known: cpu, cuda12, cuda13"


@pytest.mark.parametrize(("driver", "environment", "expected", "said"), [
    (NEW, {}, "cuda13", ""), (f"{NEW}\nWARNING: corrupted at gpu 0000:3B:00.0", {}, "cuda13", ""),
    ("610.2, 12.0\n610.2, 7.5", {}, "cuda13", ""), ("579.99.01, 9.0", {}, "cuda12", ""),
    ("580.65.06, 9.0\n580.65.06, 7.0", {}, "cuda12", ""), ("580.65.06, [N/A]", {}, "cuda13", ""),
    ("525.60.13, 8.0", {}, "cuda12", ""), ("470.82.01, 8.0", {}, "cpu", "the NVIDIA driver is 470"),
    (MODULE.format("580.65.06"), {}, "cuda13", ""), (MODULE.format("535.54.03"), {}, "cuda12", ""),
    ("Failed to initialize NVML: Driver/library version mismatch", {}, "cpu", "names no GPU"), (None, {}, "cpu", ""),
    (None, {"RPG_JAX": "cuda12"}, "cuda12", ""), (NEW, {"RPG_JAX": "cuda12"}, "cuda12", ""),
    (NEW, {"RPG_JAX": "cpu"}, "cpu", ""), (NEW, {"JAX_PLATFORMS": "cpu"}, "cpu", ""),
    (NEW, {"JAX_PLATFORMS": "cuda,cpu"}, "cuda13", ""), (NEW, {"RPG_JAX": "cuda"}, None, WRONG),
])  # fmt: skip
def test_the_driver_decides_which_jax(tmp_path, driver, environment, expected, said):
    for file in ("dev/nvidia3", "proc/driver/nvidia/version") if "NVRM" in (driver or "") else ():
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(driver)
    if driver:  # with the module alone nvidia-smi fails, and says so where its answer would be
        answered = "NVRM" not in driver and "Failed" not in driver
        fake(tmp_path / "bin/nvidia-smi", f"echo '{driver}'" if answered else "echo version 999.99, 9.0; exit 9")
    command, path = [ROOT / "launch/which_jax.sh", tmp_path], f"{tmp_path}/bin:/usr/bin:/bin"
    found = run(command, tmp_path, **{"PATH": path, "RPG_JAX": ""} | environment)
    assert found.stdout == (f"{expected}\n" if expected else "") and found.returncode == (0 if expected else 2)
    assert said in found.stderr and found.stderr.count("\n") == bool(said)


def test_jax_with_cuda_comes_with_the_other_lists_and_the_suite_stays_on_the_cpu(clone, tmp_path):
    plugin = clone / ".venv/lib/python3.11/site-packages/jax_cuda12_plugin"
    tests = 'if [[ "$2" == pytest ]]; then echo "$JAX_PLATFORMS"; [[ "$*" != *gpu* ]]; exit; fi'
    pip = f'case "$*" in *uninstall*) rmdir "{plugin}";; *cuda12*) mkdir -p "{plugin}";; *) exit "$FAIL";; esac'
    calls = fake_venv(clone, f"{tests}\n{pip}")
    for version, fail in (("535.54.03", 0), ("580.65.06", 1), ("580.65.06", 0), ("580.65.06", 0)):
        fake(tmp_path / "bin/nvidia-smi", f"echo '{version}, 8.0'")
        on_gpu = dict(PATH=f"{tmp_path}/bin:/usr/bin:/bin", RPG_JAX="", JAX_PLATFORMS="cuda", FAIL=str(fail))
        assert run([clone / "launch/setup.sh"], tmp_path, **on_gpu).returncode == fail
        assert (clone / ".venv/requirements.sha256").exists() != fail  # else an older one would say that all is there
    lists = " ".join(f"-r {clone}/requirements{purpose}.txt" for purpose in ("", "-core", "-test"))
    install = "-m pip install --quiet --disable-pip-version-check --no-compile"
    assert calls() == [
        f"{install} {lists} -r {clone}/requirements-cuda12.txt",
        "-m pip uninstall --quiet --yes jax-cuda12-plugin jax-cuda12-pjrt",  # JAX loads one of both
        *[f"{install} {lists} -r {clone}/requirements-cuda13.txt"] * 2,  # the first fails
    ]
    tested = run([clone / "launch/test.sh"], tmp_path, **on_gpu)
    assert (tested.stdout, tested.returncode) == ("cpu\ncuda\n", 1), tested.stderr
    assert calls()[-1] == "-m pytest tests/test_gpu.py"
    assert run([clone / "launch/test.sh", "--quick"], tmp_path, **on_gpu).stdout == "cpu\n"


def test_a_failed_installation_is_tried_again(clone, tmp_path):
    calls = fake_venv(clone, '[[ "$2" != pip ]]')
    for tries in (1, 2):
        result = run(["bash", clone / "launch/test.sh"], tmp_path)
        assert result.returncode == 1 and "error: pip could not install requirements.txt" in result.stderr
        assert len(calls()) == tries


def test_an_optional_list_that_cannot_be_installed_costs_neither_the_tests_nor_the_other_list(clone, tmp_path):
    calls = fake_venv(clone, '[[ "$*" != *requirements-gym.txt ]]')
    for name in ("gguf", "gym"):
        (clone / f"requirements-{name}.txt").write_text("# something\n")
    result = run(["bash", clone / "launch/test.sh", "-k", "two words"], tmp_path)
    assert result.returncode == 0 and result.stderr.count("skipped") == 1 and "requirements-gguf.txt" in calls()[-3]
    assert calls()[-1] == "-m pytest -n3 --dist=loadfile --no-loadscope-reorder -k two words"
    assert (clone / ".venv/requirements-gguf.sha256").exists()
    assert not (clone / ".venv/requirements-gym.sha256").exists()


@pytest.mark.parametrize(("asked", "folder"), [({"PYTHONPYCACHEPREFIX": "/elsewhere"}, "/elsewhere"), ({}, None)])
def test_bytecode_is_kept_in_the_environment(clone, tmp_path, asked, folder):
    fake_venv(clone)
    show = f'source "{clone}/launch/setup.sh" && echo "${{PYTHONDONTWRITEBYTECODE-unset}} $PYTHONPYCACHEPREFIX"'
    result = run(["bash", "-c", show], tmp_path, PYTHONDONTWRITEBYTECODE="1", **asked)
    assert result.stdout == f"unset {folder or clone / '.venv' / 'bytecode'}\n"
    assert run(["bash", "-c", show], tmp_path).stdout == "unset \n"  # where Python's own way is not forbidden


def test_a_virtual_environment_is_made(clone, tmp_path):
    result = run(["bash", clone / "launch/setup.sh"], tmp_path, PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    assert (clone / ".venv" / "pyvenv.cfg").exists()
    assert result.stderr.startswith("setup: making .venv with Python 3.")


@pytest.mark.parametrize(("script", "status"), [("launch/test.sh", 1), (".ci/run", 0), (".ci/run", 1)])
def test_pytest_has_the_last_word(clone, tmp_path, script, status):
    fake_venv(clone, f'if [[ "$2" == pytest ]]; then echo "$PWD"; echo "3 passed in 1s"; exit {status}; fi')
    fake(clone / "bin" / "chromium", "")  # else it is installed
    result = run(["bash", clone / script], tmp_path, PATH=f"{clone}/bin:/usr/bin:/bin")
    assert result.returncode == status
    assert result.stdout.splitlines() == [str(clone), "3 passed in 1s"]


def test_quickstart_stops_where_training_stops(clone, tmp_path):
    calls = fake_venv(clone, 'if [[ "$2" == rpg_jax.train ]]; then exit 75; fi')
    assert run(["bash", clone / "launch/quickstart.sh"], tmp_path).returncode == 75
    assert "rpg_jax.train" in calls()[-1]


def test_a_session_on_a_gpu_goes_on_after_what_fails_and_ends_in_time(clone, tmp_path):
    calls = fake_venv(clone, 'echo "out of $1 $2"; [[ "$2" != pytest ]]')
    session = dict(OUT=str(tmp_path / "out"), JAX_PLATFORMS="cpu", BASE="base", STEPS="3", PEER_PYTHON="a peer")
    done = run([clone / "launch/gpu_session.sh"], tmp_path, **session)
    assert done.returncode == 1 and "== tests ended with status 1" in done.stdout, done.stderr
    tests, benchmark, cold, warm, peer = calls()
    assert benchmark.endswith(f"--json={tmp_path}/out/benchmark.json --alone --trace")
    assert peer.endswith(f"--json={tmp_path}/out/peer.json --peer_python=a peer") and "gpu_benchmark.py" in peer
    flags = "--config=configs/real_model.py:qwen2.5-coder-0.5b-gpu --config.steps=3 --config.model.checkpoint=base"
    for call, cache in ((cold, "cold"), (warm, "warm")):
        assert call.startswith(f"-m launch.rows_as_they_come {tmp_path}/out/training-{cache} {flags}")
    assert (tmp_path / "out/tests.log").read_text() == "out of -m pytest\n"
    bare = run([clone / "launch/gpu_session.sh"], tmp_path, OUT=session["OUT"], JAX_PLATFORMS="cpu")
    assert [line.split(",")[0] for line in bare.stdout.splitlines() if ", at " in line] == ["== tests", "== benchmark"]
    done = run([clone / "launch/gpu_session.sh", "benchmark"], tmp_path, SECONDS_IN_ALL="20", **session)
    assert done.returncode == 1 and "benchmark is left out: no time" in done.stdout and len(calls()) == 7
    done = run([clone / "launch/gpu_session.sh", "training"], tmp_path, **session | dict(BASE=""))
    assert done.returncode == 1 and "neither BASE nor GGUF is set" in done.stdout and len(calls()) == 7


def test_rows_are_seen_as_they_come(tmp_path):
    row = '{"step": %d, "time/update": %d.0, "time/evaluation": 9.0}'
    writes = f"print(*[{row!r} % (n, n) for n in some], sep=chr(10), file=file, flush=True)"
    loop = f"for some in ([0, 1], [2, 3, 4]):\n  {writes}; time.sleep(0.5)\nexit(3)"
    program = f"import time; file = open({str(tmp_path / 'm')!r}, 'w')\n{loop}"
    found = rows_as_they_come.watch([sys.executable, "-c", program], tmp_path / "m")
    assert [step for step, _ in found["rows"]] == [*range(5)] and found["status"] == 3
    assert found["rows"][1][1] + 0.3 < found["rows"][2][1] < found["end"]
    assert found["means"] == {"time/update": 3.5, "time/evaluation": 9.0}  # of steps 3 and 4
