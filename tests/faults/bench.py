"""What the faults are tried on: small trainings, how each ends undisturbed, and what is wrong with another end."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

import processes

from faults import verifiers
from rpg_jax.storage.checkpoints import saved_steps

MARK = "FAULTS_PROCESS"  # in the environment of a training's reward workers
LINGER_SECONDS = 10.0  # that workers have to notice that their training is gone
LIMIT_SECONDS = 300.0  # for a command, on a loaded machine and without compiled programs
SAME, TOLD, LOST = "the same end", "a line says", "lost"
COMMON = {
    "model.size": "micro", "steps": 4, "reward.memory_mb": 256, "reward.timeout_seconds": 2.0,
    "reward.max_failures": 1.0,
}  # fmt: skip
# Warm start and synchronous steps; earlier policies and unfinished responses; one short step.
VARIANTS = {
    "plain": {},
    "carried": {
        "warm_start.steps": 0, "rollout.delay": 3, "behavior.source": "sampler", "rollout.carry_over": True,
        "rollout.oversample": 2.0, "rollout.max_age": 6,
    },
    "short": {"warm_start.steps": 0, "steps": 1, "evaluation.every": 1},
}  # fmt: skip
FAILURES = "train/reward_failures"  # what misbehaving rewards alone have in a log row
_count = itertools.count()


class Trial(NamedTuple):
    """One fault, and what became of it."""

    kind: str  # the row of the table
    what: str
    outcome: str  # one of the three above
    line: str = ""  # what was said, or what was lost


class Ended(NamedTuple):
    """How a command ended."""

    status: int | None  # -N for signal N; None if it was still running at its time limit and was killed
    err: str
    left: Sequence[int] = ()  # processes that it left behind

    def lines(self, words: str) -> list[str]:
        """Of stderr, those with the words."""
        return [line for line in self.err.splitlines() if words in line]


def calls(workdir: pathlib.Path) -> pathlib.Path:
    """The file in which a training's reward function leaves a byte for each of its calls."""
    return workdir.with_name(f"{workdir.name}.calls")


class Running:
    """A training in FOLDER/runs/NAME that was started, as a fork, and its reward workers."""

    def __init__(self, variant: str, workdir: pathlib.Path, **environment: str):
        folder, mark = workdir.parents[1], f"{os.getpid()}-{next(_count)}"
        verifier = folder / "verifiers.py"
        if not verifier.exists():
            shutil.copyfile(verifiers.__file__, verifier)
        settings = {"reward.function": f"{verifier}:score", "data.directory": folder / "data"}
        flags = [f"--config.{key}={value}" for key, value in (settings | COMMON | VARIANTS[variant]).items()]
        command = "train", "--config=configs/quickstart.py:smoke", f"--workdir={workdir}", *flags
        environment |= {MARK: mark, "FAULTS_CALLS": str(calls(workdir))}
        self._process, self._files = processes.start(*command, **environment)
        self._mark = f"{MARK}={mark}\0".encode()

    def is_alive(self) -> bool:
        return self._process.exitcode is None

    def err(self) -> str:
        """What it has written on stderr so far."""
        return pathlib.Path(self._files[1].name).read_text(errors="replace")

    def send(self, number: int) -> None:
        if self.is_alive():
            kill(self._process.pid, number)

    def workers(self) -> list[int]:
        """Process ids of its reward workers; none where there is no /proc."""
        found = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not dead and self._mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def wait(self, seconds: float = LIMIT_SECONDS) -> Ended:
        """Waits for its end; kills it at the limit. What it left behind is killed after `LINGER_SECONDS`."""
        self._process.join(seconds)
        status = self._process.exitcode
        self.send(signal.SIGKILL)
        self._process.join()
        linger = time.monotonic() + LINGER_SECONDS
        while (left := self.workers()) and time.monotonic() < linger:
            time.sleep(0.05)
        for pid in left:
            kill(pid, signal.SIGKILL)
        return Ended(status, self.err(), left)


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def new(folder: pathlib.Path) -> pathlib.Path:
    """A name for a new workdir of a campaign."""
    (folder / "runs").mkdir(exist_ok=True)
    return folder / "runs" / str(next(_count))


def remove(workdir: pathlib.Path) -> None:
    shutil.rmtree(workdir, ignore_errors=True)
    calls(workdir).unlink(missing_ok=True)


def undisturbed(folder: pathlib.Path, variant: str) -> pathlib.Path:
    """The workdir of a variant's training that nothing disturbed."""
    workdir = folder / "undisturbed" / variant
    if not (workdir / "summary.json").exists():
        workdir.parent.mkdir(exist_ok=True)
        ended = Running(variant, workdir).wait(4 * LIMIT_SECONDS)  # it may compile every program
        if ended.status != 0:
            raise RuntimeError(f"the undisturbed training {variant!r} ended with {ended.status}: {ended.err}")
    return workdir


def outcome(workdir: pathlib.Path) -> dict[str, object]:
    """Metrics of a finished training as (step, key) without times, its files of responses, and its last checkpoint.

    An evaluation that was cut short has a row of its own; a checkpoint's record has a checksum of each array.
    """
    found = {f"step {row['step']}: {key}": x for row in processes.metrics(workdir) for key, x in row.items()}
    found |= {name: (workdir / name).read_bytes() for name in ("samples.jsonl", "heldout.jsonl")}
    step = max(saved_steps(workdir / "checkpoints"), default=-1)
    record = json.loads((workdir / "checkpoints" / str(step) / "record" / "metadata").read_text())
    return found | {f"checkpoint {step}: {name}": leaf for name, leaf in record["leaves"].items()}


def difference(variant: str, workdir: pathlib.Path) -> str:
    """In what a finished training differs from the undisturbed one, failed rewards aside; empty if in nothing."""
    expected, found = outcome(undisturbed(workdir.parents[1], variant)), outcome(workdir)
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name) and not name.endswith(FAILURES):
            return f"{name} is {str(found.get(name))[:80]} in place of {str(expected.get(name))[:80]}"
    return ""


def explained(ended: Ended, status: Sequence[int] = (0,)) -> str:
    """What is wrong with how a command ended, whatever it left in its files; empty if nothing.

    It must come to an end by itself, with one of these exit statuses or with 2 and one line that begins with `error: `,
    without a traceback and without processes that it leaves behind.
    """
    last = (ended.err.strip().splitlines() or [""])[-1]
    if ended.status is None:
        return f"no end within the limit; its last line: {last}"
    if "Traceback" in ended.err:
        return f"a traceback: {last}"
    if ended.left:
        return f"left {len(ended.left)} processes behind"
    if ended.status == 2 and len(ended.lines("error: ")) != 1:
        return f"exit status 2 with {len(ended.lines('error: '))} lines that explain it: {last}"
    return "" if ended.status in (2, *status) else f"exit status {ended.status}: {last}"


def failure(variant: str, workdir: pathlib.Path, ended: Ended) -> str:
    """What is wrong with a training that must end with status 0 and as if undisturbed; empty if nothing."""
    return explained(ended) or (ended.err[-300:] if ended.status else difference(variant, workdir))
