"""What `python -m rpg_jax.faults` does: it spends its minutes on faults and writes what became of each."""

import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TextIO

import numpy as np
from rich.table import Table

from rpg_jax import InputError
from rpg_jax.lab.faults import commands, damage, disks, jobs, rewards, signals
from rpg_jax.lab.faults.bench import LOST, SAME, TOLD, Bench, Trial
from rpg_jax.lab.faults.processes import Zygote
from rpg_jax.run import cli
from rpg_jax.run.target import new_folder, print_table

# What trainings of a campaign compile runs for a second: most of LLVM's passes would cost more than they bring.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
ROOT = pathlib.Path(__file__).parents[3]
TRIALS, REPORT, ABOUT = "trials.jsonl", "report.md", "campaign.json"
Fault = Callable[[Bench, np.random.Generator], list[Trial]]


def faults() -> dict[str, list[tuple[float, Fault]]]:
    """Family of faults -> its faults, each with the share of the campaign's time that it may take."""
    shares = {"SIGKILL": 32, "SIGTERM": 3, "SIGTERM twice": 3, "SIGINT twice": 2, "SIGSTOP, SIGCONT": 1}
    return {
        "signals": [(share, partial(signals.interrupted, which=which)) for which, share in shares.items()],
        "damage": [(1, partial(damage.damaged, kind=kind)) for kind in damage.FILES],
        "verifiers": [(6, rewards.misbehaving)],
        "commands": [
            (2, partial(commands.killed_command, command=damage.EVALUATE)),
            (2, partial(commands.killed_command, command=damage.CONVERT)),
            (1, commands.killed_preparation),
            (2, commands.killed_compilation),
        ],
        "disks": [(1.5, disks.full_disk), (1, disks.limited_files), (1, disks.read_only)],
        "data": [(1, disks.edited)],
        "clock": [(1, disks.jumping_clock)],
        "jobs": [(4, jobs.member_lost)],
        "workers": [(2, rewards.worker_lost)],
    }


def main(options) -> int:
    """Runs a campaign as the flags of `rpg_jax.faults` say. Returns 0 when nothing was lost, 1 otherwise."""
    out = new_folder("out", options.out).absolute()
    families = faults()
    chosen = options.kinds or list(families)
    if unknown := [name for name in chosen if name not in families]:
        raise InputError(f"--kinds={unknown[0]} is unknown; known: {', '.join(families)}")
    out.mkdir(parents=True, exist_ok=True)
    stop = cli.stop_event()
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(out / "jax_cache"))
    # Trainings import configs from the repository, wherever the campaign is started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    about = dict(seed=options.seed, minutes=options.minutes, lanes=options.lanes, kinds=chosen, commit=commit())
    about |= dict(machine=f"{os.cpu_count()} CPUs, {platform.machine()}", python=platform.python_version())
    about |= dict(load=os.getloadavg()[0])
    turns = [Turn(share, fault) for name in chosen for share, fault in families[name]]
    np.random.default_rng(options.seed).shuffle(turns)
    with (out / TRIALS).open("w") as log, ThreadPoolExecutor(options.lanes) as pool:
        campaign = Campaign(turns, options, stop, log)
        list(pool.map(campaign.lane, [out / f"lane-{number}" for number in range(options.lanes)]))
    trials = campaign.trials
    about |= dict(minutes_taken=round(campaign.minutes(), 1), faults=len(trials), lost=campaign.lost())
    (out / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    (out / REPORT).write_text(markdown(trials))
    show(trials, about)
    return int(about["lost"] > 0)


class Campaign:
    """What the lanes share: the turns, the time, and the trials so far, which `log` keeps as JSON lines."""

    def __init__(self, turns: list["Turn"], options, stop: threading.Event, log: TextIO):
        self.trials: list[Trial] = []
        self._turns, self._options, self._stop, self._log = turns, options, stop, log
        self._begin, self._lock = time.monotonic(), threading.Lock()

    def minutes(self) -> float:
        """Minutes since it began."""
        return (time.monotonic() - self._begin) / 60

    def lost(self) -> int:
        """How many trials have lost something."""
        return sum(trial.outcome == LOST for trial in self.trials)

    def lane(self, folder: pathlib.Path) -> None:
        """Tries one fault after the other in a folder of its own, until the time is over."""
        (folder / "streams").mkdir(parents=True)
        with Zygote(folder / "streams") as zygote:
            bench = Bench(folder, zygote)
            while turn := self._next():
                self._record(turn, turn.take(bench, self._options.seed))

    def _next(self) -> "Turn | None":
        """The fault that is furthest behind its share of the time, those first that no lane tries; None at the end."""
        with self._lock:
            if self._stop.is_set() or self.minutes() >= self._options.minutes:
                return None
            turn = min(self._turns, key=lambda turn: (turn.lanes, turn.spent / turn.share))
            turn.lanes, turn.count = turn.lanes + 1, turn.count + 1
            return turn

    def _record(self, turn: "Turn", trials: list[Trial]) -> None:
        with self._lock:
            turn.lanes -= 1
            self.trials += trials
            for trial in trials:
                self._log.write(json.dumps(dataclasses.asdict(trial)) + "\n")
                if trial.outcome == LOST:
                    print(f"LOST: {trial.kind}: {trial.what}: {trial.line}", file=sys.stderr)
            self._log.flush()
            so_far = f"{self.minutes():.1f} of {self._options.minutes:g} min"
            text = f"{len(self.trials)} faults, {self.lost()} lost | {so_far} | {turn.name}"
            print(text, file=sys.stderr, flush=True)


class Turn:
    """One fault of a campaign: its share of the time, the seconds it has taken, how often and in how many lanes."""

    def __init__(self, share: float, fault: Fault):
        self.share, self.spent, self.count, self.lanes, self._fault = share, 0.0, 0, 0, fault
        function, settings = getattr(fault, "func", fault), getattr(fault, "keywords", {})
        self.name = " ".join([function.__name__, *map(str, settings.values())])

    def take(self, bench: Bench, seed: int) -> list[Trial]:
        """Tries the fault once more; the random numbers depend on the seed, the fault and how often it was tried."""
        begin = time.monotonic()
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode()), self.count])
        try:
            trials = self._fault(bench, rng)
        except Exception as error:  # of the campaign itself, or of a state of files that it does not expect
            traceback.print_exc()
            trials = [Trial(self.name, "the campaign", LOST, f"{type(error).__name__}: {error}")]
        self.spent += time.monotonic() - begin
        return trials


def commit() -> str:
    """The commit of the code, with + after it if files differ from it; empty outside of a repository."""
    said = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty=+"], capture_output=True, text=True)
    return said.stdout.strip()


COLUMNS = ("fault", "tried", "the same end", "a line says", "lost", "slowest, s")


def counted(trials: list[Trial]) -> list[tuple]:
    """Rows of the table, by kind, in the order of their first trial, and their sum."""
    rows = []
    for kind in [*dict.fromkeys(trial.kind for trial in trials), "all"]:
        chosen = [trial for trial in trials if kind in (trial.kind, "all")]
        outcomes = Counter(trial.outcome for trial in chosen)
        slowest = max((trial.seconds for trial in chosen), default=0.0)
        rows.append((kind, len(chosen), *(outcomes[name] for name in (SAME, TOLD, LOST)), f"{slowest:.0f}"))
    return rows


def markdown(trials: list[Trial]) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *counted(trials)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def show(trials: list[Trial], about: dict) -> None:
    """Prints the table, and what was lost."""
    table = Table(title=f"{about['minutes_taken']} minutes, seed {about['seed']}, commit {about['commit']}")
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if place else "left")
    for row in counted(trials):
        table.add_row(*map(str, row))
    print_table(table)
    for trial in trials:
        if trial.outcome == LOST:
            print(f"lost: {trial.kind}: {trial.what}: {trial.line}")
