"""Trains every variant of a sweep with every seed, as many at once as the machine carries.

    python -m rpg_jax.sweep configs/sweeps/objectives.py [--out=runs/objectives] [--seeds=0,1] [--parallel=2]
    python -m rpg_jax.sweep configs/sweeps/objectives.py --dry_run   # prints the runs that are left
    python -m rpg_jax.sweep configs/sweeps/objectives.py --slurm     # or --tpu: writes a script of them instead

`rpg_jax/lab/sweeping/variants.py` says what a sweep's file holds; FILE.py:smoke takes that variant of its base config.
A run is `rpg_jax.train` in OUT/VARIANT/seedN, with its output in log.txt there; one that has a summary.json is done.
All runs start from one warm start, trained once with the base config's seed and kept beside OUT, in warm_starts/, for
other sweeps of the same settings.

Without --parallel each run gets one core, or more where there are more than runs, and they share the memory: the
first goes alone until it has shown how much it takes. On a GPU or TPU one runs at a time. The same command goes on
after a kill at any time, leaves out what is done and tries again what failed. SIGTERM and Ctrl-C let the runs save
and end with status 75. Status 1: a run failed, 2: a mistake in the input.
"""

import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

from absl import flags
from rich.console import Console
from rich.table import Table

from rpg_jax.lab.reporting.logged import read_json, read_rows
from rpg_jax.lab.sweeping import joblist, machine, variants
from rpg_jax.lab.sweeping.pool import POLL_SECONDS, Pool, Task, lock
from rpg_jax.run import build, cli, job, warm_start
from rpg_jax.storage import workdir

_OUT = flags.DEFINE_string("out", None, "Folder of the sweep; runs/NAME if unset.")
_SEEDS = flags.DEFINE_list("seeds", None, "Seeds instead of the sweep's own, comma separated.")
_PARALLEL = flags.DEFINE_integer("parallel", None, "Runs at once; as many as the machine carries if unset.", 1)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would be run, or written, and change nothing.")
_SLURM = flags.DEFINE_bool("slurm", False, "Write OUT/slurm.sh, a job array of the runs that are left, instead.")
_TPU = flags.DEFINE_bool("tpu", False, "Write OUT/tpu.sh, a TPU pod for each of the runs that are left, instead.")
_PREPARE = flags.DEFINE_string("prepare", None, "VARIANT/seedN: only give this run its warm start.")


def main(options):
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with cli.door():
        if len(options.arguments) != 1:
            raise ValueError("name one sweep, such as configs/sweeps/objectives.py; see --help")
        if _SLURM.value and _TPU.value:
            raise ValueError("--slurm and --tpu exclude each other; give one")
        sweep = variants.read(options.arguments[0], None if _SEEDS.value is None else list(map(_whole, _SEEDS.value)))
        out = pathlib.Path(_OUT.value or f"runs/{sweep.name}")
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out={out} is a file; name a folder")
        outdated = variants.check_begun(out, sweep.runs)
        prepared = _named(sweep, _PREPARE.value) if _PREPARE.value else None
        left = [run for run in sweep.runs if not variants.is_done(out, run)]
        if _SLURM.value or _TPU.value:
            return write_jobs(out, sweep, left, options.arguments[0])
    if prepared:
        return 0 if prepare(out, prepared, stop) else cli.PREEMPTED
    for text, names in outdated.items():
        print(f"warning: {text} since these were trained, which stay as they are: {', '.join(names)}", file=sys.stderr)
    at_once = min(_PARALLEL.value or machine.carries(), max(len(left), 1))
    print(f"runs in {out}: {len(sweep.runs)}, done: {len(sweep.runs) - len(left)}, at once: {at_once}", flush=True)
    if _DRY_RUN.value:
        for run in left:
            print(shlex.join(train_command(out, run)))
        return 0
    failed = {}
    if left:
        status = make_warm_start(out, left[0], options.arguments, stop)
        if status == cli.PREEMPTED:
            return stopped()
        if status:
            return status
        failed = Pool([task(out, run) for run in left], at_once, _PARALLEL.value is None, stop.is_set).run()
    show_results(out, sweep, failed)
    if stop.is_set() and not all(variants.is_done(out, run) for run in left):
        return stopped()
    return max(failed.values(), default=0)


def stopped() -> int:
    print("stopped after saving; the same command goes on", file=sys.stderr)
    return cli.PREEMPTED


def _whole(word):
    if not word.strip().isdecimal():
        raise ValueError(f"--seeds={','.join(_SEEDS.value)}: {word!r} is no whole number of at least 0, as in 0,1,2")
    return int(word)


def _named(sweep, name):
    run = next((run for run in sweep.runs if run.name == name), None)
    if run is None:
        raise ValueError(f"--prepare={name}: {sweep.file} has no such run; one is {sweep.runs[0].name}")
    return run


def train_command(out, run) -> list[str]:
    return [sys.executable, "-m", "rpg_jax.train", *run.flags, f"--workdir={out / run.name}"]


def task(out, run) -> Task:
    folder = out / run.name
    return Task(
        name=run.name,
        command=train_command(out, run),
        folder=folder,
        prepare=lambda: place_warm_start(out, run),
        is_done=lambda: variants.is_done(out, run),
        steps=lambda: max(read_rows(folder / "metrics.jsonl")[0], default=0),
    )


def write_jobs(out, sweep, left, named) -> None:
    """Writes, or in a dry run prints, the script that runs what is left elsewhere."""
    if not left:
        print(f"every run of {sweep.file} in {out} is done")
        return
    kind = "slurm" if _SLURM.value else "tpu"
    if kind == "tpu" and out.is_absolute():
        raise ValueError(f"--out={out} with --tpu: name a folder relative to the repository, which pods have as well")
    script = out / f"{kind}.sh"
    again = [".venv/bin/python", "-m", "rpg_jax.sweep", named, f"--out={out}"]
    again += [f"--seeds={','.join(_SEEDS.value)}"] if _SEEDS.value else []
    text = getattr(joblist, kind)(
        [(run.name, [*run.flags, f"--workdir={out / run.name}"]) for run in left],
        sweep=sweep.file,
        script=script,
        out=out,
        prepare=again if variants.shared_warm_start(out, left[0]) else None,
    )
    if _DRY_RUN.value:
        print(text, end="")
        return
    workdir.write(out, script.name, text)
    print(f"wrote {script} with {len(left)} runs; its first lines say how to start it")


def make_warm_start(out, run, arguments, stop) -> int:
    """Has it trained by a process of its own, so that its memory is free again; returns that one's exit status."""
    folder = variants.shared_warm_start(out, run)
    if folder is None or (folder / "done").exists():
        return 0
    print(f"training the warm start of all runs in {folder}", flush=True)
    seeds = [f"--seeds={run.seed}"]
    command = [sys.executable, "-m", "rpg_jax.sweep", *arguments, f"--out={out}", f"--prepare={run.name}", *seeds]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        if stop.is_set():
            process.terminate()
        time.sleep(POLL_SECONDS)
    if stop.is_set() and process.returncode == -signal.SIGTERM:  # which came while it started
        return cli.PREEMPTED
    return process.returncode if process.returncode >= 0 else 1


def prepare(out, run, stop) -> bool:
    """Gives a run its warm start, trained now if nobody has; returns False when told to stop before it was."""
    folder = variants.shared_warm_start(out, run)
    if folder is None:
        return True
    guard = folder.with_name(f".{folder.name}.lock")
    held, _ = lock(guard)
    if held is None:
        print("it is being trained by another process, which is waited for", flush=True)
    while held is None:
        if stop.wait(POLL_SECONDS):
            return False
        held, _ = lock(guard)
    with held:
        if not (folder / "done").exists():
            if not train_warm_start(run, folder):
                return False
            workdir.write(folder, "done", "")
        place_warm_start(out, run)  # by one at a time: others may prepare the same run
    return True


def train_warm_start(run, folder) -> bool:
    with job.joined() as should_stop:
        with cli.door():
            built = build.build_run(run.config, log=job.say)
        with cli.in_words(), built.scorer:
            params, _ = warm_start.warm_started(run.config, built, folder / "warm_start", should_stop)
    return params is not None


def place_warm_start(out, run) -> None:
    """Copies the shared warm start into a run's workdir, where training takes it up, unless it has one."""
    folder, target = variants.shared_warm_start(out, run), out / run.name / "warm_start"
    target.parent.mkdir(parents=True, exist_ok=True)
    if folder is None or target.exists():
        return
    draft = target.with_name(".warm_start.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for source in sorted((folder / "warm_start").rglob("*")):  # a folder before what is in it
            copy = draft / source.relative_to(folder / "warm_start")
            copy.mkdir() if source.is_dir() else shutil.copyfile(source, copy)
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def show_results(out, sweep, failed) -> None:
    """Held-out accuracy of each variant over its seeds, of the runs that are done."""
    table = Table(title=f"{sweep.file}, held-out mean@k over the seeds that are done")
    for column in ("variant", "done", "failed", "before", "last", "best", "minutes, with warm start"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant in dict.fromkeys(run.variant for run in sweep.runs):
        runs = [run for run in sweep.runs if run.variant == variant]
        done = [found for run in runs if (found := read_json(out / run.name / "summary.json"))]
        numbers = [f"{_mean(done, key):.1%}" for key in ("accuracy_before", "accuracy_after", "best_accuracy")]
        numbers.append(f"{_mean(done, 'wall_seconds') / 60:.1f}")
        lost = sum(run.name in failed for run in runs)
        table.add_row(variant, f"{len(done)}/{len(runs)}", str(lost), *(numbers if done else ["-"] * len(numbers)))
    Console(width=120).print(table)
    print(f"curves, intervals and what is significant: python -m rpg_jax.report {out}")


def _mean(rows, key):
    return sum(row[key] for row in rows) / len(rows) if rows else float("nan")


if __name__ == "__main__":
    cli.run(main, arguments=True)
