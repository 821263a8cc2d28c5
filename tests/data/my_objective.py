"""An objective of one's own, to be examined with

python -m rpg_jax.verify --objective=tests/data/my_objective.py:my_objective --divergence=urkl --beta=0.1
"""

import jax
import jax.numpy as jnp


def my_objective(logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None):
    """REINFORCE with the importance ratio and the unnormalized reverse KL, its coefficient written by hand."""
    beta, stop = 0.1, jax.lax.stop_gradient
    reference_logp = behavior_logp if reference_logp is None else reference_logp
    logp, behavior_logp, reference_logp, advantage = (
        jnp.where(mask, x, 0) for x in (logp, behavior_logp, reference_logp, advantage)
    )
    weight = 1.0 if weight is None else jnp.where(mask, weight, 0)
    ratio = jnp.exp(logp - stop(behavior_logp))
    losses = -stop(weight * ratio * (advantage - beta * (logp - reference_logp))) * logp
    count = jnp.maximum(jnp.sum(mask), 1) if denominator is None else denominator
    return jnp.sum(losses) / count, {}
