"""Control variates and KL-to-go: constants that are taken off the advantage of `rkl` and `urkl` (docs/method.md 4.4).

Both divergences have the coefficient w(A − beta·(log u + c)), with c = 1 and c = 0. Every c that does not depend on the
sample has the same expected gradient, because w·∇log policy has mean zero. So c, and the log ratios of later tokens,
can be moved into the advantage of `urkl`: A − beta·c_t, with c_t = c + Σ_{s > t} log u_s for KL-to-go.
"""

import jax
import jax.numpy as jnp

from rpg_jax.objectives.batch import Batch

OPTIMAL = "optimal"
# Of KL: each token's own ratio, the ratios of the token and all later ones, or no ratio but the whole distribution.
KINDS = ("token", "to_go", "full")


def controlled_advantage(
    tokens: Batch, units: Batch, *, beta: float, c: float | str, own: float, kl: str = "token", z_old: float = 1.0
) -> jax.Array:
    """A − beta·c_t for every unit (tokens [B, T] or responses [B, 1]), for the surrogate of `urkl`.

    Args:
      tokens, units: what the level counts, and the tokens that it comes from; constants.
      c: the control variate, or "optimal".
      own: what "optimal" falls back to for a batch of one response: the divergence's own c.
      kl: one of `KINDS`; "to_go" needs tokens as units.
    """
    log_z = jnp.log(jnp.asarray(z_old, units.logp.dtype))
    log_u = jnp.where(units.mask, units.logp - units.reference_logp - log_z, 0)
    advantage = units.advantage
    if kl == "to_go":
        later = jax.lax.cumsum(log_u, axis=1, reverse=True) - log_u
        advantage = advantage - beta * later
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
