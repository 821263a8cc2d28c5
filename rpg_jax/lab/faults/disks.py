"""Disks that fill up, deny writing or limit files, clocks that jump, and data that changes between two starts."""

import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import numpy as np

from rpg_jax.lab.faults.bench import (
    LIMIT_SECONDS,
    LOST,
    SAME,
    TOLD,
    Bench,
    Trial,
    explained,
    last_step,
    refusals,
    verdict,
)
from rpg_jax.lab.faults.signals import strike

ENOUGH = 64 << 20  # bytes of a disk on which a training comes to its end
MOST_NEEDED = 2 << 20  # bytes that it writes, about
# Jumps on each call that is a multiple of JUMP, by up to three days to and fro; the monotonic clock goes on.
CLOCK = """
import itertools, os, random, time
_draw, _calls, _real = random.Random({seed}), itertools.count(), time.time_ns
_offset = [0]
def _time_ns():
    if next(_calls) % {jump} == {jump} - 1:
        _offset[0] = _draw.randrange(-3 * 86400 * 10**9, 3 * 86400 * 10**9)
    return _real() + _offset[0]
time.time_ns = _time_ns
time.time = lambda: _time_ns() / 1e9
"""


def mount(folder: pathlib.Path, options: str) -> bool:
    """Mounts a disk in memory on a folder, or mounts it again with other options. False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "faults", folder], capture_output=True)
    return done.returncode == 0


def unmount(folder: pathlib.Path) -> None:
    subprocess.run(["umount", "--lazy", folder], capture_output=True)


def resumed(bench: Bench, variant: str, workdir: pathlib.Path, ended, status=()) -> tuple[str, str]:
    """(outcome, line) of a training that a fault may have ended, once it has gone on without the fault."""
    if wrong := explained(ended, (0, *status)):
        return LOST, wrong
    again = bench.train(variant, workdir)
    if lost := explained(again) or again.status and again.err[-300:] or bench.differences(variant, workdir):
        return LOST, f"after {refusals(ended) or ended.status}, resumed: {lost}"
    return (TOLD, refusals(ended)[0]) if ended.status == 2 else (SAME, "")


def full_disk(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A disk that is too small for the training, until it has grown."""
    begin, variant, disk = time.monotonic(), str(rng.choice(["plain", "carried"])), bench.new()
    bench.undisturbed(variant)
    size = int(rng.integers(1 << 14, MOST_NEEDED))
    if not mount(disk, f"size={size}"):
        return [Trial("full disk", "no disk could be mounted", SAME, "skipped: mounting needs root")]
    try:
        ended = bench.train(variant, disk / "run")
        mount(disk, f"remount,size={ENOUGH}")
        outcome, line = resumed(bench, variant, disk / "run", ended)
        if outcome == LOST:
            shutil.copytree(disk / "run", disk.with_suffix(".lost"))
    finally:
        unmount(disk)
    return [Trial("full disk", f"{variant}, {size} bytes", outcome, line, time.monotonic() - begin)]


def limited_files(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """No file may grow beyond a size, as under a quota, until the next start."""
    begin, variant, workdir = time.monotonic(), str(rng.choice(["plain", "carried"])), bench.new()
    bench.undisturbed(variant)
    most = int(2 ** rng.uniform(10, 18))
    ended = bench.train(variant, workdir, most_bytes=most)
    outcome, line = resumed(bench, variant, workdir, ended)
    if outcome != LOST:
        bench.remove(workdir)
    return [Trial("files limited in size", f"{variant}, {most} bytes", outcome, line, time.monotonic() - begin)]


def read_only(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A finished or begun run's disk cannot be written to, until the next start."""
    begin, variant, disk = time.monotonic(), str(rng.choice(["plain", "carried"])), bench.new()
    source = bench.undisturbed(variant)
    if not mount(disk, f"size={ENOUGH}"):
        return [Trial("read-only disk", "no disk could be mounted", SAME, "skipped: mounting needs root")]
    try:
        begun = bool(rng.random() < 0.5)
        if begun:
            shutil.copytree(source, disk / "run", ignore=shutil.ignore_patterns(".lock"))
            shutil.rmtree(disk / "run" / "checkpoints" / str(last_step(source)))
        mount(disk, f"remount,ro,size={ENOUGH}")
        ended = bench.train(variant, disk / "run")
        mount(disk, f"remount,rw,size={ENOUGH}")
        outcome, line = resumed(bench, variant, disk / "run", ended)
        if ended.status == 0:
            outcome, line = LOST, "a training on a read-only disk ended with status 0"
    finally:
        unmount(disk)
    return [
        Trial("read-only disk", f"{variant}, {'begun' if begun else 'new'}", outcome, line, time.monotonic() - begin)
    ]


def jumping_clock(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """Time that jumps by days in a training that is killed and, with another clock, goes on."""
    begin, variant, workdir = time.monotonic(), str(rng.choice(["plain", "carried"])), bench.new()
    bench.undisturbed(variant)
    for killed in (True, False):
        site = workdir.with_suffix(".clock")
        site.mkdir(parents=True, exist_ok=True)
        text = CLOCK.format(seed=int(rng.integers(1 << 30)), jump=int(rng.integers(2, 50)))
        (site / "sitecustomize.py").write_text(text)
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        how = dict(cold=True, PYTHONPATH=path)
        if killed:
            _, running = strike(bench, variant, workdir, (signal.SIGKILL,), rng, **how)
            ended = running.wait(LIMIT_SECONDS)
            outcome, line = LOST, explained(ended, (0, -9))
            if line:
                break
            for file in workdir.rglob("*"):
                os.utime(file, (rng.uniform(0, 4e9),) * 2)
        else:
            outcome, line = resumed(bench, variant, workdir, bench.train(variant, workdir, **how))
    if outcome != LOST:
        bench.remove(workdir)
    return [Trial("jumping clock", variant, outcome, line, time.monotonic() - begin)]


def append(text: str) -> str:
    return text + "\n"


def drop_the_first_line(text: str) -> str:
    return text.split("\n", 1)[1]


def reverse(text: str) -> str:
    return "\n".join(reversed(text.splitlines())) + "\n"


def change_a_letter(text: str) -> str:
    return text.replace("1", "2", 1)


EDITS: dict[str, Callable[[str], str]] = {
    edit.__name__.replace("_", " "): edit for edit in (append, drop_the_first_line, reverse, change_a_letter)
}


def edited(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A file of problems, or that of the reward function, is another one when a run goes on: it must be refused."""
    begin = time.monotonic()
    what = str(rng.choice(["train", "heldout", "verifier"]))
    variant = "short" if what == "verifier" else "sets"
    bench.undisturbed(variant)
    file = bench.verifier if what == "verifier" else bench.sets[what]
    workdir, before, way = bench.copy(variant), file.read_text(), str(rng.choice(list(EDITS)))
    try:
        file.write_text(EDITS[way](before))
        ended = bench.train(variant, workdir)
    finally:
        file.write_text(before)
    outcome, line = verdict(ended, "" if ended.status == 2 else "it went on with another file")
    if outcome != LOST:
        bench.remove(workdir)
    return [Trial("an edited file", f"{what}: {way}", outcome, line, time.monotonic() - begin)]
