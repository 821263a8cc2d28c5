"""Clips and trust regions: rules that say where a sample may not push the policy further (docs/method.md 4).

There are two kinds, and `clip=NAME` names either.

* A `Clip` bounds the importance ratio w = policy / behavior inside a surrogate. Its rule is
  `(w, advantage, **bounds) -> Clipped`: which bound each ratio has crossed, given the advantage whose sign is the
  direction that the sample pushes in. The surrogate gets the bounded ratio back; `reinforce` keeps a clipped entry's
  value and takes its gradient away. A smooth rule returns floats instead: what takes the place of each ratio.
* A `TrustRegion` removes entries beside the surrogate: its rule is `(entries, tokens, advantage, **bounds) -> Clipped`
  and sees the whole batch, because some regions are about responses or about all tokens. A dead entry's loss is 0, and
  it stays in the denominator. A smooth rule returns floats instead: the weight of each entry's loss, a constant.

To add one, write its rule and put it in `CLIPS`, with the defaults of its bounds and the estimators of `rpg` that take
it: `make("rpg", clip=NAME)` and `python -m rpg_jax.verify` know it from there.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rpg_jax.objectives.batch import Batch

stop = jax.lax.stop_gradient


class Clipped(NamedTuple):
    """Where a ratio crossed a bound of a clip or left a trust region: bool arrays that exclude each other."""

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


def sapo(w: jax.Array, advantage: jax.Array, *, tau_pos: float, tau_neg: float) -> jax.Array:
    """4/tau·sigmoid(tau·(w − 1)): the gate f of SAPO's loss −f(w)·A (Gao et al., arXiv 2511.20347), tau by A's sign.

    That has the gradient of −wA times 4p(1 − p) with p the sigmoid, which is 1 where w = 1.
    """
    tau = jnp.where(advantage > 0, tau_pos, tau_neg)
    return 4 / tau * jax.nn.sigmoid(tau * (w - 1))


class Clip(NamedTuple):
    """A rule with its bounds; `CLIPS` has each with the defaults, None where there is none.

    estimators: those of `rpg` that take it, the one it takes if none is named first.
    truncates: the bounded ratio stands for w in every term, and the entry goes on learning (`surrogates.reinforce`).
    """

    rule: Callable[..., Clipped | jax.Array]
    bounds: Mapping[str, Any] = {}  # floats, or None
    estimators: tuple[str, ...] = ()
    truncates: bool = False

    def __call__(self, log_w: jax.Array, advantage: jax.Array) -> tuple[jax.Array, Clipped]:
        """(w, or the constant bound that it crossed; where that was), of log w and the advantage that decides.

        A clipped ratio is not part of the result's computation: it may be too large for a float. So may that of an
        advantage of 0, which has no gradient at any ratio.
        """
        w = jnp.exp(jnp.minimum(log_w, LARGEST))
        clipped = self.rule(w, stop(advantage), **self.bounds)
        if not isinstance(clipped, Clipped):
            return clipped, none(w, advantage)
        log_w = jnp.where(advantage == 0, jnp.minimum(log_w, LARGEST), log_w)
        w = jnp.exp(jnp.where(clipped.anywhere, 0, log_w))
        high, low, ceiling = (self.bounds.get(key, math.nan) for key in ("clip_high", "clip_low", "clip_c"))
        w = jnp.where(clipped.high, 1 + high, w)  # NaN where a rule reports a bound that it does not have
        return jnp.where(clipped.ceiling, ceiling, jnp.where(clipped.low, 1 - low, w)), clipped


def _dead(dead: jax.Array, entries: Batch) -> Clipped:
    """The `Clipped` of dead entries: high above the ratio 1, else low."""
    above = entries.logp > entries.behavior_logp
    return Clipped(dead & above, dead & ~above, jnp.zeros_like(dead))


def _outside(statistic: jax.Array, entries: Batch, low: jax.Array | float, high: jax.Array | float) -> Clipped:
    """Where a statistic [B, 1] or of the entries' shape is not in [low, high]; the bounds themselves are inside."""
    above, below = (jnp.broadcast_to(x, entries.mask.shape) for x in (statistic > high, statistic < low))
    return Clipped(above, below, jnp.zeros_like(above))


def icepop(entries: Batch, tokens: Batch, advantage: jax.Array, *, clip_low: float, clip_high: float) -> Clipped:
    """Where w is out of bounds, whatever the sign of the advantage: IcePop's two-sided mask (arXiv 2510.18855),
    whose authors use 0.5 and 5 as bounds of w, which is clip_low 0.5 and clip_high 4."""
    del tokens, advantage
    return _outside(jnp.exp(entries.logp - entries.behavior_logp), entries, 1 - clip_low, 1 + clip_high)


def sequence_mask(entries: Batch, tokens: Batch, advantage: jax.Array, *, clip_low: float, clip_high: float) -> Clipped:
    """Whole responses whose ratio Π_t w_t is out of bounds (trust region masking, arXiv 2512.23075)."""
    del advantage
    return _outside(jnp.exp(_log_ratio(tokens)), entries, 1 - clip_low, 1 + clip_high)


def geometric_mask(
    entries: Batch, tokens: Batch, advantage: jax.Array, *, clip_low: float, clip_high: float
) -> Clipped:
    """Whole responses whose geometric mean of the tokens' ratios is out of bounds (as in verl's rollout correction).

    Unlike the product of the ratios, their geometric mean does not drift with the length of a response.
    """
    del advantage
    length = jnp.maximum(jnp.sum(tokens.mask, axis=1, keepdims=True), 1).astype(tokens.logp.dtype)
    return _outside(jnp.exp(_log_ratio(tokens) / length), entries, 1 - clip_low, 1 + clip_high)


def m2po(entries: Batch, tokens: Batch, advantage: jax.Array, *, clip_m2: float) -> Clipped:
    """The entries of largest log² w, as few as leave the mean of log² w over the others at most `clip_m2`.

    M2PO (Zheng et al., arXiv 2510.01161), whose threshold is 0.04. The mean is over all valid entries that the loss is
    called with, which in training is a microbatch. All are dead if even the smallest log² w is larger than the bound.
    """
    del tokens, advantage
    log_w = entries.logp - entries.behavior_logp
    moment = jnp.where(entries.mask, log_w**2, jnp.inf).reshape(-1)  # [N], masked entries last in increasing order
    order = jnp.argsort(moment)
    ascending = jnp.where(jnp.isfinite(moment[order]), moment[order], 0)
    means = jnp.cumsum(ascending) / jnp.arange(1, moment.size + 1)  # of the k smallest, which increases with k
    kept = jnp.zeros(moment.shape, bool).at[order].set(means <= clip_m2).reshape(entries.mask.shape)
    return _dead(entries.mask & ~kept, entries)


def dppo(entries: Batch, tokens: Batch, advantage: jax.Array, *, clip_low: float, clip_high: float) -> Clipped:
    """Where the sampled token's probability has moved by more than a bound in the direction of the advantage.

    DPPO with binary total variation |policy − behavior| (Qi et al., arXiv 2602.04879): a bound on probabilities does
    not punish rare tokens, whose ratio is large while their probability hardly changes. One threshold in the paper;
    here `clip_low` holds for negative advantages and `clip_high` for positive ones.
    """
    del tokens
    moved = jnp.exp(entries.logp) - jnp.exp(entries.behavior_logp)
    high, low = (advantage > 0) & (moved > clip_high), (advantage < 0) & (moved < -clip_low)
    return Clipped(high, low, jnp.zeros_like(high))


def _log_ratio(tokens: Batch) -> jax.Array:
    """log Π_t w_t over the valid tokens of each row, [B, 1]."""
    return jnp.sum(jnp.where(tokens.mask, tokens.logp - tokens.behavior_logp, 0), axis=1, keepdims=True)


class TrustRegion(NamedTuple):
    """A rule with its bounds that removes entries beside any surrogate; see the module's docstring."""

    rule: Callable[..., Clipped | jax.Array]
    bounds: Mapping[str, Any] = {}
    estimators: tuple[str, ...] = ("reinforce",)

    def __call__(self, entries: Batch, tokens: Batch, advantage: jax.Array) -> tuple[jax.Array, Clipped]:
        """(the weight of each entry, 0 where it is dead; where that is), in the shape of `entries`: [B, T] or [B, 1].

        Args:
          entries: what the level counts, tokens or responses; tokens: the batch [B, T] that they come from.
          advantage: the regularized advantage A', in the shape of the entries.
        """
        entries, tokens, advantage = stop((entries, tokens, advantage))
        clipped = self.rule(entries, tokens, advantage, **self.bounds)
        if isinstance(clipped, Clipped):
            return (~clipped.anywhere).astype(advantage.dtype), clipped
        weight = jnp.broadcast_to(clipped, advantage.shape)
        return weight, _dead(weight == 0, entries)


LARGEST = 80.0  # the log of the largest ratio that a clip's rule sees: finite, so that 0 times its derivative is 0
UNCLIPPED = Clip(none, estimators=("reinforce", "differentiable"))
_PAPER = dict(clip_low=0.2, clip_high=0.28)  # section 5 of the paper
CLIPS: dict[str, Clip | TrustRegion] = {
    "none": UNCLIPPED,
    "rpg": Clip(rpg, dict(**_PAPER, clip_c=3.0), ("reinforce",)),
    "truncate": Clip(truncate, _PAPER, ("reinforce",), truncates=True),
    "dual": Clip(ppo, dict(**_PAPER, clip_c=3.0), ("differentiable",)),
    "dual_reward": Clip(ppo, dict(**_PAPER, clip_c=3.0), ("differentiable",)),
    "coefficient": Clip(ppo, dict(**_PAPER, clip_c=3.0), ("reinforce",)),
    "sapo": Clip(sapo, dict(tau_pos=1.0, tau_neg=1.05), ("differentiable",)),
    "icepop": TrustRegion(icepop, _PAPER),
    "sequence_mask": TrustRegion(sequence_mask, _PAPER),
    "geometric_mask": TrustRegion(geometric_mask, _PAPER),
    "m2po": TrustRegion(m2po, dict(clip_m2=0.04)),
    "dppo": TrustRegion(dppo, dict(clip_low=0.15, clip_high=0.15)),
    "ppo": Clip(ppo, dict(clip_low=0.2, clip_high=0.2)),
    "cap": Clip(cap, dict(clip_high=None), truncates=True),
}
BOUNDS = tuple(dict.fromkeys(bound for clip in CLIPS.values() for bound in clip.bounds))
