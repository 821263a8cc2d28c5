"""Runs as a report sees them: what they logged, how far they came, and which belong to one variant."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import sys

from rpg_jax.lab.reporting.logged import read_json, read_rows
from rpg_jax.storage.settings import flatten, matters

LOG = "metrics.jsonl"
SEED = re.compile(r"seed[-_]?\d+")
SCORE = re.compile(r"eval/(.+)/mean@(\d+)")
ALL = "all"  # every problem of every task, counted once
PHASES = ("rollout", "reward", "experience", "update", "evaluation")


@dataclasses.dataclass(frozen=True)
class Run:
    path: pathlib.Path
    settings: dict | None  # flat; None without a config.json
    rows: dict  # step -> row
    lost: int  # lines that were not whole
    summary: dict | None

    @property
    def seed(self):
        return (self.settings or {}).get("seed")

    @property
    def planned(self) -> int | None:
        """The steps that it is to make."""
        return (self.settings or {}).get("steps") or (self.summary or {}).get("steps")

    @property
    def last(self) -> int:
        """The last step that it logged; -1 if none."""
        return max(self.rows, default=-1)

    @property
    def is_finished(self) -> bool:
        return self.last >= self.planned if self.planned else self.summary is not None

    @functools.cached_property
    def scores(self) -> dict:
        """{task: {step: mean@k}} of its evaluations, where they are finite."""
        found = {}
        for step, row in self.rows.items():
            for key, value in row.items():
                match = SCORE.fullmatch(key)
                if match and _is_number(value):
                    found.setdefault(match[1], {})[step] = float(value)
        return found

    @functools.cached_property
    def responses(self) -> set:
        """The k of its mean@k."""
        return {int(match[2]) for row in self.rows.values() for key in row if (match := SCORE.fullmatch(key))}

    @property
    def tasks(self) -> list[str]:
        """Its held-out tasks; `all` only where nothing else is there."""
        return [task for task in self.scores if task != ALL] or list(self.scores)

    def evaluated(self, tasks) -> list[int]:
        """Steps at which each of the tasks has a score."""
        steps = [set(self.scores.get(task, ())) for task in tasks]
        return sorted(set.intersection(*steps)) if steps else []

    @property
    def seconds(self) -> float:
        """Wall seconds of its steps and evaluations, without the warm start."""
        return sum(_number(row.get(f"time/{phase}")) for row in self.rows.values() for phase in PHASES)

    @property
    def wall_seconds(self) -> float:
        """All of its wall seconds, as its summary says; 0 if it does not."""
        return _number((self.summary or {}).get("wall_seconds"))

    @property
    def tokens(self) -> float:
        """Tokens generated for training, those of dropped groups among them."""
        rate = "throughput/rollout_tokens_per_second"
        return sum(_number(row.get(rate)) * _number(row.get("time/rollout")) for row in self.rows.values())

    def series(self, key) -> dict:
        """{step: value} of a logged number, where it is finite."""
        return {step: float(row[key]) for step, row in self.rows.items() if _is_number(row.get(key))}


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _number(value) -> float:
    return float(value) if _is_number(value) else 0.0


def find(folders) -> list[pathlib.Path]:
    """The folders of runs at or beneath each of `folders`, in order, each once.

    Raises:
      ValueError: a folder does not exist, or has no run.
    """
    found = {}
    for folder in map(pathlib.Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; name those of runs, or of a sweep")
        here, seen = [], set()
        for path, inner, files in os.walk(folder, followlinks=True):
            inner.sort(key=_natural)
            if os.path.realpath(path) in seen:  # links may lead in a circle
                inner.clear()
                continue
            seen.add(os.path.realpath(path))
            if LOG in files or {"config.json", "log.txt"} <= set(files):  # the second has not come to its first step
                here.append(pathlib.Path(path))
                inner.clear()
        if not any((path / LOG).exists() for path in here):
            raise ValueError(
                f"{folder} holds no run: there is no {LOG} in it or beneath it; train first, or name another"
            )
        found |= {path.resolve(): path for path in here}
    return list(found.values())


def _natural(name) -> list:
    """Sorts beta-0.05 before beta-0.1, and beta-2 before beta-10."""
    parts = re.split(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", name)
    return [float(part) if number % 2 else part for number, part in enumerate(parts)]


def read(path) -> Run:
    """A run from its folder; what is missing or cut short is counted, not raised."""
    config = read_json(path / "config.json")
    rows, lost = read_rows(path / LOG)
    return Run(path, None if config is None else flatten(config), rows, lost, read_json(path / "summary.json"))


@dataclasses.dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed alone."""

    name: str
    runs: list[Run]

    @property
    def settings(self) -> dict:
        """Flat, without the seed and what does not matter."""
        return relevant(self.runs[0].settings or {})


def relevant(settings) -> dict:
    """Without the seed and the sections that do not matter."""
    return {key: value for key, value in settings.items() if key != "seed" and matters(key)}


def variants(runs) -> tuple[list[Variant], list[tuple[Run, Run]]]:
    """Groups of runs of the same settings and, of a settings and seed that is there twice, (a shorter, the longest).

    A variant is named by the folder of its runs, which is the one above where folders are `seedN`; where two variants
    would have one name, by as much of their paths as tells them apart. Runs of one such folder that differ in their
    number of steps alone are of one variant. Runs without a config.json stand alone.
    """
    copies, groups, lengths, twice = {}, {}, {}, []
    for run in runs:
        settings = {"path": str(run.path)} if run.settings is None else relevant(run.settings)
        steps = settings.pop("steps", None)
        key = json.dumps(settings, sort_keys=True)
        key = key, lengths.setdefault((key, _above_seeds(run.path)), steps)
        copies.setdefault((key, run.seed), []).append(run)
    for (key, _), same in copies.items():
        longest = max(same, key=lambda run: run.last)  # the first of them
        groups.setdefault(key, []).append(longest)
        twice += [(run, longest) for run in same if run is not longest]
    folders = [tuple(dict.fromkeys(_above_seeds(run.path) for run in group)) for group in groups.values()]
    names = [
        _distinct(own, [other for n, other in enumerate(folders) if n != number]) for number, own in enumerate(folders)
    ]
    repeated = {name for name in names if names.count(name) > 1}
    return [
        Variant(f"{name} ({', '.join(run.path.name for run in group)})" if name in repeated else name, group)
        for name, group in zip(names, groups.values(), strict=True)
    ], twice


def _above_seeds(path) -> tuple:
    """The parts of a run's path, without a last one that names a seed."""
    parts = path.resolve().parts
    return parts[:-1] if SEED.fullmatch(parts[-1]) else parts


def _distinct(folders, others) -> str:
    """The shortest ends of the folders' paths, joined by +, that no other variant's have."""
    taken, names = {path for group in others for path in group if path not in folders}, []
    for path in folders:
        depth = 1
        while depth < len(path) and any(path[-depth:] == other[-depth:] for other in taken):
            depth += 1
        names.append("/".join(path[-depth:]))
    return "+".join(dict.fromkeys(names))
