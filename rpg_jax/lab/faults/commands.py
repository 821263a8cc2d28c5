"""Kills of what makes folders: preparation, evaluation, export, and a training while its programs compile."""

import os
import shutil
import signal
import time

import numpy as np

from rpg_jax.lab.faults.bench import LIMIT_SECONDS, LOST, SAME, Bench, Trial, concluded, explained, failure
from rpg_jax.lab.faults.damage import CONVERT, outputs, read_outputs, run

CHAIN = 3  # kills of one command, at most
TYPICAL_SECONDS = 6.0  # of a command


def killed_command(bench: Bench, rng: np.random.Generator, command: str) -> list[Trial]:
    """`evaluate` or `convert`, killed again and again: what it leaves at its end is what it leaves undisturbed."""
    variant = str(rng.choice(["plain", "carried"]))
    expected, workdir, trials = outputs(bench, variant, command), bench.copy(variant), []
    name = "convert" if command == CONVERT else "evaluate"
    more = f"--target={workdir}.export" if command == CONVERT else "--k=1"
    for _ in range(rng.integers(1, CHAIN + 1)):
        begin = time.monotonic()
        running = bench.command(name, f"--workdir={workdir}", more)
        time.sleep(rng.uniform(0, TYPICAL_SECONDS))
        if running.poll() is not None:
            running.wait(1)
            break
        running.send(signal.SIGKILL)
        wrong = explained(running.wait(LIMIT_SECONDS), (0, -9))
        trials.append(Trial(f"SIGKILL, {name}", variant, LOST if wrong else SAME, wrong, time.monotonic() - begin))
        if command == CONVERT and os.path.exists(f"{workdir}.export") and read_outputs(command, workdir) != expected:
            trials[-1].outcome, trials[-1].line = LOST, "the killed export left a folder that is not complete"
    if command == CONVERT:
        shutil.rmtree(f"{workdir}.export", ignore_errors=True)
    ended = run(bench, command, workdir)
    wrong = failure(ended)
    if not wrong and read_outputs(command, workdir) != expected:
        wrong = "its files differ from those of an undisturbed command"
    return concluded(bench, trials, workdir, wrong)


def killed_compilation(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A training that compiles every program and writes it to an empty cache, killed while it does."""
    bench.undisturbed("short")
    workdir, trials = bench.new(), []
    cache = workdir.with_suffix(".cache")
    for _ in range(rng.integers(2, 5)):
        begin = time.monotonic()
        running = bench.start("short", workdir, cold=True, JAX_COMPILATION_CACHE_DIR=str(cache))
        while not (cache.exists() and any(cache.iterdir())) and running.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 5))
        running.send(signal.SIGKILL)
        wrong = explained(running.wait(LIMIT_SECONDS), (0, -9))
        trials.append(Trial("SIGKILL, compilation", "short", LOST if wrong else SAME, wrong, time.monotonic() - begin))
        if wrong:
            return trials
    ended = bench.train("short", workdir, cold=True, JAX_COMPILATION_CACHE_DIR=str(cache))
    wrong = failure(ended) or bench.differences("short", workdir)
    return concluded(bench, trials, workdir, wrong)


def killed_preparation(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """`prepare`, killed: its folder is there as a whole or not at all, and the same command makes it."""
    workdir, trials = bench.new(), []
    workdir.parent.mkdir(parents=True, exist_ok=True)
    source = workdir.with_suffix(".jsonl")
    source.write_text("".join(f'{{"problem": "What is {i} + 7?", "answer": "{i + 7}"}}\n' for i in range(200)))
    arguments = (f"--source={source}", f"--target={workdir}", "--name=sums")
    for _ in range(rng.integers(1, CHAIN + 1)):
        begin = time.monotonic()
        running = bench.command("prepare", *arguments)
        time.sleep(rng.uniform(0, 1.5))
        running.send(signal.SIGKILL)
        wrong = explained(running.wait(LIMIT_SECONDS), (0, -9))
        if not wrong and workdir.exists() and not (workdir / "summary.json").exists():
            wrong = "a folder without its summary"
        trials.append(Trial("SIGKILL, prepare", "", LOST if wrong else SAME, wrong, time.monotonic() - begin))
        if workdir.exists():
            break
    ended = bench.command("prepare", *arguments).wait(LIMIT_SECONDS)
    there = "is no empty folder" in ended.err
    wrong = explained(ended) or (ended.err[-300:] if ended.status and not there else "")
    if wrong:
        trials[-1].outcome, trials[-1].line = LOST, wrong
    else:
        bench.remove(workdir)
    return trials
