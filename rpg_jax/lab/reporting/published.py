"""Which published experiment a variant repeats, from its settings."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from rpg_jax.lab.reporting.comparable import under

CHECKPOINT = "model.checkpoint"
IDENTITY = ("objective", "rollout.max_new")  # and the name of the checkpoint's folder
METHOD = (
    "steps", "rollout", "optimizer", "reference", "reward.scale", "reward.function", "learner.epochs",
    "learner.minibatch_prompts", "warm_start.steps", "evaluation.k", "evaluation.temperature",
)  # fmt: skip
MACHINE = ("rollout.slots",)  # what changes only the speed


class Experiment(NamedTuple):
    name: str
    settings: dict  # flat
    scores: Sequence  # each with table, benchmark, task (a held-out task of our evaluations), last, best and note


class Match(NamedTuple):
    experiment: Experiment
    differing: list[str]  # "key: the paper's -> ours" of what is not as in the paper


def matching(settings: dict, experiments: Sequence[Experiment]) -> Match | None:
    """The experiment with the same model, objective and context that is nearest in the rest; None if there is none.

    Args:
      settings: flat, of a variant.
    """
    same = [experiment for experiment in experiments if _identity(experiment.settings) == _identity(settings)]
    matches = [Match(experiment, _differing(settings, experiment.settings)) for experiment in same]
    return min(matches, key=lambda match: len(match.differing), default=None)


def _identity(settings):
    folder = pathlib.Path(settings.get(CHECKPOINT) or "").name
    return folder, {key: value for key, value in settings.items() if under(key, IDENTITY) and value is not None}


def _differing(ours, theirs) -> list[str]:
    keys = [key for key in theirs if under(key, METHOD) and not under(key, (*IDENTITY, *MACHINE))]
    return [f"{key}: {theirs[key]} -> {ours.get(key)}" for key in keys if theirs[key] != ours.get(key)]
