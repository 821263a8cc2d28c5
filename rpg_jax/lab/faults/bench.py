"""What the faults are tried on: small trainings, how each ends undisturbed, and the verdict on another end."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import orbax.checkpoint as ocp

from rpg_jax.data import problems
from rpg_jax.lab.faults import verifiers
from rpg_jax.lab.faults.processes import Ended, Running, Zygote
from rpg_jax.storage.checkpoints import saved_steps
from rpg_jax.storage.logs import read_jsonl

CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "quickstart.py"
LIMIT_SECONDS = 300.0  # for a training, on a loaded machine and without compiled programs
SAME, TOLD, LOST = "same", "told", "lost"  # what becomes of a fault
COMMON = {"model.size": "micro", "steps": 4, "reward.memory_mb": 256}
# Kinds of trainings: warm start and synchronous steps; earlier policies and unfinished responses; one short step.
VARIANTS = {
    "plain": {},
    "carried": {
        "warm_start.steps": 0, "rollout.delay": 3, "behavior.source": "sampler", "rollout.carry_over": True,
        "rollout.oversample": 2.0, "rollout.max_age": 6,
    },
    "short": {
        "warm_start.steps": 0, "steps": 1, "evaluation.every": 1, "reward.timeout_seconds": 2.0,
        "reward.max_failures": 1.0,
    },
    "sets": {"warm_start.steps": 0, "steps": 1, "evaluation.every": 1},
}  # fmt: skip
# The config of the variant that reads problems from files.
SETS = """
from configs import base, quickstart

def get_config():
    config = quickstart.get_config("smoke")
    settings = dict(train="", heldout=("",), tokenizer="", wording="none", template="plain", overlong="drop")
    with config.unlocked():
        config.data = base.prepared_sets(**settings)
    return config
"""
# Keys of a log row that a clock wrote, or that depend on where a run was cut.
UNTIMED = ("time/", "throughput/", "compilations")
FILES = ("samples.jsonl", "heldout.jsonl")


@dataclasses.dataclass
class Trial:
    """One fault, and what became of it."""

    kind: str  # the row of the table
    what: str
    outcome: str  # SAME, TOLD or LOST
    line: str = ""  # what was said, or what was lost
    seconds: float = 0.0


class Bench:
    """The folders, the processes and the undisturbed trainings of a campaign.

    Args:
      folder: of the campaign.
      zygote: starts the commands.
    """

    def __init__(self, folder: pathlib.Path, zygote: Zygote):
        self.folder, self.zygote, self._count = folder, zygote, 0
        self.verifier, self._config_of_sets = folder / "verifiers.py", folder / "sets.py"
        self.sets = {name: folder / f"{name}.jsonl" for name in ("train", "heldout")}
        shutil.copyfile(verifiers.__file__, self.verifier)
        self._config_of_sets.write_text(SETS)

    def new(self) -> pathlib.Path:
        """A name for a new workdir."""
        self._count += 1
        return self.folder / "runs" / str(self._count)

    def calls(self, workdir: pathlib.Path) -> pathlib.Path:
        """The file in which the reward function leaves a byte for each of its calls; never on a disk of `disks`."""
        return self.folder / "streams" / f"{workdir.relative_to(self.folder).as_posix().replace('/', '-')}.calls"

    def flags(self, variant: str, workdir: pathlib.Path, **changes) -> list[str]:
        """The flags of `rpg_jax.train` for a variant; `changes` are keys of the config with __ for the point."""
        settings = COMMON | VARIANTS[variant] | {key.replace("__", "."): value for key, value in changes.items()}
        if variant == "sets":
            data = {"data.train": self.sets["train"], "data.heldout": f"('{self.sets['heldout']}',)"}
            data["data.tokenizer"] = self.data()
        else:
            data = {"data.directory": self.folder / "data"}
        settings = {"reward.function": f"{self.verifier}:score"} | data | settings
        flags = [f"--config.{key}={value}" for key, value in settings.items()]
        config = self._config_of_sets if variant == "sets" else f"{CONFIG}:smoke"
        return [f"--config={config}", f"--workdir={workdir}", *flags]

    def start(self, variant: str, workdir: pathlib.Path, changes: dict | None = None, **how) -> Running:
        """Starts a training; `how` are arguments of `Zygote.start`, environment variables among them."""
        workdir.parent.mkdir(parents=True, exist_ok=True)
        calls = str(self.calls(workdir))
        return self.zygote.start("train", *self.flags(variant, workdir, **changes or {}), FAULTS_CALLS=calls, **how)

    def train(self, variant: str, workdir: pathlib.Path, changes: dict | None = None, **how) -> Ended:
        """Trains to the end."""
        return self.start(variant, workdir, changes, **how).wait(LIMIT_SECONDS)

    def command(self, name: str, *arguments: str, **how) -> Running:
        """Starts another command, whose reward workers write where nobody looks."""
        return self.zygote.start(name, *arguments, FAULTS_CALLS="/dev/null", **how)

    def undisturbed(self, variant: str) -> pathlib.Path:
        """The workdir of a variant's training that nothing disturbed."""
        workdir = self.folder / "undisturbed" / variant
        if not (workdir / "summary.json").exists():
            if variant == "sets":
                self._write_sets()
            ended = self.start(variant, workdir).wait(4 * LIMIT_SECONDS)  # it may compile every program
            if ended.status != 0:
                raise RuntimeError(f"the undisturbed training {variant!r} ended with {ended.status}: {ended.err}")
        return workdir

    def copy(self, variant: str, without: Sequence[str] = (".lock", "evaluation")) -> pathlib.Path:
        """A copy of that workdir, without files and folders of some names."""
        workdir = self.new()
        shutil.copytree(self.undisturbed(variant), workdir, ignore=shutil.ignore_patterns(*without))
        return workdir

    def data(self) -> pathlib.Path:
        """The folder of generated problems that the trainings read."""
        self.undisturbed("short")
        (folder,) = (path for path in (self.folder / "data").iterdir() if path.is_dir())
        return folder

    def _write_sets(self) -> None:
        """Writes some of the generated problems as files of JSON lines."""
        for name, file in self.sets.items():
            records = problems.read(self.data(), name)
            rows = [problems.to_problem(records[index]) for index in range(10)]
            lines = [json.dumps(dict(problem=row.prompt, answer=str(row.answer))) for row in rows]
            file.write_text("".join(f"{line}\n" for line in lines))

    def differences(
        self, variant: str, workdir: pathlib.Path, but: Sequence[str] = (), whole: pathlib.Path | None = None
    ) -> str:
        """In what a finished training differs from the undisturbed one, or from that in `whole`; empty if in nothing.

        `but` are keys of rows that are left out.
        """
        whole = whole or self.undisturbed(variant)
        expected, found = rows_by_step(whole, but), rows_by_step(workdir, but)
        if expected.keys() != found.keys():
            return f"metrics.jsonl has steps {sorted(found)} in place of {sorted(expected)}"
        for step, row in expected.items():
            keys = [key for key in sorted(row.keys() | found[step].keys()) if row.get(key) != found[step].get(key)]
            if keys:
                return f"step {step}: {keys[0]} is {found[step].get(keys[0])} in place of {row.get(keys[0])}"
        for name in FILES:
            if (whole / name).read_bytes() != (workdir / name).read_bytes():
                return f"{name} differs"
        (step, arrays), (other_step, other) = last_arrays(whole), last_arrays(workdir)
        if step != other_step or arrays.keys() != other.keys():
            return f"the last checkpoint is of step {other_step} in place of {step}"
        unlike = [name for name in arrays if not np.array_equal(arrays[name], other[name], equal_nan=True)]
        return f"{len(unlike)} arrays of the last checkpoint differ, {unlike[0]} among them" if unlike else ""

    def remove(self, workdir: pathlib.Path) -> None:
        """Deletes a workdir and what lies beside it under its name."""
        shutil.rmtree(workdir, ignore_errors=True)
        self.calls(workdir).unlink(missing_ok=True)
        for file in workdir.parent.glob(f"{workdir.name}.*"):
            file.unlink() if file.is_file() else shutil.rmtree(file, ignore_errors=True)


def last_step(workdir: pathlib.Path) -> int:
    """The newest checkpoint of a workdir, -1 without any."""
    return max(saved_steps(workdir / "checkpoints"), default=-1)


def rows_by_step(workdir: pathlib.Path, but: Sequence[str] = ()) -> dict[int, dict]:
    """step -> its metrics without times; an evaluation that was cut short has a row of its own, which is merged."""
    rows = {}
    for row in read_jsonl(workdir / "metrics.jsonl")[0]:
        kept = {key: value for key, value in row.items() if not key.startswith((*UNTIMED, *but))}
        rows[row["step"]] = rows.get(row["step"], {}) | kept
    return rows


def last_arrays(workdir: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
    """(step, {leaf: array}) of the newest checkpoint, read without the program's own reader."""
    step = last_step(workdir)
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
        return f"no end within {ended.seconds:.0f} s; its last line: {last}"
    if "Traceback" in ended.err:
        trace = ended.err.partition("Traceback")[2].splitlines()
        frames = [line.strip() for line in trace if line.startswith("  File ")]
        raised = next((line for line in trace[1:] if line and not line[0].isspace()), last)
        return f"a traceback: {raised}; {frames[-1:]}"
    if ended.left:
        return f"left {len(ended.left)} processes behind: {ended.left[0]}"
    if ended.status == 2 and len(refusals(ended)) != 1:
        return f"exit status 2 with {len(refusals(ended))} lines that explain it: {last}"
    if ended.status not in (2, *status):
        return f"exit status {ended.status}: {last}"
    return ""


def failure(ended: Ended) -> str:
    """What is wrong with a command that nothing disturbed, and that must end with status 0; empty if nothing."""
    return explained(ended) or (ended.err[-300:] if ended.status else "")


def concluded(bench: Bench, trials: list[Trial], workdir: pathlib.Path, wrong: str) -> list[Trial]:
    """The trials that `workdir` went through: all lost if its end is `wrong`, else the folder is removed."""
    for trial in trials if wrong else ():
        trial.outcome, trial.line = LOST, wrong
    if not wrong:
        bench.remove(workdir)
    return trials


def refusals(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("error: ")]


def warned(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if line.startswith("warning: ")]


def verdict(ended: Ended, difference: str, named: Sequence[str] = ("",)) -> tuple[str, str]:
    """(outcome, line) of a fault after which a command ended. A difference needs a warning that has one of `named`."""
    if wrong := explained(ended):
        return LOST, wrong
    if ended.status == 2:
        return TOLD, refusals(ended)[0]
    said = [line for line in warned(ended) if any(name in line for name in named)]
    if difference and not said:
        return LOST, difference
    return (TOLD, said[0]) if difference else (SAME, said[0] if said else "")
