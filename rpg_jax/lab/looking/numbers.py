"""The coefficient that an objective puts before grad log p of each kept token, by `jax.grad` of its own function."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rpg_jax import InputError, objectives
from rpg_jax.objectives import RECIPES, Objective
from rpg_jax.objectives.batch import prepare
from rpg_jax.objectives.clips import Clipped
from rpg_jax.run.build import set_keys

# An input of a loss, and the column that has it.
INPUTS = {name: name for name in ("behavior_logp", "advantage", "reference_logp", "weight")}
INPUTS |= dict(logp="current_logp", mask="loss_mask")
OF_BATCH = {"m2po", "optimal"}  # settings that look at all responses that a loss is called with


class Shown(NamedTuple):
    """An objective with the title and the remarks that stand beside it."""

    title: str
    objective: Objective
    notes: list[str]


def shown(config: ConfigDict, spec: str | None = None) -> Shown:
    """The objective NAME+KEY=VALUE+… of `--objectives`, with the run's settings where it has its name, or for None.

    Raises InputError as `objectives.make` does.
    """
    own = config.objective.name
    name, *pairs = (own if spec is None else spec).split("+")
    for pair in pairs:
        if "=" not in pair or pair.startswith("name="):
            raise InputError(f"--objectives={spec}: {pair!r} sets nothing of an objective; expected NAME+KEY=VALUE+…")
    changes = {key: _value(text) for key, _, text in (pair.partition("=") for pair in pairs)}
    settings = set_keys(config.objective, "name", "denominator") if name == own else {}
    objective = objectives.make(name, **settings | changes)
    clip, defaults = objective.settings.get("clip"), RECIPES[own].defaults if own in RECIPES else {}
    advantage = config.objective.advantage or defaults.get("advantage", "its own")
    is_own = name == own and not pairs
    title = name + "".join(f" {key}={value}" for key, value in changes.items()) + " (this run)" * is_own
    other = objective.advantage != advantage and (name != own or "advantage" in changes)
    notes = {
        f"clip {clip}": clip and not pairs and clip != "none",
        f"its own advantage is {objective.advantage}; it is given the run's, which is {advantage}": other,
        "the KL over the whole vocabulary is no coefficient of a token, and is left out": objective.full_kl is not None,
        "estimated from the responses of this group, in training from a microbatch": OF_BATCH & {
            clip, str(objective.settings.get("control"))
        },
    }  # fmt: skip
    return Shown(title, objective, [note for note, holds in notes.items() if holds])


def _value(text: str) -> Any:
    """The value of a setting that is spelled on the command line; nothing is unset."""
    try:
        return float(text)
    except ValueError:
        return text or None


def arrays_of(groups: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, np.ndarray]:
    """The inputs of a loss, [groups, responses, T] each and padded, of rows of look.parquet; float64, the mask bool."""
    shape = len(groups), max(map(len, groups)), max(len(row["tokens"]) for rows in groups for row in rows)
    arrays = {name: np.zeros(shape, bool if name == "mask" else float) for name in INPUTS}
    for group, rows in enumerate(groups):
        for number, row in enumerate(rows):
            for name, column in INPUTS.items():
                arrays[name][group, number, : len(row["tokens"])] = row[column]  # one number stands for all tokens
    return arrays


def coefficients(objective: Objective, arrays: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(−dL/dlog p [B, T] with denominator 1, which tokens a clip cut bool[B, T]) of one batch of `INPUTS`.

    A clip of ours says itself where it acted. Of another function those tokens count as cut whose coefficient is 0
    though their advantage is not.
    """
    inputs = {name: jnp.asarray(array) for name, array in arrays.items()}
    full = {} if objective.full_kl is None else dict(full_kl=jnp.zeros_like(inputs["logp"]))
    logp = inputs.pop("logp")
    coefficient = -jax.grad(lambda x: objective(x, **inputs, denominator=1.0, **full)[0])(logp)
    _, _, logged = objective.entries(prepare(logp, **inputs))
    is_zero = (coefficient == 0) & (inputs["advantage"] != 0)
    cut = logged.anywhere if isinstance(logged, Clipped) else is_zero
    return coefficient, cut & inputs["mask"]


def shares(objective: Objective, mask: jax.Array) -> jax.Array:
    """What `coefficients` of a group are multiplied by so that a token of a plain token mean would have w·A.

    The loss of the group, which divides by its own count, then has the gradient Σ coefficient·grad log p / tokens.
    """
    by_row = objective.level == "sequence" or objective.reduction.startswith("sequence")
    return jnp.sum(mask) / jnp.maximum(jnp.sum(jnp.any(mask, -1) if by_row else mask), 1)


def of_groups(objective: Objective, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(coefficients [groups, responses, T] times `shares`, cut), each group by itself, in float64 on the CPU."""

    def of_group(group):
        coefficient, cut = coefficients(objective, group)
        return coefficient * shares(objective, group["mask"]), cut

    return jax.device_get(jax.jit(lambda x: jax.lax.map(of_group, x))(dict(arrays)))
