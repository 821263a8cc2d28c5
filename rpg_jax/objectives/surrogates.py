"""RPG's surrogate losses: from arrays to per-token losses, to be minimized and averaged over the behavior policy.

All take `(logp, behavior_logp, reference_logp, advantage, *, divergence, beta, clip, z_old)`: floating arrays of one
shape and dtype (tokens, or whole sequences), a `Divergence`, a float, a `Clip` and the reference's mass. They return
the loss of every entry in that shape, and where it was clipped. Nothing is masked, promoted or stopped here except
what a surrogate's own formula stops: `objective` does that around them.

    w = policy / behavior        u = policy / (Z · reference)        r = Z · reference / behavior        w = u·r

Unclipped, the gradient of every entry is −(wA − beta·r·kappa(u)) ∇log policy (docs/method.md 3).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from rpg_jax.objectives.clips import UNCLIPPED, Clip, Clipped, stop
from rpg_jax.objectives.divergences import Divergence, kappa_over_u, weighted_kappa

Losses = tuple[Array, Clipped]


def log_ratios(
    logp: Array, behavior_logp: Array, reference_logp: Array, z_old: float = 1.0
) -> tuple[Array, Array, Array]:
    """log w, log u and log r; `z_old` is the reference's mass Z, `reference_logp` that of its normalized form."""
    log_z = jnp.log(jnp.asarray(z_old, logp.dtype))
    return logp - behavior_logp, logp - reference_logp - log_z, reference_logp - behavior_logp + log_z


def scaled(beta: float, term: Callable[[], Array]) -> Array | float:
    """beta·term(), and 0 where beta is the number 0: of a reference far away the term may be infinite."""
    return 0.0 if isinstance(beta, int | float) and not beta else beta * term()


def regularizer(
    logp: Array, behavior_logp: Array, reference_logp: Array, *, divergence: Divergence, z_old: float = 1.0
) -> Array:
    """r·rho(u), whose expectation under the behavior policy is the divergence, on and off policy."""
    log_w, log_u, log_r = log_ratios(logp, behavior_logp, reference_logp, z_old)
    return divergence.rho(log_u, jnp.exp(log_w), jnp.exp(log_r))


def regularized_advantage(
    logp: Array, reference_logp: Array, advantage: Array, *, divergence: Divergence, beta: float
) -> Array:
    """A' = A − beta·kappa(u)/u, in closed form (Z = 1)."""
    return advantage - scaled(beta, lambda: kappa_over_u(divergence, logp - reference_logp))


def reinforce(
    logp: Array, behavior_logp: Array, reference_logp: Array, advantage: Array, *,
    divergence: Divergence, beta: float, clip: Clip = UNCLIPPED, z_old: float = 1.0,
) -> Losses:  # fmt: skip
    """−SG(w̄A − beta·r·kappa(u)) · log policy (Table 2, Appendix F), w̄ being the ratio as the clip bounds it by A'.

    With clip "rpg" that is RPG-REINFORCE with RPG-Style Clip (Algorithm 2): a clipped entry's log policy is stopped,
    so its regularizer has no gradient either. With "truncate" (Remark F.2) w̄ stands for w in u = w / r too, and the
    entry goes on learning.
    """
    log_w, log_u, log_r = log_ratios(logp, behavior_logp, reference_logp, z_old)
    decides = regularized_advantage(logp, reference_logp, advantage, divergence=divergence, beta=beta)
    bounded, clipped = clip(log_w, decides)
    w, alive = jnp.exp(log_w), jnp.where(clipped.anywhere, stop(logp), logp)
    if clip.truncates:
        w, log_u, alive = bounded, jnp.where(clipped.anywhere, jnp.log(bounded), log_w) - log_r, logp
    pull = scaled(beta, lambda: weighted_kappa(divergence, log_u, w, jnp.exp(log_r)))
    coefficient = bounded * advantage - pull
    if not clip.truncates:  # what has no gradient may be too large for a float
        coefficient = jnp.where(clipped.anywhere & ~jnp.isfinite(coefficient), 0, coefficient)
    return -stop(coefficient) * alive, clipped


def differentiable(
    logp: Array, behavior_logp: Array, reference_logp: Array, advantage: Array, *,
    divergence: Divergence, beta: float, clip: Clip = UNCLIPPED, z_old: float = 1.0,
) -> Losses:  # fmt: skip
    """−w̄A + beta·r·rho(u), differentiated through both (Tables 1 and 4); the clip bounds w̄ by A alone.

    With clip "dual_reward" that is PPO's dual clip on the reward and an unclipped regularizer, as in the authors'
    released code for every divergence. With "dual" it is so for all but `rkl` and `urkl` (Appendix G.2).
    """
    penalty = scaled(beta, lambda: regularizer(logp, behavior_logp, reference_logp, divergence=divergence, z_old=z_old))
    bounded, clipped = clip(logp - behavior_logp, advantage)
    return penalty - bounded * advantage, clipped


def regularized_ratio(
    logp: Array, behavior_logp: Array, reference_logp: Array, advantage: Array, *,
    divergence: Divergence, beta: float, clip: Clip, z_old: float = 1.0,
) -> Losses:  # fmt: skip
    """−w̄·(A − beta·kappa(u)/u), differentiated through both (Algorithm 1, with clip "dual"); for `rkl` and `urkl`.

    In expectation exact where no bound is crossed; of `fkl` and `ufkl` the regularizer's gradient would cancel. A
    clipped entry keeps the gradient beta·bound of its advantage's log u, which is not zero in expectation.
    """
    del z_old  # clips are for a normalized reference
    shaped = regularized_advantage(logp, reference_logp, advantage, divergence=divergence, beta=beta)
    bounded, clipped = clip(logp - behavior_logp, shaped)
    return -bounded * shaped, clipped


def clipped_coefficient(
    logp: Array, behavior_logp: Array, reference_logp: Array, advantage: Array, *,
    divergence: Divergence, beta: float, clip: Clip, z_old: float = 1.0,
) -> Losses:  # fmt: skip
    """−SG(w̄A')·log policy (equation 4.1, with clip "coefficient"), A' = A − beta·kappa(u)/u at the ratio as it is.

    w̄A' is the dual clip of w·A'. It bounds the coefficient, regularizer included, and every entry goes on learning.
    Unclipped it is wA − beta·r·kappa(u), which is finite where A' alone is not.
    """
    log_w, log_u, log_r = log_ratios(logp, behavior_logp, reference_logp, z_old)
    shaped = regularized_advantage(logp, reference_logp, advantage, divergence=divergence, beta=beta)
    bounded, clipped = clip(log_w, shaped)
    pull = scaled(beta, lambda: weighted_kappa(divergence, log_u, jnp.exp(log_w), jnp.exp(log_r)))
    return -stop(jnp.where(clipped.anywhere, bounded * shaped, bounded * advantage - pull)) * logp, clipped


ESTIMATORS: dict[str, Callable[..., Losses]] = {"reinforce": reinforce, "differentiable": differentiable}
