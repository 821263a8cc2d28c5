"""Faults of reward functions and of the processes that they run in."""

import os
import signal
import time

import numpy as np

from rpg_jax.lab.faults import verifiers
from rpg_jax.lab.faults.bench import LIMIT_SECONDS, LOST, TOLD, Bench, Trial, explained, failure, verdict
from rpg_jax.lab.faults.signals import PHASES, Watch

FAILURES = ("train/reward_failures",)  # what a training with misbehaving rewards says more in its rows
WORKER_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "terminated": signal.SIGTERM}


def misbehaving(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A reward function that misbehaves on some responses: these must count as wrong, with a line, and nothing else."""
    bench.undisturbed("short")
    begin, workdir, how = time.monotonic(), bench.new(), str(rng.choice(list(verifiers.MISBEHAVIOURS)))
    ended = bench.train("short", workdir, FAULTS_VERIFIER=how)
    lost = failure(ended) or bench.differences("short", workdir, FAILURES)
    said = [line for line in ended.err.splitlines() if "counted as wrong" in line]
    if not lost and not said:
        lost = "no line says that responses were counted as wrong"
    if not lost:
        bench.remove(workdir)
    outcome, line = (LOST, lost) if lost else (TOLD, said[0])
    return [Trial("verifier misbehaves", how, outcome, line, time.monotonic() - begin)]


def worker_lost(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A reward worker or its warden is killed or stopped: a response may count as wrong, with a line."""
    bench.undisturbed("short")
    begin, workdir, how = time.monotonic(), bench.new(), str(rng.choice(list(WORKER_SIGNALS)))
    running = bench.start("short", workdir)
    watch, target, hit = Watch(bench, workdir, running), str(rng.choice(["reward", "update", "evaluation"])), 0
    limit = time.monotonic() + LIMIT_SECONDS
    while watch.phase() != target and running.poll() is None and time.monotonic() < limit:
        time.sleep(0.004)
    time.sleep(rng.uniform(0, PHASES[target]))
    workers = running.workers()
    for pid in rng.permutation(workers)[: rng.integers(1, 3)]:
        try:
            os.kill(int(pid), WORKER_SIGNALS[how])
            hit += 1
        except ProcessLookupError:
            pass
    ended = running.wait(LIMIT_SECONDS)
    difference = "" if explained(ended) or ended.status else bench.differences("short", workdir, FAILURES)
    outcome, line = verdict(ended, difference, ("counted as wrong",))
    if outcome != LOST:
        bench.remove(workdir)
    what = f"{hit} of {len(workers)} worker processes in {target}"
    return [Trial(f"reward worker {how}", what, outcome, line, time.monotonic() - begin)]
