"""The launchers: their syntax, and what they do with the Python that is there. Nothing is downloaded."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

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
    for purpose in ("core", "test", "dev", "gguf", "gym"):
        (root / f"requirements-{purpose}.txt").touch()
    fake(root / ".venv-transformers" / "bin" / "python", "")
    return root


def fake(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def run(command, tmp_path, **environment):
    """A launcher's outcome, called from a folder elsewhere, with nothing on stdin."""
    environment = {"PATH": "/usr/bin:/bin", "CI": "true"} | environment
    return subprocess.run(
        command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )


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
    assert calls()[-1] == "-m pytest -n4 --dist=loadfile --no-loadscope-reorder -k two words"
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
