"""The loss of docs/study/sign.md: Algorithm 2 with the constant of a reverse KL taken at two places apart."""

import jax
import jax.numpy as jnp

from rpg_jax.objectives import CLIPS


def loss(log_ratio, advantage, logp, reference_logp, *, beta, branch=0.0, coefficient=0.0, clipped=True):
    """Algorithm 2 with A - beta (log u + c) taken twice: c is `branch` where it chooses the clip's branch, and
    `coefficient` where it multiplies the score. Both 0 is `urkl`, both 1 is `rkl`; without the clip branch is unused.
    """
    log_u = logp - reference_logp
    _, where = CLIPS["rpg" if clipped else "none"](log_ratio, advantage - beta * (log_u + branch))
    pushed = jnp.exp(jnp.where(where.anywhere, 0, log_ratio)) * (advantage - beta * (log_u + coefficient))
    alive = jnp.where(where.anywhere, jax.lax.stop_gradient(logp), logp)
    return -jax.lax.stop_gradient(pushed) * alive, {"clip_fraction": where.anywhere}


loss.divergence = "urkl"  # whose expected gradient it has without a clip, whatever the constant
