"""Faults of reward functions and of the processes that they run in."""

import signal
import time

import numpy as np

from faults import verifiers
from faults.bench import LOST, TOLD, Bench, Trial, explained, failure, kill, verdict
from faults.signals import PHASES, Watch

FAILURES = ("train/reward_failures",)  # what a training with misbehaving rewards says more in its rows
WORKER_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "terminated": signal.SIGTERM}


def misbehaving(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A reward function that misbehaves on some responses: these must count as wrong, with a line, and nothing else."""
    workdir, how = bench.new(), str(rng.choice(list(verifiers.MISBEHAVIOURS)))
    ended = bench.train("short", workdir, FAULTS_VERIFIER=how)
    said = [line for line in ended.err.splitlines() if "counted as wrong" in line]
    lost = failure(ended) or bench.differences("short", workdir, FAILURES)
    lost = lost or ("" if said else "no line says that responses were counted as wrong")
    if not lost:
        bench.remove(workdir)
    return [Trial("verifier misbehaves", how, LOST if lost else TOLD, lost or said[0])]


def worker_lost(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """One reward worker or two are killed or stopped: a response may count as wrong, with a line."""
    workdir, how = bench.new(), str(rng.choice(list(WORKER_SIGNALS)))
    running = bench.start("short", workdir)
    watch, target = Watch(bench, workdir, running), str(rng.choice(["reward", "update", "evaluation"]))
    while watch.phase() != target and running.poll() is None:
        time.sleep(0.004)
    time.sleep(rng.uniform(0, PHASES[target]))
    workers = running.workers()
    for pid in rng.permutation(workers)[: rng.integers(1, 3)]:
        kill(int(pid), WORKER_SIGNALS[how])
    ended = running.wait()
    difference = "" if explained(ended) or ended.status else bench.differences("short", workdir, FAILURES)
    outcome, line = verdict(ended, difference, ("counted as wrong",))
    if outcome != LOST:
        bench.remove(workdir)
    return [Trial(f"reward worker {how}", target, outcome, line)]
