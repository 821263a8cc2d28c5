"""Sweeps: what a file may say, the pool under kills and failures, the scripts for clusters, and one sweep run."""

import dataclasses
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
import types

import processes
import pytest
from fuzzing import SECONDS, bounded, outcome

from rpg_jax import InputError
from rpg_jax.lab.sweeping import command, pool, variants, warm_starts
from rpg_jax.lab.sweeping.pool import Pool, Task
from rpg_jax.run import build, states
from rpg_jax.storage import workdir

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEAD = "CONFIG = 'configs/sweeps/small.py'\nSEEDS = (0, 1)\n"


def write(folder, variants_):
    """A sweep's file, with `variants_` and what may follow."""
    file = folder / "mine.py"
    file.write_text(f"{HEAD}VARIANTS = {variants_}\n")
    return str(file)


def test_provided_sweeps_can_be_read_and_share_a_warm_start():
    shared = set()
    for name in sorted({path.stem for path in (ROOT / "configs" / "sweeps").glob("*.py")} - {"small"}):
        file = f"configs/sweeps/{name}.py"
        read, text = variants.read(file), (ROOT / file).read_text()
        assert len({run.name for run in read.runs}) == len(read.runs)
        [folder] = {warm_starts.shared_folder(pathlib.Path("runs") / name, run) for run in read.runs}
        assert f"{len(read.runs)} runs" in text and file in text
        if name != "distillation":  # of students of half the width
            shared.add(folder)
    assert len(shared) == 1


def test_a_run_is_a_training_with_flags(tmp_path):
    file = write(tmp_path, "{'a': {'objective.beta': 1, 'objective.name': 'grpo', 'objective.clip': ''}, 'b': {}}")
    runs = variants.read(f"{file}:smoke", seeds=[3]).runs
    assert [run.name for run in runs] == ["a/seed3", "b/seed3"]
    keys = "seed=3", "objective.beta=1", "objective.name=grpo", "objective.clip="
    assert runs[0].flags == ("--config=configs/sweeps/small.py:smoke", *(f"--config.{key}" for key in keys))
    assert {"objective.beta": 1.0, "objective.clip": None, "steps": 3}.items() <= runs[0].settings.items()


@pytest.mark.parametrize(("text", "message"), [
    ("{'a': {}, 'A': {'objective.clip': 'rpg'}}", "'a' and 'A' of .* collide in name"),
    ("{'a': {}, 'b': {}}", "'a' and 'b' of .* have the same settings"), ("{'a/b': {}}", "expected a name"),
    ("{'a': {'objective.bet': 1}}", "variant 'a' of .* has no key 'objective.bet'"),
    ("{'a': {'objective.beta': 'x'}}", "objective.beta='x' does not fit"), ("{'a': {'seed': 1}}", "sets seed"),
    ("{'a': {'mesh.data': 1}}", "changes nothing"),
    ("{'a': {'objective.name': 'grpoo'}}", "variant 'a' of .*unknown objective"),
    ("{'a': {'learner.minibatch_prompts': 5}}", "variant 'a' of .*minibatch_prompts .5. does not divide"),
    ("{'a': {}, 'b': {'data.tasks.sorting.length': 4}}", "share a warm start.* data.tasks.sorting.length"),
    ("{'a': {}, 'b': {'model.size': 'small'}}", "model.size"), ("{'a': {}", "was never closed"),
    ("{'a': {}}\nSEEDS = (0, 0)", "more than once"), ("{'a': {}}\nSEEDS = (-1,)", "seeds"),
    ("{'a': {}}\ndel CONFIG", "lacks CONFIG"), ("{'a': {}}\nCONFIG = 'configs/sweeps/clips.py'", "no get_config"),
    ("{'a': {}}\nCONFIG = 'configs/nowhere.py'", "there is no file configs/nowhere.py"),
    ("{'a': {}}\nCONFIG = 'configs/quickstart.py:nothing'", "unknown variant"),
])  # fmt: skip
def test_what_a_sweep_must_not_say(text, message, tmp_path):
    with pytest.raises((ValueError, SyntaxError), match=message):
        variants.read(write(tmp_path, text))


def test_other_settings_and_a_file_that_was_edited_are_refused_for_what_is_not_done(tmp_path):
    mine = tmp_path / "loss.py"
    mine.write_text((ROOT / "docs" / "tempered.py").read_text())

    def runs_of(power):
        settings = {"objective.name": f"{mine}:tempered", "objective.power": power}
        return variants.read(write(tmp_path, {"a": settings}), [0]).runs

    runs = runs_of(0.5)
    path, _ = workdir.open_workdir(tmp_path / "a" / "seed0", runs[0].config, False)
    (path / "checkpoints" / "1").mkdir(parents=True)
    workdir.open_workdir(path, runs[0].config, False)
    assert variants.check_begun(tmp_path, runs) == {}
    with pytest.raises(ValueError, match=r"other settings \(objective.power: 0.5 -> 0.25\)"):
        variants.check_begun(tmp_path, runs_of(0.25))
    mine.write_text(mine.read_text() + "# edited")
    with pytest.raises(ValueError, match="loss.py:tempered has been edited"):
        variants.check_begun(tmp_path, runs)
    with pytest.raises(ValueError, match="loss.py:tempered has been edited"):
        workdir.open_workdir(path, runs[0].config, False)
    (path / "summary.json").touch()
    assert variants.check_begun(tmp_path, runs) == {f"{mine}:tempered has been edited": ["a/seed0"]}
    mine.unlink()
    config = workdir.read_config(path)
    config.learner.microbatch_rows = 4
    for config.behavior.source in ("trainer", "sampler", "proximal"):
        config.rollout.update(samples=1, cache_pages=8)  # of another number of devices
        made = build.build_settings(states.for_inference(config))  # who evaluates a run has no need of its objective
        assert made["objective"].name == "reinforce" and made["rollout"].cache_pages is None
    trained_on = {"warm_start.steps": 1, "code.train": "0", "code.template": "1"}
    assert variants.warm_start_settings(trained_on | {"code.reward": "2"}) == trained_on


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Pools look after what they run twenty times a second."""
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.05)


# The pool, with commands that take no time.
STEP = "import pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1]); "
QUICK = STEP + "(folder / 'summary.json').touch()"
SAVES = STEP + (
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); (folder / 'begun').touch(); time.sleep(0 if "
    "(folder / 'again').exists() else 60); (folder / 'summary.json').touch()"
)


def task(folder, code):
    return Task(
        name=folder.name, command=[sys.executable, "-c", code, str(folder)], folder=folder,
        prepare=lambda: folder.mkdir(parents=True, exist_ok=True), is_done=(folder / "summary.json").exists,
    )  # fmt: skip


def test_a_failure_does_not_stop_the_others(tmp_path, capfd):
    commands = {"good": QUICK, "bad": "import sys; sys.exit('error: a mistake')", "liar": "0", "fine": QUICK}
    commands["killed"] = "import os; os.kill(os.getpid(), 9)"
    tasks = [task(tmp_path / name, code) for name, code in {"full": QUICK, **commands}.items()]
    tasks[0] = dataclasses.replace(tasks[0], prepare=(tmp_path / "no" / "space").mkdir)
    assert Pool(tasks, 2, lambda: False).run() == dict.fromkeys(("full", "bad", "killed", "liar"), 1)
    out, error = capfd.readouterr()
    assert "[6/6]" in out + error and "error: a mistake" in error and "SIGKILL" in error
    assert "full cannot be started: [Errno 2]" in error
    assert (tmp_path / "good" / "summary.json").exists() and (tmp_path / "fine" / "summary.json").exists()


def test_told_to_stop_it_lets_all_save_and_goes_on_later(tmp_path):
    tasks = [task(tmp_path / name, SAVES) for name in "abc"]
    begun = [tmp_path / name / "begun" for name in "ab"]
    pool = Pool(tasks, 2, lambda: all(path.exists() for path in begun))
    assert pool.run() == {} and not pool.running and not (tmp_path / "c").exists()
    assert not any((tmp_path / name / "summary.json").exists() for name in "ab")
    for name in "abc":
        workdir.write(tmp_path / name, "again", "")
    assert Pool(tasks, 2, lambda: False).run() == {}
    assert all((tmp_path / name / "summary.json").exists() for name in "abc")


def test_a_run_that_outlives_its_pool_is_not_started_again(tmp_path):
    """The pool is killed; what it started goes on, holds the lock, and the next pool waits for it."""
    folder = tmp_path / "run"
    code = STEP + (
        "assert not (folder / 'begun').exists(); (folder / 'begun').touch(); "
        "[time.sleep(0.05) for _ in iter(lambda: (folder / 'go').exists(), True)]; (folder / 'summary.json').touch()"
    )
    script = (
        "import pathlib, sys; from rpg_jax.lab.sweeping.pool import Pool, Task; "
        f"folder = pathlib.Path({str(folder)!r}); command = [sys.executable, '-c', {code!r}, str(folder)]; "
        "task = Task(name='run', command=command, folder=folder, prepare=folder.mkdir, is_done=lambda: False); "
        "Pool([task], 1, lambda: False).run()"
    )
    first = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    while not (folder / "begun").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    assert workdir.lock(tmp_path / ".run.lock") == (None, None)
    looks = iter(range(10**6))

    def never():
        if next(looks) == 3:
            (folder / "go").touch()
        return False

    assert Pool([task(folder, code)], 1, never).run() == {}
    assert (folder / "summary.json").exists()


def test_an_error_of_the_pool_leaves_nothing_running(tmp_path):
    pool = Pool([task(tmp_path / "long", SAVES)], 1, lambda: 0 * (1 / (not (tmp_path / "long/begun").exists())))
    with pytest.raises(ZeroDivisionError):
        pool.run()
    held, _ = workdir.lock(tmp_path / ".long.lock")
    with held:  # which the process held as long as it ran
        assert not pool.running and not (tmp_path / "long/summary.json").exists()


def test_a_warm_start_that_another_trains_is_waited_for_until_told_to_stop(tmp_path, capsys):
    run = variants.read(write(tmp_path, "{'a': {}}")).runs[0]
    folder, stop = warm_starts.shared_folder(tmp_path / "out", run), threading.Event()
    threading.Timer(0.2, stop.set).start()
    held, _ = workdir.lock(folder.with_name(f".{folder.name}.lock"))
    with held:
        assert not warm_starts.prepare(tmp_path / "out", run, stop)
    assert "trained by another process" in capsys.readouterr().out
    workdir.write(folder / "warm_start" / "3", "weights", "w")
    workdir.write(folder, "done", "")
    assert warm_starts.prepare(tmp_path / "out", run, stop)
    assert (tmp_path / "out" / "a" / "seed0" / "warm_start" / "3" / "weights").read_text() == "w"


def test_a_machine_carries_a_run_for_each_core_and_gibibyte_or_one_on_an_accelerator(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "cores", lambda: list(range(16)))
    monkeypatch.setattr(pool, "ACCELERATORS", ())
    for pages, expected in ((2**22, 16), (9 * 2**18, 9), (0, 1)):
        monkeypatch.setattr(pool.os, "sysconf", lambda name, pages=pages: {"SC_AVPHYS_PAGES": pages}.get(name, 4096))
        assert pool.carries() == expected
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(pool, "ACCELERATORS", (str(tmp_path / "accel*"),))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(pool.os, "sysconf", lambda name: 2**30)
    assert pool.carries() == 1


def test_scripts_of_clusters_start_what_they_should(tmp_path):
    """Each script is run with launchers and sbatch's surroundings that only note what they are called with."""
    notes = tmp_path / "notes"
    for name in ("launch/slurm.sh", "launch/tpu_pod.sh", "launch/setup.sh", "bin/gcloud", "bin/srun"):
        processes.fake(tmp_path / name, f'echo "{name} $(printf "<%s>" "$@")" >>"{notes}"')
    runs = [("a/seed0", ["--config=x.py", "--config.y=it's, (1, 2)"]), ("b/seed0", ["--config=x.py"])]
    out = pathlib.Path("out/My_Sweep")
    names = dict(sweep="s.py", out=out, prepare=["python", "-m", "p"])
    for kind in ("slurm", "tpu"):
        (tmp_path / f"{kind}.sh").write_text(command.cluster_script(kind, runs, **names))
        subprocess.run(["bash", "-n", tmp_path / f"{kind}.sh"], check=True)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path)}
    for task_id in "01":
        subprocess.run(["bash", tmp_path / "slurm.sh"], env=environment | {"SLURM_ARRAY_TASK_ID": task_id}, check=True)
    expected = []
    for name, flags in (("a", "<--config=x.py><--config.y=it's, (1, 2)>"), ("b", "<--config=x.py>")):
        prepared = f"bin/srun <--nodes=1><--ntasks=1><python><-m><p><--prepare={name}/seed0>"
        expected += ["launch/setup.sh <>", prepared, f"launch/slurm.sh {flags}"]
    assert notes.read_text().splitlines() == expected
    notes.unlink()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    words = ["bash", "tpu.sh", "gs://B/f", "--zone=z", "--type=t"]
    subprocess.run(words, env=environment, cwd=tmp_path, check=True)
    assert notes.read_text().splitlines()[:2] == [
        "bin/gcloud <storage><rsync><--recursive><out/My_Sweep/a/seed0/warm_start><gs://B/f/a/seed0/warm_start>",
        "launch/tpu_pod.sh <--name=rpg-my-sweep-0><--zone=z><--type=t><--><--config=x.py><--config.y=it's, (1, 2)>"
        "<--checkpoint_dir=gs://B/f/a/seed0>",
    ]
    refused = subprocess.run(words[:2], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2 and "gs://BUCKET" in refused.stderr
    assert "warm" not in command.cluster_script("tpu", runs, **names | {"prepare": []})


def run_sweep(folder, monkeypatch, codes, **flags):
    """The status of a sweep of variants a and b, seed 0, whose training is replaced by `codes`, Python by variant."""
    handlers, python = {}, [sys.executable, "-c"]
    monkeypatch.setattr(command.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(command, "train_command", lambda out, run: [*python, codes[run.variant], str(out / run.name)])
    variants_ = {name: {"objective.beta": beta, "warm_start.steps": 0} for name, beta in (("a", 0.1), ("b", 0.2))}
    options = dict(arguments=[write(folder, variants_)], out=str(folder / "out"), seeds=["0"], prepare=None)
    options |= dict(parallel=2, dry_run=False, slurm=False, tpu=False)

    def stop_once_begun():
        while not (folder / "out/a/seed0/begun").exists():
            time.sleep(0.05)
        handlers[signal.SIGTERM](signal.SIGTERM, None)

    if codes["a"] is SAVES:
        threading.Thread(target=stop_once_begun, daemon=True).start()
    return command.main(types.SimpleNamespace(**options | flags))


@pytest.mark.parametrize(("a", "status"), [(QUICK, 1), ("import os; os.abort()", 1), (SAVES, 75), ("exit(75)", 75)])
def test_the_exit_status_says_how_a_sweep_ended(a, status, tmp_path, monkeypatch, capfd):
    assert run_sweep(tmp_path, monkeypatch, dict(a=a, b="import sys; sys.exit(3)")) == status


def test_a_mistake_in_the_input_has_a_status_of_its_own(tmp_path, monkeypatch):
    wrong = dict(arguments=[], seeds=["x"], prepare="c/seed0", out=__file__)
    for flags in (dict(slurm=True, tpu=True), *({name: value} for name, value in wrong.items())):
        with pytest.raises(InputError):  # which `cli.run` turns into status 2
            run_sweep(tmp_path, monkeypatch, dict(a=QUICK, b=QUICK), **flags)


def test_the_table_of_results(tmp_path):
    sweep = variants.read(write(tmp_path, "{'a': {}, 'b': {'objective.clip': 'rpg'}}"))
    for seed, accuracy in enumerate((0.25, 0.5)):
        summary = dict(accuracy_before=0.0, accuracy_after=accuracy, best_accuracy=accuracy, wall_seconds=90.0)
        workdir.write(tmp_path / "a" / f"seed{seed}", "summary.json", json.dumps(summary))
    rows = [line.split() for line in command.table(tmp_path, sweep, {"b/seed1": 1}).splitlines()[-2:]]
    assert rows == [["a", "2/2", "0", "0.0%", "37.5%", "37.5%", "1.5"], ["b", "0/2", "1", "-", "-", "-", "-"]]


def test_one_sweep_from_the_command_line(tmp_path):
    """A dry run, a run from the shared warm start of an objective in a file, and nothing more to do."""
    objective = {"objective.name": f"{ROOT}/docs/tempered.py:tempered", "objective.power": 0.5}
    file, out = write(tmp_path, f"{{'a': {objective}}}"), tmp_path / "out"
    steps = ["--seeds=4", f"--out={out}"]
    status, text, _ = outcome("sweep", f"{file}:smoke", "--dry_run", *steps)
    (line,) = [line for line in text.splitlines() if "rpg_jax.train" in line]
    assert status == 0 and not out.exists() and shlex.split(line)[-1] == f"--workdir={out}/a/seed4"
    status, text, error = processes.finish(*processes.start("sweep", f"{file}:smoke", *steps))
    assert status == 0 and "[1/1] a/seed4 done" in text and "1/1" in text, text + error
    log = (out / "a" / "seed4" / "log.txt").read_text()
    assert "warm start 6/6" in error and "warm start 6/6" not in log and "RL 3/3" in log
    with bounded(SECONDS):  # which sets back the handlers of signals
        status, text, _ = outcome("sweep", f"{file}:smoke", *steps)
    assert status == 0 and f"runs in {out}: 1, done: 1" in text
