"""RPG's surrogate losses: from arrays to per-token losses, to be minimized and averaged over the behavior policy.

All take `(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, ...)`: floating arrays of one shape
and dtype (tokens, or whole sequences), a `Divergence` and a float, and return the loss of every entry in that shape.
Nothing is masked, promoted or stopped here except what a surrogate's own formula stops: `make` does that around them.

    w = policy / behavior        u = policy / (Z · reference)        r = Z · reference / behavior        w = u·r

Unclipped, the gradient of every entry is −(wA − beta·r·kappa(u)) ∇log policy (docs/method.md 3).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rpg_jax.objectives.divergences import Divergence, kappa_over_u, weighted_kappa

stop = jax.lax.stop_gradient


class Clipped(NamedTuple):
    """Where a clip replaced the ratio by one of its bounds: bool arrays that exclude each other."""

    high: jax.Array  # 1 + clip_high
    low: jax.Array  # 1 − clip_low
    ceiling: jax.Array  # clip_c


def log_ratios(logp, behavior_logp, reference_logp, z_old=1.0):
    """log w, log u and log r; `z_old` is the reference's mass Z, `reference_logp` that of its normalized form."""
    log_z = jnp.log(jnp.asarray(z_old, logp.dtype))
    return logp - behavior_logp, logp - reference_logp - log_z, reference_logp - behavior_logp + log_z


def regularizer(logp, behavior_logp, reference_logp, *, divergence: Divergence, z_old=1.0):
    """r·rho(u), whose expectation under the behavior policy is the divergence, on and off policy."""
    log_w, log_u, log_r = log_ratios(logp, behavior_logp, reference_logp, z_old)
    return divergence.rho(log_u, jnp.exp(log_w), jnp.exp(log_r))


def differentiable(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, z_old=1.0):
    """−wA + beta·r·rho(u), differentiated through both (Tables 1 and 4)."""
    penalty = regularizer(logp, behavior_logp, reference_logp, divergence=divergence, z_old=z_old)
    return beta * penalty - jnp.exp(logp - behavior_logp) * advantage


def reinforce(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, z_old=1.0):
    """−SG(wA − beta·r·kappa(u)) · log policy (Table 2, Appendix F)."""
    log_w, log_u, log_r = log_ratios(logp, behavior_logp, reference_logp, z_old)
    w = jnp.exp(log_w)
    return -stop(w * advantage - beta * weighted_kappa(divergence, log_u, w, jnp.exp(log_r))) * logp


def regularized_advantage(logp, reference_logp, advantage, *, divergence, beta):
    """A' = A − beta·kappa(u)/u, in closed form (Z = 1)."""
    return advantage - beta * kappa_over_u(divergence, logp - reference_logp)


def rpg_clipped(w, advantage, *, clip_low, clip_high, clip_c) -> Clipped:
    """Where Algorithm 2 is dead, given A': alive are A' ≥ 0 with w < 1 + high, and A' < 0 with 1 − low < w < c."""
    up = advantage >= 0
    return Clipped(up & (w >= 1 + clip_high), ~up & (w <= 1 - clip_low), ~up & (w >= clip_c))


def rpg_clip(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, **bounds):
    """RPG-REINFORCE with RPG-Style Clip (Algorithm 2).

    With C = −beta·r·kappa(u): −SG(wA + C)·log policy where alive, else the constant (A·bound + C)·SG(−log policy)
    with the bound that was crossed: a dead token drops its regularizer's gradient too.
    """
    log_w, log_u, log_r = log_ratios(logp, behavior_logp, reference_logp)
    w, r = jnp.exp(log_w), jnp.exp(log_r)
    shaped = regularized_advantage(logp, reference_logp, advantage, divergence=divergence, beta=beta)
    clipped = rpg_clipped(w, shaped, **bounds)
    dead = clipped.high | clipped.low | clipped.ceiling
    coefficient = at_bound(w, clipped, **bounds) * advantage - beta * weighted_kappa(divergence, log_u, w, r)
    return -stop(coefficient) * jnp.where(dead, stop(logp), logp)


def ppo_clipped(w, advantage, *, clip_low, clip_high, clip_c=jnp.inf) -> Clipped:
    """Where PPO's clip, or dual clip with `clip_c`, is active: w is beyond a bound on the side that A pushes it to."""
    up, down = advantage > 0, advantage < 0
    return Clipped(up & (w > 1 + clip_high), down & (w < 1 - clip_low), down & (w > clip_c))


def at_bound(w, clipped: Clipped, *, clip_low, clip_high, clip_c=jnp.inf):
    """The ratio, replaced by the constant bound it crossed where it is clipped."""
    w = jnp.where(clipped.high, 1 + clip_high, jnp.where(clipped.low, 1 - clip_low, w))
    return jnp.where(clipped.ceiling, clip_c, w)


def ppo(log_w, advantage, **bounds):
    """−min(wA, clip(w, 1 − clip_low, 1 + clip_high)·A); with `clip_c`, where A < 0, −max(that minimum, clip_c·A).

    A clipped ratio is never computed: it may be too large for a float.
    """
    clipped = ppo_clipped(stop(jnp.exp(log_w)), stop(advantage), **bounds)
    w = jnp.exp(jnp.where(clipped.high | clipped.low | clipped.ceiling, 0, log_w))
    return -at_bound(w, clipped, **bounds) * advantage


def dual_clip(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, **bounds):
    """PPO's dual clip on w·(A − beta·kappa(u)/u), differentiated through both (Algorithm 1); for `rkl` and `urkl`.

    In expectation exact where no bound is crossed. A clipped entry keeps the gradient beta·bound of its advantage's
    log u, which is no longer zero in expectation.
    """
    shaped = regularized_advantage(logp, reference_logp, advantage, divergence=divergence, beta=beta)
    return ppo(logp - behavior_logp, shaped, **bounds)


def dual_clip_reward(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, **bounds):
    """PPO's dual clip on wA plus the unclipped beta·r·rho(u) (Appendix G.2); for all divergences but `rkl` and `urkl`.

    Differentiating through A − beta·kappa(u)/u would cancel the regularizer of `fkl` and `ufkl`.
    """
    penalty = regularizer(logp, behavior_logp, reference_logp, divergence=divergence)
    return ppo(logp - behavior_logp, advantage, **bounds) + beta * penalty


def truncate(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, clip_low, clip_high):
    """REINFORCE-style with w̄ = clip(w, 1 − clip_low, 1 + clip_high) for w, and w̄ / r for u (Remark F.2)."""
    log_w, _, log_r = log_ratios(logp, behavior_logp, reference_logp)
    truncated = jnp.clip(jnp.exp(log_w), 1 - clip_low, 1 + clip_high)
    pull = weighted_kappa(divergence, jnp.log(truncated) - log_r, truncated, jnp.exp(log_r))
    return -stop(truncated * advantage - beta * pull) * logp


def truncate_clipped(w, advantage, *, clip_low, clip_high) -> Clipped:
    """Where `truncate` replaced the ratio, whatever the sign of the advantage."""
    del advantage
    return Clipped(w > 1 + clip_high, w < 1 - clip_low, jnp.zeros_like(w, bool))


def unclipped(w, advantage) -> Clipped:
    """Nowhere."""
    del advantage
    nowhere = jnp.zeros_like(w, bool)
    return Clipped(nowhere, nowhere, nowhere)
