"""Disks that fill up or deny writing, until the training is started again."""

import pathlib
import shutil
import subprocess

import numpy as np

from faults.bench import LOST, SAME, TOLD, Bench, Trial, explained, last_step, refusals

ENOUGH = 64 << 20  # bytes of a disk on which a training comes to its end
MOST_NEEDED = 2 << 20  # bytes that it writes, about


def mount(folder: pathlib.Path, options: str) -> bool:
    """Mounts a disk in memory on a folder, or mounts it again with other options. False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "faults", folder], capture_output=True)
    return done.returncode == 0


def _on_a_disk(bench: Bench, rng: np.random.Generator, kind: str, first: str, begun: bool) -> list[Trial]:
    """A training on a disk with these options, which goes on once the disk is as it should be."""
    variant, disk = str(rng.choice(["plain", "carried"])), bench.new()
    source = bench.undisturbed(variant)
    if not mount(disk, f"size={ENOUGH}"):
        return [Trial(kind, "skipped: mounting needs root", SAME)]
    try:
        if begun:
            shutil.copytree(source, disk / "run", ignore=shutil.ignore_patterns(".lock"))
            shutil.rmtree(disk / "run" / "checkpoints" / str(last_step(source)))
        mount(disk, f"remount,{first}")
        ended = bench.train(variant, disk / "run")
        mount(disk, f"remount,rw,size={ENOUGH}")
        told = ended._replace(err="\n".join(refusals(ended)))  # TensorBoard's thread prints tracebacks
        lost = explained(told) or bench.completes(variant, disk / "run")
        if not ended.status and "ro" in first:
            lost = "a training on a read-only disk ended with status 0"
        if lost:
            shutil.copytree(disk / "run", disk.with_suffix(".lost"))
    finally:
        subprocess.run(["umount", "--lazy", disk], capture_output=True)
    outcome, line = (LOST, lost) if lost else (TOLD, refusals(ended)[0]) if ended.status == 2 else (SAME, "")
    return [Trial(kind, f"{variant}, {first}", outcome, line)]


def full_disk(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A disk that is too small for the training, until it has grown."""
    return _on_a_disk(bench, rng, "full disk", f"size={rng.integers(1 << 14, MOST_NEEDED)}", False)


def read_only(bench: Bench, rng: np.random.Generator) -> list[Trial]:
    """A finished or begun run's disk cannot be written to."""
    return _on_a_disk(bench, rng, "read-only disk", f"ro,size={ENOUGH}", bool(rng.random() < 0.5))
