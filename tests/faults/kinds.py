"""The faults: signals at the phases of a training, and a reward function that misbehaves."""

import functools
import pathlib
import signal
import time

import numpy as np

from faults import bench, verifiers
from faults.bench import LOST, SAME, TOLD, Running, Trial

CHAIN = 6  # signals to one training, at most
DRAFT = "*.orbax-checkpoint-tmp*"  # what a checkpoint that is being written is called
GROUP_CALLS = 16  # of the reward function in a step
# Phase -> the longest wait in it, in seconds, before the signal comes.
PHASES = {
    "start": 4.0, "warm start": 1.0, "rollout": 0.5, "reward": 0.05, "update": 1.0, "evaluation": 0.5,
    "checkpoint": 0.05,
}  # fmt: skip
# Before the program has its handler a SIGTERM ends it as it ends any program.
ALLOWED = {signal.SIGKILL: (0, -9), signal.SIGTERM: (0, 75, -15)}


class Watch:
    """Tells a training's phase from the files that it writes and from the calls of its reward function."""

    def __init__(self, workdir: pathlib.Path, running: Running):
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


def _size(file: pathlib.Path) -> int:
    return file.stat().st_size if file.exists() else 0


def interrupted(folder: pathlib.Path, rng: np.random.Generator, which: signal.Signals) -> list[Trial]:
    """One training that is sent a signal in random phases again and again, and then must end as if nothing had been."""
    variant, workdir, trials = str(rng.choice(["plain", "carried"])), bench.new(folder), []
    trial = functools.partial(Trial, f"{which.name}, {variant}")
    bench.undisturbed(folder, variant)
    for _ in range(rng.integers(2, CHAIN + 1)):
        target, rows = str(rng.choice(list(PHASES))), rng.integers(0, 3)
        running = Running(variant, workdir)
        watch = Watch(workdir, running)
        rows *= target not in ("start", "warm start")
        while running.is_alive() and (watch.phase() != target or watch.rows < rows):
            time.sleep(0.004)
        time.sleep(rng.uniform(0, PHASES[target]))
        phase, over = watch.phase(), not running.is_alive()
        running.send(which)
        if wrong := bench.explained(running.wait(), ALLOWED[which]):
            return [*trials, trial(phase, LOST, wrong)]
        if over:
            break
        trials.append(trial(phase, SAME))
    if wrong := bench.failure(variant, workdir, Running(variant, workdir).wait()):
        return [one._replace(outcome=LOST, line=wrong) for one in trials]
    bench.remove(workdir)
    return trials


def misbehaving(folder: pathlib.Path, rng: np.random.Generator) -> list[Trial]:
    """A reward function that misbehaves on some responses: these must score 0, with a line, and nothing else."""
    workdir, how = bench.new(folder), str(rng.choice(list(verifiers.MISBEHAVIOURS)))
    ended = Running("short", workdir, FAULTS_VERIFIER=how).wait()
    said, lost = ended.lines("it scores 0"), bench.failure("short", workdir, ended)
    if not lost and said:
        bench.remove(workdir)
    line = lost or (said or ["no line says that responses score 0"])[0]
    return [Trial("verifier misbehaves", how, LOST if lost or not said else TOLD, line)]
