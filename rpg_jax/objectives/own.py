"""A user's loss or advantage, named FILE.py:NAME.

A loss is a function like those of `baselines`: it names what it takes of `objective.INPUTS`, arrays of one shape, and
returns the loss of every entry, or a pair of that and a dict of arrays to be logged. Its other parameters are its
settings, with their defaults. Settings, or attributes of the function, with the names of `FACTS` say which objective's
gradient it estimates.
"""

import importlib.machinery
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.objectives.advantages import penalized
from rpg_jax.objectives.objective import INPUTS, Objective, described, of_floats

MODULE = "own_objective"  # the name under which a user's file is imported
EXAMPLE = "def loss(log_ratio, advantage): return -jnp.exp(log_ratio) * advantage"
REQUIRED = inspect.Parameter.empty  # the default of a setting that has none
ADVANTAGE_INPUTS = ("rewards", "lengths", "step", "mask", "turn_reward")
ADVANTAGE = "(rewards [P, G], lengths [P, G], step, mask [P, G, T], turn_reward [P, G, K]) -> [P, G] or [P, G, T]"
FACTS = dict(level="token", divergence=None, beta=0.0, z_old=1.0, declares=None, reduction=None, advantage="group_mean")


def of_file(spec: str, kind: str = "objective") -> Callable:
    """What FILE.py:NAME names; ValueError, which names the `kind`, if there is none, or nothing to call."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise InputError(f"{kind} {spec!r}: expected FILE.py:NAME")
    if not pathlib.Path(path).is_file():
        raise InputError(f"{kind} {spec!r}: there is no file {path}")
    loader = importlib.machinery.SourceFileLoader(MODULE, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    loader.exec_module(module)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{path} has no {name!r}; it has: {', '.join(functions) or 'no function'}")
    function = getattr(module, name)
    if not callable(function):
        raise InputError(f"{kind} {spec} is a {type(function).__name__}; expected a function")
    return function


def load(spec: str) -> Callable:
    """The function, or objective, that FILE.py:NAME names; ValueError if there is none or it is no loss of an entry."""
    function = of_file(spec)
    if isinstance(function, Objective):
        return function
    takes = inspect.signature(function).parameters
    nameless = [str(p) for p in takes.values() if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
    if nameless or takes.keys() & {"mask", "denominator"} or not takes.keys() & set(INPUTS):
        why = f", and nothing is passed but by name, so {nameless[0]} gets nothing" if nameless else ""
        raise InputError(
            f"{spec} takes {inspect.signature(function)}{why}; expected of {', '.join(INPUTS)} what it needs, and its "
            f"settings, to return the loss of every entry (masks and means are taken of it): {EXAMPLE}"
        )
    return function


def settings_of(function: Callable) -> dict:
    """The settings of a user's function, {name: default}: its parameters beyond `INPUTS`; REQUIRED for no default."""
    parameters = {} if isinstance(function, Objective) else inspect.signature(function).parameters
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {name: p.default for name, p in parameters.items() if name not in INPUTS and p.kind not in variadic}


def facts_of(function: Callable, settings: Mapping[str, Any]) -> dict:
    """The value of each of `FACTS`: from the settings, else from the function's attributes, else the default."""
    inner = getattr(function, "func", function)  # a functools.partial has no attributes of its function
    facts = {name: getattr(function, name, getattr(inner, name, default)) for name, default in FACTS.items()}
    return facts | {name: settings[name] for name in FACTS if settings.get(name) is not None}


def advantage(spec: str) -> Callable[..., jax.Array]:
    """The function that FILE.py:NAME names, as (rewards [P, G], penalty [P·G, T], mask [P·G, T], step, turn_reward) ->
    [P·G, 1] or [P·G, T].

    The user's function gets rewards f32[P, G], from which penalties are taken, and what it names of: lengths i32[P, G],
    the tokens of responses; step i32[], the optimizer updates so far; mask bool[P, G, T], the tokens that are trained;
    turn_reward f32[P, G, K], the rewards of an episode's turns, K = 1 zeros without an environment. It returns floats
    [P, G], or [P, G, T] to tell tokens apart.

    Raises ValueError: there is no such function, it takes something else, or, when called, it returns something else.
    """
    function = of_file(spec, "advantage")
    signature = inspect.signature(function)
    variadic = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    first = () if "rewards" in signature.parameters else ("rewards",)  # which is then passed by position
    names = [x for x in ADVANTAGE_INPUTS if x not in first and (x in signature.parameters or variadic)]
    try:
        signature.bind(*first, **dict.fromkeys(names))
    except TypeError as error:
        raise InputError(f"advantage {spec} takes {signature}; expected {ADVANTAGE}: {error}") from error

    def of_batch(rewards, penalty, mask, step, turn_reward):
        left, mask = penalized(rewards, penalty), mask.astype(bool)
        lengths = jnp.sum(mask, axis=1, dtype=jnp.int32).reshape(left.shape)
        each = jnp.zeros((*left.shape, 1), left.dtype) if turn_reward is None else turn_reward
        by_group = mask.reshape(*left.shape, -1)
        given = dict(zip(ADVANTAGE_INPUTS, (left, lengths, jnp.asarray(step, jnp.int32), by_group, each), strict=True))
        values = function(*(given[x] for x in first), **{x: given[x] for x in names})
        if not of_floats(values, left.shape, by_group.shape):
            expected = f"floats of the shape of rewards, {list(left.shape)}, or of mask, {list(by_group.shape)}"
            raise InputError(f"advantage {spec} returns {described(values)}; expected {expected}")
        return values.astype(left.dtype).reshape(left.size, -1)

    return of_batch
