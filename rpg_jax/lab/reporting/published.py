"""Which published experiment a variant repeats, from its settings."""

import pathlib
from typing import NamedTuple

from configs import paper
from rpg_jax.lab.reporting.comparable import under
from rpg_jax.storage.settings import flatten

CHECKPOINT = "model.checkpoint"
IDENTITY = ("objective", "rollout.max_new")  # and the name of the checkpoint's folder
METHOD = (
    "steps", "rollout", "optimizer", "reference", "reward.scale", "reward.function", "learner.epochs",
    "learner.minibatch_prompts", "warm_start.steps", "evaluation.k", "evaluation.temperature",
)  # fmt: skip
MACHINE = ("rollout.slots",)  # what changes how fast it runs


class Score(NamedTuple):
    table: int
    benchmark: str
    task: str  # what our evaluations call it
    last: float
    best: float
    note: str


class Experiment(NamedTuple):
    name: str  # MODEL,OBJECTIVE,CONTEXT
    settings: dict  # flat
    scores: list[Score]


class Match(NamedTuple):
    experiment: Experiment
    differing: list[str]  # "key: the paper's -> ours" of what is not as in the paper


def matching(settings: dict, experiments) -> Match | None:
    """The experiment of the same model, objective and context, nearest in the rest; None if there is none.

    Args:
      settings: flat, of a variant.
    """
    same = [_match(settings, one) for one in experiments if _identity(one.settings) == _identity(settings)]
    return min(same, key=lambda match: len(match.differing), default=None)


def _identity(settings):
    folder = pathlib.Path(settings.get(CHECKPOINT) or "").name
    return folder, {key: value for key, value in settings.items() if under(key, IDENTITY) and value is not None}


def _match(settings, experiment) -> Match:
    theirs = experiment.settings
    keys = [key for key in theirs if under(key, METHOD) and not under(key, (*IDENTITY, *MACHINE))]
    differing = [f"{key}: {theirs[key]} -> {settings.get(key)}" for key in keys if theirs[key] != settings.get(key)]
    return Match(experiment, differing)


def experiments() -> list[Experiment]:
    """The paper's runs: their settings and scores."""
    names = dict.fromkeys(row.variant.removesuffix(",minerva-olympiad") for row in paper.scores())
    benchmarks = {name: pathlib.Path(path).name for name, path in (paper.BENCHMARKS | paper.MORE_BENCHMARKS).items()}
    return [
        Experiment(
            name,
            flatten(paper.get_config(name).to_dict()),
            [
                Score(row.table, row.benchmark, benchmarks[row.benchmark], row.last, row.best, row.note)
                for row in paper.published(f"{name},minerva-olympiad")
            ],
        )
        for name in names
    ]
