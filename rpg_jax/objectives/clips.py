"""Clips ("trust regions"): rules that say where a sample may not push the policy further. Any surrogate takes any.

A rule is `(w, advantage, **bounds) -> Clipped`: which bound each importance ratio w = policy / behavior has crossed,
given the advantage whose sign is the direction that the sample pushes in. A surrogate calls a `Clip`, which has its
bounds, and gets the bounded ratio back; `reinforce` keeps a clipped entry's value and takes its gradient away.

To add one, write its rule and put it in `CLIPS`, with the defaults of its bounds and the estimators of `rpg` that take
it: `make("rpg", clip=NAME)` and `python -m rpg_jax.verify` know it from there.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

stop = jax.lax.stop_gradient


class Clipped(NamedTuple):
    """Where a clip replaced the ratio by one of its bounds: bool arrays of one shape that exclude each other."""

    high: jax.Array  # by 1 + clip_high
    low: jax.Array  # by 1 − clip_low
    ceiling: jax.Array  # by clip_c

    @property
    def anywhere(self) -> jax.Array:
        return self.high | self.low | self.ceiling


def none(w: jax.Array, advantage: jax.Array) -> Clipped:
    """Nowhere."""
    del advantage
    nowhere = jnp.zeros_like(w, bool)
    return Clipped(nowhere, nowhere, nowhere)


def ppo(w: jax.Array, advantage: jax.Array, *, clip_low: float, clip_high: float, clip_c: float = math.inf) -> Clipped:
    """Where min(wA, clip(w, 1 − clip_low, 1 + clip_high)·A) is constant (arXiv 1707.06347, equation 7).

    With `clip_c` the dual clip, −max(that minimum, clip_c·A) where A < 0 (Ye et al., arXiv 1912.09729, equation 5).
    """
    up, down = advantage > 0, advantage < 0
    return Clipped(up & (w > 1 + clip_high), down & (w < 1 - clip_low), down & (w > clip_c))


def rpg(w: jax.Array, advantage: jax.Array, *, clip_low: float, clip_high: float, clip_c: float) -> Clipped:
    """Where RPG-Style Clip is dead (Algorithm 2): alive are A ≥ 0 with w < 1 + clip_high, and A < 0 with
    1 − clip_low < w < clip_c."""
    up = advantage >= 0
    return Clipped(up & (w >= 1 + clip_high), ~up & (w <= 1 - clip_low), ~up & (w >= clip_c))


def truncate(w: jax.Array, advantage: jax.Array, *, clip_low: float, clip_high: float) -> Clipped:
    """Where w is out of bounds, whatever the sign of the advantage (Remark F.2)."""
    del advantage
    return Clipped(w > 1 + clip_high, w < 1 - clip_low, jnp.zeros_like(w, bool))


def cap(w: jax.Array, advantage: jax.Array, *, clip_high: float) -> Clipped:
    """Where w is above 1 + clip_high, whatever the sign of the advantage (CISPO: arXiv 2506.13585, equation 5)."""
    return none(w, advantage)._replace(high=w > 1 + clip_high)


class Clip(NamedTuple):
    """A rule with its bounds; `CLIPS` has each with the defaults, None where there is none.

    estimators: those of `rpg` that take it, the one it takes if none is named first.
    truncates: the bounded ratio stands for w in every term, and the entry goes on learning (`surrogates.reinforce`).
    """

    rule: Callable[..., Clipped]
    bounds: Mapping[str, Any] = {}  # floats, or None
    estimators: tuple[str, ...] = ()
    truncates: bool = False

    def __call__(self, log_w: jax.Array, advantage: jax.Array) -> tuple[jax.Array, Clipped]:
        """(w, or the constant bound that it crossed; where that was), of log w and the advantage that decides.

        A clipped ratio is not part of the result's computation: it may be too large for a float.
        """
        clipped = self.rule(stop(jnp.exp(log_w)), stop(advantage), **self.bounds)
        w = jnp.exp(jnp.where(clipped.anywhere, 0, log_w))
        high, low, ceiling = (self.bounds.get(key, math.nan) for key in ("clip_high", "clip_low", "clip_c"))
        w = jnp.where(clipped.high, 1 + high, w)  # NaN where a rule reports a bound that it does not have
        return jnp.where(clipped.ceiling, ceiling, jnp.where(clipped.low, 1 - low, w)), clipped


BOUNDS = ("clip_low", "clip_high", "clip_c")
_PAPER = dict(clip_low=0.2, clip_high=0.28)  # section 5 of the paper
CLIPS = {
    "none": Clip(none, estimators=("reinforce", "differentiable")),
    "rpg": Clip(rpg, dict(**_PAPER, clip_c=3.0), ("reinforce",)),
    "truncate": Clip(truncate, _PAPER, ("reinforce",), truncates=True),
    "dual": Clip(ppo, dict(**_PAPER, clip_c=3.0), ("differentiable",)),
    "ppo": Clip(ppo, dict(clip_low=0.2, clip_high=0.2)),
    "cap": Clip(cap, dict(clip_high=None), truncates=True),
}
