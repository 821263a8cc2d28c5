"""Damaged files: of each kind that a run leaves, changed at random, then met with the command that must notice."""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Sequence

import numpy as np

from faults.bench import LOST, Bench, Ended, Trial, explained, failure, last_step, verdict
from rpg_jax.storage.logs import read_jsonl

TRAIN, CONTINUE, EVALUATE, CONVERT = "train", "train on", "evaluate", "convert"
# Kind of file -> (patterns of its files in a workdir, what reads them).
#   train: of a finished run, which does nothing but restore; train on: the last step is missing.
FILES = {
    "checkpoint: arrays": (("checkpoints/*/state/**/d/*",), (TRAIN, CONTINUE, EVALUATE, CONVERT)),
    "checkpoint: metadata": (
        ("checkpoints/*/state/*", "checkpoints/*/state/ocdbt*/manifest*", "checkpoints/*/*"), (TRAIN, EVALUATE, CONVERT)
    ),
    "checkpoint: record": (("checkpoints/*/record/*",), (TRAIN, CONTINUE, EVALUATE, CONVERT)),
    "warm start": (("warm_start/**/*",), (TRAIN,)),
    "summary, figures, events": (("summary.json", "figures/*", "tensorboard/*"), (TRAIN,)),
}  # fmt: skip


def flip_a_bit(file: pathlib.Path, rng: np.random.Generator) -> str:
    data = bytearray(file.read_bytes())
    if not data:
        return remove(file, rng)
    place, bit = int(rng.integers(len(data))), int(rng.integers(8))
    data[place] ^= 1 << bit
    file.write_bytes(data)
    return f"bit {bit} of byte {place} flipped"


def truncate(file: pathlib.Path, rng: np.random.Generator) -> str:
    size = int(rng.integers(max(file.stat().st_size, 1)))
    with file.open("r+b") as opened:
        opened.truncate(size)
    return f"cut to {size} bytes"


def zero_a_block(file: pathlib.Path, rng: np.random.Generator) -> str:
    data = bytearray(file.read_bytes())
    start = int(rng.integers(max(len(data), 1)))
    end = min(len(data), start + int(rng.integers(1, 513)))
    data[start:end] = bytes(end - start)
    file.write_bytes(data)
    return f"bytes {start} to {end} zeroed"


def remove(file: pathlib.Path, rng: np.random.Generator) -> str:
    file.unlink()
    return "removed"


def replace_by_a_folder(file: pathlib.Path, rng: np.random.Generator) -> str:
    file.unlink()
    file.mkdir()
    return "a folder in its place"


WAYS: Sequence[Callable] = (flip_a_bit, flip_a_bit, truncate, zero_a_block, remove, replace_by_a_folder)


def damaged(bench: Bench, rng: np.random.Generator, kind: str) -> list[Trial]:
    """One file of a copy of a finished run is damaged, and one command meets it."""
    patterns, commands = FILES[kind]
    variant = "plain" if kind == "warm start" else str(rng.choice(["plain", "carried"]))
    command = str(rng.choice(commands))
    outputs(bench, variant, command)
    workdir = bench.copy(variant)
    if command == CONTINUE:
        shutil.rmtree(workdir / "checkpoints" / str(last_step(workdir)))
    if kind == "warm start":
        shutil.rmtree(workdir / "checkpoints")
    files = sorted({file for pattern in patterns for file in workdir.glob(pattern) if file.is_file()})
    file = files[rng.integers(len(files))]
    what = f"{file.relative_to(workdir)}: {WAYS[rng.integers(len(WAYS))](file, rng)}, then {command}"
    outcome, line = met(bench, variant, command, workdir, names(file.relative_to(workdir)))
    if outcome != LOST:
        bench.remove(workdir)
    return [Trial(f"damage: {kind}", f"{variant}, {what}", outcome, line)]


def names(file: pathlib.Path) -> Sequence[str]:
    """What a line may call a damaged file of a workdir: its name, or the checkpoint that it is in."""
    return (f"checkpoint {file.parts[1]} ",) if file.parts[0] in ("checkpoints", "warm_start") else (file.name,)


def met(bench: Bench, variant: str, command: str, workdir: pathlib.Path, named: Sequence[str]) -> tuple[str, str]:
    """(outcome, line) of a command in a workdir where a file was damaged that a line calls by one of these names."""
    if command in (TRAIN, CONTINUE):
        ended = bench.train(variant, workdir)
        difference = "" if explained(ended) or ended.status else bench.differences(variant, workdir)
        return verdict(ended, difference, named)
    expected = outputs(bench, variant, command)
    ended = run(bench, command, workdir)
    found = read_outputs(command, workdir) if ended.status == 0 else {}
    unlike = [name for name in expected if expected[name] != found.get(name)]
    return verdict(ended, f"{command}: {unlike[0]} differs" if unlike else "", named)


def run(bench: Bench, command: str, workdir: pathlib.Path) -> Ended:
    """Evaluates or converts the best checkpoint of a workdir."""
    more = (f"--target={workdir}.export",) if command == CONVERT else ("--k=1",)
    name = "convert" if command == CONVERT else "evaluate"
    return bench.command(name, f"--workdir={workdir}", *more).wait()


def read_outputs(command: str, workdir: pathlib.Path) -> dict[str, bytes]:
    """name -> contents of the files that `run` writes; of responses what they mean, in any order."""
    if command == CONVERT:
        folder = pathlib.Path(f"{workdir}.export")
        return {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder,) = (workdir / "evaluation").glob("step-*")
    rows = map(json.dumps, read_jsonl(folder / "responses.jsonl")[0])  # one that was lost is drawn again, last
    responses = "\n".join(sorted(rows)).encode()
    return {"responses.jsonl": responses, "evaluation.json": (folder / "evaluation.json").read_bytes()}


@functools.cache
def outputs(bench: Bench, variant: str, command: str) -> dict[str, bytes]:
    """name -> contents of what a command writes of the undisturbed run; {} for trainings."""
    workdir = bench.undisturbed(variant)
    if command in (TRAIN, CONTINUE):
        return {}
    if wrong := failure(run(bench, command, workdir)):
        raise RuntimeError(f"{command} of the undisturbed {variant!r}: {wrong}")
    return read_outputs(command, workdir)
