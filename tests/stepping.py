"""Parts of an RL step for tests: its log-prob pass and what follows in one call, and scoring that is no process's."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from rpg_jax.training import packing
from rpg_jax.training.experience import make_experience, make_score
from rpg_jax.training.policies import BEHAVIOR, REFERENCE, make_policies


def make_experienced(model, objective, optimizer, mesh, shapes, *, rows, source="trainer", **settings):
    """Builds `experienced(state, rollout, reward, plan=None, behavior=None, reference=None) -> (batch, metrics)`.

    The behavior policy is the state's if it is not given. `programs` are its jitted functions.
    """
    policies = make_policies(model, optimizer, mesh, shapes)
    score, experience = make_score(mesh, rows=rows, **settings), make_experience(objective, mesh)

    def experienced(state, rollout, reward, plan=None, behavior=None, reference=None):
        behavior = behavior or policies.current(state)
        named = {BEHAVIOR: behavior} if source == "trainer" else {}
        named |= {REFERENCE: dataclasses.replace(behavior, params=reference)} if reference is not None else {}
        scores = score(named, rollout, plan or packing.plan([1] * len(rollout.tokens), rows, None))
        return experience(rollout, (reward, None), scores, state.step)

    experienced.programs = score, experience.__wrapped__
    return experienced


class Begun(NamedTuple):
    """As `rewards.Submitted`: what is scored once all are there."""

    score: Callable
    items: list

    def __add__(self, other):
        return self._replace(items=self.items + other.items)

    def result(self):
        return self.score(self.items)
