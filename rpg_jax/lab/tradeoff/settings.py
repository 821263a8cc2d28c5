"""The settings of a trade-off, which are its flags as well. It imports nothing that is slow."""

from collections import namedtuple
from typing import Any

from rpg_jax import InputError


def bounds(word: str) -> tuple[float, float]:
    """EPSILON, which bounds the ratio below too as far as it can (1 − EPSILON >= 0), or LOW:HIGH."""
    low, colon, high = word.partition(":")
    return (float(low), float(high)) if colon else (min(float(low), 1.0), float(low))


GRID = {  # name -> type, default as it is typed, meaning; tables and figures show the first of most lists
    "vocab": (int, 3, "tokens to choose from"),
    "length": (int, 4, "tokens of a response"),
    "problems": (int, 100, "random ones, of which medians are taken"),
    "distances": (float, "0.001,0.01,0.1,1", "KL(behavior || policy), nats a response"),
    "samples": (int, "1,4,16,64,256,1024,4096", "N, responses that a gradient is averaged over"),
    "epsilons": (
        bounds, "0.2:0.28,0.05,0.1,0.2,0.4,0.8",
        "clip bounds, EPSILON or LOW:HIGH; the first is that of tables and figures",
    ),
    "ceilings": (float, "3,10", "clip_c; the first is that of tables and figures"),
    "betas": (float, "0.01,0.1,0", "coefficients of the divergence; the first is that of tables and figures"),
    "divergences": (str, "urkl", "divergences to the behavior policy"),
    "seed": (int, 0, "of the problems"),
}  # fmt: skip
Grid = namedtuple("Grid", GRID)


def parsed(options: Any) -> Grid:
    """The grid that flags ask for; `InputError` for a value that is no number, or no whole one."""
    return Grid(*(_values(name, kind, getattr(options, name)) for name, (kind, *_) in GRID.items()))


def _values(flag: str, kind: Any, given: Any) -> Any:
    if not isinstance(given, list):
        return given
    try:
        return tuple(map(kind, given))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise InputError(f"--{flag}={','.join(given)}: expected {expected} with commas between them") from None
