"""The settings of a trade-off, which are its flags as well. It imports nothing that is slow."""

import math
from collections import namedtuple
from typing import Any

from rpg_jax import InputError

_EPSILONS = ((0.2, 0.28), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.4, 0.4), (0.8, 0.8))
GRID = {  # name -> default and meaning; tables and figures show the first of most lists
    "vocab": (3, "tokens to choose from"),
    "length": (4, "tokens of a response"),
    "problems": (100, "random ones, of which medians are taken"),
    "distances": ((1e-3, 1e-2, 1e-1, 1.0), "KL(behavior || policy), nats a response"),
    "samples": ((1, 4, 16, 64, 256, 1024, 4096), "N, responses that a gradient is averaged over"),
    "epsilons": (_EPSILONS, "clip bounds, EPSILON or LOW:HIGH; the first is that of tables and figures"),
    "ceilings": ((3.0, 10.0), "clip_c; the first is that of tables and figures"),
    "betas": ((0.01, 0.1, 0.0), "coefficients of the divergence; the first is that of tables and figures"),
    "divergences": (("urkl",), "divergences to the behavior policy"),
    "seed": (0, "of the problems"),
}
Grid = namedtuple("Grid", GRID, defaults=[default for default, _ in GRID.values()])


def written(value: Any) -> str | int:
    """A default as it is written on a command line: lists with commas, bounds as EPSILON or LOW:HIGH."""
    if isinstance(value, int):
        return value
    pairs = [f"{one[1]:g}" if one[0] == one[1] else f"{one[0]:g}:{one[1]:g}" for one in value if type(one) is tuple]
    return ",".join(pairs or [f"{one:g}" if isinstance(one, float) else str(one) for one in value])


def parsed(options: Any) -> Grid:
    """The grid that flags ask for; `InputError` for a value that is no number, or no whole one."""
    values = {}
    for name, default in Grid()._asdict().items():
        value = getattr(options, name)
        one = _bounds if name == "epsilons" else type(default[0]) if isinstance(default, tuple) else None
        values[name] = tuple(_number(name, one, word) for word in value) if one else value
    return Grid(**values)


def _number(flag: str, kind: Any, word: str) -> Any:
    try:
        value = kind(word)
    except ValueError:
        value = math.nan
    if value != value or word == "":
        raise InputError(f"--{flag}: {word!r} is not {'a whole number' if kind is int else 'a number'}")
    return value


def _bounds(word: str) -> tuple[float, float]:
    """EPSILON, which bounds the ratio below too as far as it can (1 − EPSILON >= 0), or LOW:HIGH."""
    low, colon, high = word.partition(":")
    if colon:
        return _number("epsilons", float, low), _number("epsilons", float, high)
    return min(_number("epsilons", float, low), 1.0), _number("epsilons", float, low)
