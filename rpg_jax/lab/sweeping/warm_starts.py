"""The warm start that all runs of the same settings share: trained once, beside the sweep's folder, and copied."""

import hashlib
import json
import pathlib
import shutil
import signal
import subprocess
import threading
import time

from rpg_jax.lab.sweeping.pool import POLL_SECONDS
from rpg_jax.lab.sweeping.variants import Run, warm_start_settings
from rpg_jax.run import build, cli, job, warm_start
from rpg_jax.storage import workdir
from rpg_jax.storage.settings import of_config


def shared_folder(out: pathlib.Path, run: Run) -> pathlib.Path | None:
    """The folder of the warm start that `run` shares with all runs of the same settings; None if it has none. Its
    `warm_start/` holds the checkpoints, and a file `done` says that they are complete."""
    settings = warm_start_settings(of_config(run.config))
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return out.parent / "warm_starts" / name if settings else None


def is_missing(out: pathlib.Path, run: Run) -> bool:
    """Whether the shared warm start of a run has yet to be trained."""
    folder = shared_folder(out, run)
    return folder is not None and not (folder / "done").exists()


def train_in_process(command: list[str], stop: threading.Event) -> int:
    """Runs a command that trains a warm start, in a process of its own so that its memory is free afterwards.

    Returns an exit status of `rpg_jax.sweep`: 0; 2 if the command refused its input; 75 if it was stopped; else 1.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        if stop.is_set():
            process.terminate()
        time.sleep(POLL_SECONDS)
    if stop.is_set() and process.returncode == -signal.SIGTERM:  # it came before the process could handle it
        return cli.PREEMPTED
    return process.returncode if process.returncode in (0, 2, cli.PREEMPTED) else 1


def prepare(out: pathlib.Path, run: Run, stop: threading.Event) -> bool:
    """Gives a run its warm start, trained now if no process has; returns False when stopped before it was there."""
    folder = shared_folder(out, run)
    if folder is None:
        return True
    lock_file = folder.with_name(f".{folder.name}.lock")
    held, _ = workdir.lock(lock_file)
    if held is None:
        print("it is being trained by another process, which is waited for", flush=True)
    while held is None:
        if stop.wait(POLL_SECONDS):
            return False
        held, _ = workdir.lock(lock_file)
    with held:
        if is_missing(out, run):
            with job.joined() as should_stop:
                built = build.build_run(run.config, log=job.say)
                with built.scorer:
                    params, _ = warm_start.warm_started(run.config, built, folder / "warm_start", should_stop)
            if params is None:
                return False
            workdir.write(folder, "done", "")
        place(out, run)  # under the lock, because several processes may prepare the same run
    return True


def place(out: pathlib.Path, run: Run) -> None:
    """Copies the shared warm start into a run's workdir, where training takes it up, unless it has one."""
    folder, target = shared_folder(out, run), out / run.name / "warm_start"
    target.parent.mkdir(parents=True, exist_ok=True)
    if folder is None or target.exists():
        return
    draft = target.with_name(".warm_start.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for source in sorted((folder / "warm_start").rglob("*")):  # a folder comes before what is in it
            copy = draft / source.relative_to(folder / "warm_start")
            copy.mkdir() if source.is_dir() else shutil.copyfile(source, copy)  # contents only: no modes, no times
        draft.rename(target)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
