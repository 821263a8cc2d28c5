"""Runs as a report sees them: what they logged, how far they came, and which of them belong to one variant."""

import dataclasses
import functools
import json
import os
import pathlib
import re

import pandas as pd

from rpg_jax import InputError
from rpg_jax.lab.reporting.logged import ALL, SCORE, finite
from rpg_jax.storage.logs import read_json, read_jsonl
from rpg_jax.storage.settings import completed, flatten, matters

LOG = "metrics.jsonl"
SEED = re.compile(r"seed[-_]?\d+")
PHASES = ("rollout", "reward", "experience", "update", "evaluation")
BESIDE = ("learner_waited", *PHASES[2:])  # with a sampler beside the trainer
WAITED = ("sampler_waited", "learner_waited")


@dataclasses.dataclass(frozen=True)
class Run:
    path: pathlib.Path
    settings: dict | None  # flat; None without a config.json
    metrics: pd.DataFrame  # index step, a column a logged key; NaN where it is missing or not finite
    summary: dict | None

    @property
    def relevant(self) -> dict:
        """Settings without the seed and the sections that do not matter."""
        return {key: value for key, value in (self.settings or {}).items() if key != "seed" and matters(key)}

    @property
    def seed(self):
        return (self.settings or {}).get("seed")

    @property
    def planned(self) -> int | None:
        """The number of RL steps that the run is to make."""
        return (self.settings or {}).get("steps") or (self.summary or {}).get("steps")

    @property
    def last(self) -> int:
        """The last step that was logged; -1 if none."""
        return max(self.metrics.index, default=-1)

    @property
    def is_finished(self) -> bool:
        return self.last >= self.planned if self.planned else self.summary is not None

    @functools.cached_property
    def scores(self) -> pd.DataFrame:
        """mean@k of the evaluations: index step, a column a task."""
        columns = {match[1]: self.metrics[key] for key in self.metrics if (match := SCORE.fullmatch(key))}
        return pd.DataFrame(columns, index=self.metrics.index).dropna(axis=0, how="all").dropna(axis=1, how="all")

    @property
    def tasks(self) -> list[str]:
        """The held-out tasks; `all` only where there is nothing else."""
        return [task for task in self.scores if task != ALL] or list(self.scores)

    @property
    def seconds(self) -> float:
        """Wall seconds of the steps and evaluations, without the warm start."""
        phases = PHASES if self.waited is None else BESIDE
        return float(self._times(phases).sum().sum())

    @property
    def waited(self) -> pd.Series | None:
        """Mean seconds of a step that sampler and trainer waited for each other; None where one mesh does both."""
        times = self._times(WAITED).dropna(how="all")
        return None if times.empty else times.mean()

    def _times(self, phases) -> pd.DataFrame:
        return self.metrics.reindex(columns=[f"time/{phase}" for phase in phases])

    @property
    def wall_seconds(self) -> float:
        """All wall seconds according to the summary; NaN if it does not say."""
        return finite((self.summary or {}).get("wall_seconds"))

    @property
    def tokens(self) -> float:
        """Tokens generated for training, those of dropped groups included."""
        timed = self.metrics.reindex(columns=["throughput/rollout_tokens_per_second", "time/rollout"])
        return float(timed.prod(axis=1, skipna=False).sum())


def find(folders) -> list[pathlib.Path]:
    """The folders of runs at or beneath each of `folders`, in order, each once; InputError for one without a run."""
    paths = {}
    for folder in map(pathlib.Path, folders):
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; name those of runs, or of a sweep")
        runs, seen = [], set()
        for path, inner, files in os.walk(folder, followlinks=True):
            inner.sort(key=_natural)
            if os.path.realpath(path) in seen:  # links may lead in a circle
                inner.clear()
                continue
            seen.add(os.path.realpath(path))
            if LOG in files or {"config.json", "log.txt"} <= set(files):  # the second has not come to its first step
                runs.append(pathlib.Path(path))
                inner.clear()
        if not any((path / LOG).exists() for path in runs):
            raise InputError(
                f"{folder} holds no run: there is no {LOG} in it or beneath it; train first, or name another"
            )
        paths |= {path.resolve(): path for path in runs}
    return list(paths.values())


def _natural(name) -> list:
    """Sorts beta-0.05 before beta-0.1, and beta-2 before beta-10."""
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", name)
    return [float(part) if number % 2 else part for number, part in enumerate(parts)]


def read(path) -> Run:
    """A run from its folder, as far as it has come. Of two rows of a step, as after a stop in its evaluation, the later
    one counts where it says something. InputError for a line of the log that is no row, unless a kill cut it short."""
    config, (lines, _) = read_json(path / "config.json"), read_jsonl(path / LOG, {"step": int})
    rows = {}
    for row in sorted(lines, key=lambda row: row["step"]):
        rows[row["step"]] = rows.get(row["step"], {}) | row
    # Those of docs/study are flat in their files: what a file has stands above what it lacks.
    settings = flatten(completed(config)) | flatten(config) if config else None
    numbers = [{key: finite(value) for key, value in row.items() if key != "step"} for row in rows.values()]
    metrics = pd.DataFrame(numbers, index=pd.Index(list(rows), dtype="int64", name="step"), dtype="float64")
    return Run(path, settings, metrics, read_json(path / "summary.json"))


@dataclasses.dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed."""

    name: str
    runs: list[Run]

    @property
    def settings(self) -> dict:
        return self.runs[0].relevant


def variants(runs) -> list[Variant]:
    """Groups runs of the same settings, named by their folder, or by the one above where folders are named `seedN`.

    Runs of one such folder that differ only in their number of steps belong to one variant. Runs without a config.json
    stand alone.
    """
    groups, lengths = {}, {}
    for run in runs:
        settings = {"path": str(run.path)} if run.settings is None else run.relevant
        steps = settings.pop("steps", None)
        key = json.dumps(settings, sort_keys=True)
        groups.setdefault((key, lengths.setdefault((key, _above_seeds(run.path)), steps)), []).append(run)
    folders = [list(dict.fromkeys(_above_seeds(run.path) for run in group)) for group in groups.values()]
    root = os.path.commonpath([folder.parent for group in folders for folder in group])
    names = ["+".join(folder.relative_to(root).as_posix() for folder in group) for group in folders]
    return [
        Variant(f"{name} ({', '.join(run.path.name for run in group)})" if names.count(name) > 1 else name, group)
        for name, group in zip(names, groups.values(), strict=True)
    ]


def _above_seeds(path: pathlib.Path) -> pathlib.Path:
    """The folder of a run, or the one above it where its name is that of a seed."""
    path = path.resolve()
    return path.parent if SEED.fullmatch(path.name) else path
