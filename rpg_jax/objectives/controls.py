"""Control variates and divergences to go: constants that are taken off the advantage (docs/method.md 4.4).

`rkl` and `urkl` have the coefficient w(A − beta·(log u + c)), with c = 1 and c = 0. Every c that does not depend on the
token has the same expected gradient, because w·∇log policy has mean zero. So c can be moved into the advantage of
`urkl`. A divergence to go takes what later tokens are expected to cost off that of any divergence:
A − beta·Σ_{s > t} rho(u_s) / u_s, which for `rkl` is the sum of later log u.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax.objectives.batch import Batch
from rpg_jax.objectives.divergences import DIVERGENCES, Divergence, named, rho_over_u

OPTIMAL = "optimal"
OF_TOKEN = "kl"  # minus the KL of the token's whole distribution, which `Objective.advantages` adds (arXiv 2605.07865)
# Of KL: each token's own ratio, the ratios of the token and all later ones, or no ratio but the whole distribution.
KINDS = ("token", "to_go", "full")
OWN = {"rkl": 1.0, "urkl": 0.0}  # c of the coefficient w(A − beta·(log u + c))


def terms(
    divergence: str, beta: float, *, alpha: float | None = None, kl: str = "token", control: float | str | None = None,
    z_old: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """What is done for kl and control outside of any loss: `full_kl` or `control` of an `Objective`, {} for neither."""
    if not beta or (kl == "token" and control is None):
        return {}
    target = named(divergence, alpha)
    if kl == "full":
        return {"full_kl": target}
    own, later = OWN.get(divergence, 0.0), None
    if kl == "to_go":  # of both KLs the one whose cost, log u, has no 1 / u
        later = DIVERGENCES["rkl"] if divergence in OWN else target
    c = 0.0 if control in (None, OF_TOKEN) else control  # the advantage has that of the token already
    return {"control": partial(controlled_advantage, beta=beta, c=c, own=own, later=later, z_old=z_old)}


def controlled_advantage(
    tokens: Batch, units: Batch, *, beta: float, c: float | str, own: float, later: Divergence | None = None,
    z_old: float = 1.0,
) -> jax.Array:  # fmt: skip
    """A − beta·c_t for every unit (tokens [B, T] or responses [B, 1]).

    Args:
      tokens, units: what the level counts, and the tokens that it comes from; constants.
      c: the control variate, or "optimal".
      own: what "optimal" falls back to for a batch of one response: the divergence's own c.
      later: the divergence whose cost of later tokens is taken off, too; needs tokens as units.
    """
    log_z = jnp.log(jnp.asarray(z_old, units.logp.dtype))
    log_u = jnp.where(units.mask, units.logp - units.reference_logp - log_z, 0)
    advantage = units.advantage
    if later is not None:
        cost = jnp.where(units.mask, rho_over_u(later, log_u), 0)
        advantage = advantage - beta * (jax.lax.cumsum(cost, axis=1, reverse=True) - cost)
    if isinstance(c, str):
        return advantage - optimal_baseline(tokens, units, advantage - beta * log_u, beta * own)
    return advantage - beta * c


def optimal_baseline(tokens: Batch, units: Batch, returns: jax.Array, alone: jax.Array | float) -> jax.Array:
    """The constant b that minimizes E|w·(returns − b)·∇log policy|², from the other responses of the batch, [B, 1].

    b = E[w² s·returns] / E[w² s], where s = |∇log policy|² in the logits. From the sampled token's probability p alone,
    s is known up to a factor between 1 and 2: it is (1 − p)² plus the sum of the squares of the other probabilities,
    which lies between 0 and (1 − p)². So s is taken as (1 − p)², and summed over a response's tokens at level
    "sequence".

    Args:
      returns: what the baseline is taken off, in the shape of `units`.
      alone: the result for a batch without other responses.
    """
    rows = len(units.mask)
    score = jnp.where(tokens.mask, jnp.expm1(tokens.logp) ** 2, 0)
    if units.mask.shape != tokens.mask.shape:
        score = jnp.sum(score, axis=1, keepdims=True)
    log_weight = 2 * (units.logp - units.behavior_logp) + jnp.log(score * units.weight**2)
    log_weight = jnp.where(units.mask, log_weight, -jnp.inf)
    # Sums of exp(log_weight) over the *other* rows, by the largest of theirs: subtracting a row's own part from a total
    # would leave only rounding where that row dominates.
    largest = jnp.max(log_weight, axis=1)  # [B]
    present = largest > -jnp.inf
    scaled = jnp.exp(log_weight - jnp.where(present, largest, 0)[:, None])
    mass, moment = jnp.sum(scaled, axis=1), jnp.sum(scaled * returns, axis=1)  # [B]
    others = ~jnp.eye(rows, dtype=bool) & present  # [B, B], column j counts for row i
    shift = jnp.max(jnp.where(others, largest, -jnp.inf), axis=1, keepdims=True)  # [B, 1]
    relative = jnp.where(others, jnp.exp(largest - jnp.where(shift > -jnp.inf, shift, 0)), 0)  # [B, B]
    total = relative @ mass  # at least 1 where there are others
    baseline = relative @ moment / jnp.where(total > 0, total, 1)
    return jnp.where(total > 0, baseline, alone)[:, None]
