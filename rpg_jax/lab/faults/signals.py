"""Signals at the phases of a training: killed and resumed again and again, it must end as if nothing had happened."""

import pathlib
import signal
import time
from typing import NamedTuple

import numpy as np

from rpg_jax.lab.faults.bench import LIMIT_SECONDS, LOST, SAME, Bench, Trial, concluded, explained, failure
from rpg_jax.lab.faults.processes import Running

CHAIN = 6  # signals to one training, at most
DRAFT = "*.orbax-checkpoint-tmp*"  # what a checkpoint that is being written is called
GROUP_CALLS = 16  # of the reward function in a step
# Phase -> the longest wait in it, in seconds, before the signal comes.
PHASES = {
    "start": 4.0,
    "warm start": 1.0,
    "rollout": 0.5,
    "reward": 0.05,
    "update": 1.0,
    "evaluation": 0.5,
    "checkpoint": 0.05,
}
SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGSTOP, SIGCONT": (signal.SIGSTOP, signal.SIGCONT),
}


class Watch:
    """Tells a training's phase from the files that it writes and from the calls of its reward function."""

    def __init__(self, bench: Bench, workdir: pathlib.Path, running: Running):
        self._workdir, self._running = workdir, running
        self._log, self._calls = workdir / "metrics.jsonl", bench.calls(workdir)
        self._size, self._before, self.rows = _size(self._log), _size(self._calls), 0

    def phase(self) -> str:
        """A name in PHASES."""
        size = _size(self._log)
        if size != self._size:
            self._size, self._before, self.rows = size, _size(self._calls), self.rows + 1
        calls = _size(self._calls) - self._before
        if any(any((self._workdir / name).glob(DRAFT)) for name in ("checkpoints", "warm_start")):
            return "checkpoint"
        if not self.rows and not calls:
            return "warm start" if "warm start" in self._running.err() else "start"
        if not size:
            return "evaluation"  # the first one comes before the first row
        if not calls:
            return "rollout"
        return "reward" if calls < GROUP_CALLS else "update" if calls == GROUP_CALLS else "evaluation"


class Struck(NamedTuple):
    """Where a signal hit."""

    phase: str
    rows: int  # of the log since the process began


def strike(
    bench: Bench, variant: str, workdir: pathlib.Path, numbers: tuple[int, ...], rng: np.random.Generator, **how
) -> tuple[Struck | None, Running]:
    """Starts a training and sends it signals at a random moment of a random phase; None if it ended before."""
    target, rows = rng.choice(list(PHASES)), rng.integers(0, 3)
    running = bench.start(variant, workdir, **{"cold": bool(rng.random() < 0.05)} | how)
    watch, limit = Watch(bench, workdir, running), time.monotonic() + LIMIT_SECONDS
    while (phase := watch.phase()) != target or watch.rows < rows * (target not in ("start", "warm start")):
        if running.poll() is not None or time.monotonic() > limit:
            return None, running
        time.sleep(0.004)
    time.sleep(rng.uniform(0, PHASES[target]))
    phase = watch.phase()
    if running.poll() is not None:
        return None, running
    for number in numbers:
        running.send(number)
        time.sleep(rng.uniform(0, 0.5) if len(numbers) > 1 else 0)
    return Struck(phase, watch.rows), running


def interrupted(bench: Bench, rng: np.random.Generator, which: str) -> list[Trial]:
    """One training that is sent the signals again and again, then ends undisturbed."""
    variant = str(rng.choice(["plain", "carried"]))
    bench.undisturbed(variant)
    workdir, trials, numbers = bench.new(), [], SIGNALS[which]
    last = which != "SIGSTOP, SIGCONT"  # after which it goes on
    for _ in range(rng.integers(2, CHAIN + 1) if last else 1):
        begin = time.monotonic()
        struck, running = strike(bench, variant, workdir, numbers, rng)
        ended = running.wait(LIMIT_SECONDS)
        # Before the program has its handler a SIGTERM ends it as it ends any program.
        allowed = {"SIGKILL": {-9}, "SIGTERM": {75, -15}, "SIGTERM twice": {75, -15}, "SIGINT twice": {75, 130, -2}}
        wrong = explained(ended, (0, *allowed.get(which, ())))
        if struck is None and not wrong:
            break
        phase = struck.phase if struck else "?"
        trials.append(Trial(f"{which}, {variant}", phase, LOST if wrong else SAME, wrong, time.monotonic() - begin))
        if wrong:
            return trials
    begin = time.monotonic()
    ended = bench.train(variant, workdir)
    lost = failure(ended) or bench.differences(variant, workdir)
    if trials:
        trials[-1].seconds += time.monotonic() - begin
    wrong = f"after signals in {[trial.what for trial in trials]}: {lost}" if lost else ""
    return concluded(bench, trials, workdir, wrong)


def _size(file: pathlib.Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
