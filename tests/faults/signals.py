"""Signals at the phases of a training: killed again and again, it must end as if nothing had happened."""

import pathlib
import signal
import time

import numpy as np

from faults.bench import LOST, SAME, Bench, Running, Trial, explained

CHAIN = 6  # signals to one training, at most
DRAFT = "*.orbax-checkpoint-tmp*"  # what a checkpoint that is being written is called
GROUP_CALLS = 16  # of the reward function in a step
# Phase -> the longest wait in it, in seconds, before the signal comes.
PHASES = {
    "start": 4.0, "warm start": 1.0, "rollout": 0.5, "reward": 0.05, "update": 1.0, "evaluation": 0.5,
    "checkpoint": 0.05,
}  # fmt: skip
# Before the program has its handler a SIGTERM ends it as it ends any program.
ALLOWED = {"SIGKILL": (0, -9), "SIGTERM": (0, 75, -15)}


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


def interrupted(bench: Bench, rng: np.random.Generator, which: str) -> list[Trial]:
    """One training that is sent a signal in random phases again and again, then ends undisturbed."""
    variant, workdir, trials = str(rng.choice(["plain", "carried"])), bench.new(), []
    bench.undisturbed(variant)
    for _ in range(rng.integers(2, CHAIN + 1)):
        target, rows = str(rng.choice(list(PHASES))), rng.integers(0, 3)
        running = bench.start(variant, workdir)
        watch = Watch(bench, workdir, running)
        while running.poll() is None and (
            watch.phase() != target or watch.rows < rows * (target not in ("start", "warm start"))
        ):
            time.sleep(0.004)
        time.sleep(rng.uniform(0, PHASES[target]))
        phase, over = watch.phase(), running.poll() is not None
        running.send(getattr(signal, which))
        if wrong := explained(running.wait(), ALLOWED[which]):
            return [*trials, Trial(f"{which}, {variant}", phase, LOST, wrong)]
        if over:
            break
        trials.append(Trial(f"{which}, {variant}", phase, SAME))
    if wrong := bench.completes(variant, workdir):
        return [trial._replace(outcome=LOST, line=wrong) for trial in trials]
    bench.remove(workdir)
    return trials


def _size(file: pathlib.Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
