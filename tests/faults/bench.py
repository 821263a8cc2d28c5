"""What the faults are tried on: small trainings, how each ends undisturbed, and the verdict on another end."""

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

import numpy as np
import orbax.checkpoint as ocp
import processes

from faults import verifiers
from rpg_jax.storage.checkpoints import saved_steps
from rpg_jax.storage.logs import read_jsonl

MARK = "FAULTS_PROCESS"  # in the environment of a training's reward workers
LINGER_SECONDS = 10.0  # that workers have to notice that their training is gone
LIMIT_SECONDS = 300.0  # for a command, on a loaded machine and without compiled programs
OUTCOMES = SAME, TOLD, LOST = "the same end", "a line says", "lost"
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
# Keys of a log row that a clock wrote, or that depend on where a run was cut.
UNTIMED = ("time/", "throughput/", "compilations")


class Trial(NamedTuple):
    """One fault, and what became of it."""

    kind: str  # the row of the table
    what: str
    outcome: str  # one of OUTCOMES
    line: str = ""  # what was said, or what was lost


class Ended(NamedTuple):
    """How a command ended."""

    status: int | None  # -N for signal N; None if it was still running at its time limit and was killed
    err: str
    left: Sequence[int] = ()  # processes that it left behind


class Running:
    """A training that was started, as a fork, and its reward workers."""

    def __init__(self, arguments: Sequence[str], mark: str, environment: dict):
        self._process, self._files = processes.start("train", *arguments, **environment, **{MARK: mark})
        self._mark = f"{MARK}={mark}\0".encode()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def err(self) -> str:
        """What it has written on stderr so far."""
        return pathlib.Path(self._files[1].name).read_text(errors="replace")

    def send(self, number: int) -> None:
        if self.poll() is None:
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
        status = self.poll()
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


class Bench:
    """The folder of a campaign, and the trainings in it."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self._count = folder, itertools.count()
        self._verifier = shutil.copyfile(verifiers.__file__, folder / "verifiers.py")

    def new(self) -> pathlib.Path:
        """A name for a new workdir."""
        (self.folder / "runs").mkdir(exist_ok=True)
        return self.folder / "runs" / str(next(self._count))

    def calls(self, workdir: pathlib.Path) -> pathlib.Path:
        """The file in which the reward function leaves a byte for each of its calls."""
        return self.folder / f"{workdir.relative_to(self.folder).as_posix().replace('/', '-')}.calls"

    def start(self, variant: str, workdir: pathlib.Path, **environment: str) -> Running:
        """Starts a training."""
        settings = {"reward.function": f"{self._verifier}:score", "data.directory": self.folder / "data"}
        settings |= COMMON | VARIANTS[variant]
        flags = ["--config=configs/quickstart.py:smoke", f"--workdir={workdir}"]
        flags += [f"--config.{key}={value}" for key, value in settings.items()]
        environment |= {"FAULTS_CALLS": str(self.calls(workdir))}
        return Running(flags, f"{os.getpid()}-{next(self._count)}", environment)

    def train(self, variant: str, workdir: pathlib.Path, **environment: str) -> Ended:
        """Trains to the end."""
        return self.start(variant, workdir, **environment).wait()

    def undisturbed(self, variant: str) -> pathlib.Path:
        """The workdir of a variant's training that nothing disturbed."""
        workdir = self.folder / "undisturbed" / variant
        if not (workdir / "summary.json").exists():
            ended = self.start(variant, workdir).wait(4 * LIMIT_SECONDS)  # it may compile every program
            if ended.status != 0:
                raise RuntimeError(f"the undisturbed training {variant!r} ended with {ended.status}: {ended.err}")
        return workdir

    def differences(self, variant: str, workdir: pathlib.Path, but: Sequence[str] = ()) -> str:
        """In what a finished training differs from the undisturbed one, keys in `but` aside; empty if in nothing."""
        whole = self.undisturbed(variant)
        expected, found = rows_by_step(whole, but), rows_by_step(workdir, but)
        if expected.keys() != found.keys():
            return f"metrics.jsonl has steps {sorted(found)} in place of {sorted(expected)}"
        for step, row in expected.items():
            keys = [key for key in sorted(row.keys() | found[step].keys()) if row.get(key) != found[step].get(key)]
            if keys:
                return f"step {step}: {keys[0]} is {found[step].get(keys[0])} in place of {row.get(keys[0])}"
        for name in ("samples.jsonl", "heldout.jsonl"):
            if (whole / name).read_bytes() != (workdir / name).read_bytes():
                return f"{name} differs"
        (step, arrays), (other_step, other) = last_arrays(whole), last_arrays(workdir)
        if step != other_step or arrays.keys() != other.keys():
            return f"the last checkpoint is of step {other_step} in place of {step}"
        unlike = [name for name in arrays if not np.array_equal(arrays[name], other[name], equal_nan=True)]
        return f"{len(unlike)} arrays of the last checkpoint differ, {unlike[0]} among them" if unlike else ""

    def completes(self, variant: str, workdir: pathlib.Path) -> str:
        """Trains on where nothing disturbs: what is wrong with the end, empty if nothing."""
        return failure(self.train(variant, workdir)) or self.differences(variant, workdir)

    def remove(self, workdir: pathlib.Path) -> None:
        """Deletes a workdir and what lies beside it under its name."""
        for file in [self.calls(workdir), *workdir.parent.glob(f"{workdir.name}.*"), workdir]:
            shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)


def rows_by_step(workdir: pathlib.Path, but: Sequence[str] = ()) -> dict[int, dict]:
    """step -> its metrics without times; an evaluation that was cut short has a row of its own, which is merged."""
    rows = {}
    for row in read_jsonl(workdir / "metrics.jsonl")[0]:
        kept = {key: value for key, value in row.items() if not key.startswith((*UNTIMED, *but))}
        rows[row["step"]] = rows.get(row["step"], {}) | kept
    return rows


def last_arrays(workdir: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
    """(step, {leaf: array}) of the newest checkpoint, read without the program's own reader."""
    step = max(saved_steps(workdir / "checkpoints"), default=-1)
    if step < 0:
        return step, {}
    folder = workdir / "checkpoints" / str(step)
    leaves = json.loads((folder / "record" / "metadata").read_text())["leaves"]
    plain = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in leaves}  # of whichever devices
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(folder / "state", restore_args=plain)
    return step, {name: np.asarray(array) for name, array in tree.items()}


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
    if ended.status == 2 and len(refusals(ended)) != 1:
        return f"exit status 2 with {len(refusals(ended))} lines that explain it: {last}"
    return "" if ended.status in (2, *status) else f"exit status {ended.status}: {last}"


def failure(ended: Ended) -> str:
    """What is wrong with a command that nothing disturbed, and that must end with status 0; empty if nothing."""
    return explained(ended) or (ended.err[-300:] if ended.status else "")


def refusals(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("error: ")]


def verdict(ended: Ended, difference: str, named: Sequence[str] = ("",)) -> tuple[str, str]:
    """(outcome, line) of a fault after which a command ended. A difference needs a warning that has one of `named`."""
    if wrong := explained(ended):
        return LOST, wrong
    if ended.status == 2:
        return TOLD, refusals(ended)[0]
    warned = [line for line in ended.err.splitlines() if line.startswith("warning: ")]
    said = [line for line in warned if any(name in line for name in named)]
    if difference and not said:
        return LOST, difference
    return TOLD if difference else SAME, said[0] if said else ""
