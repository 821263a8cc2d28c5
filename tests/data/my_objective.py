"""An objective of one's own, to be examined with

python -m rpg_jax.verify --objective=tests/data/my_objective.py:my_objective --divergence=urkl --beta=0.1
"""

import jax
import jax.numpy as jnp


def my_objective(log_ratio, advantage, logp, reference_logp):
    """REINFORCE with the importance ratio and the unnormalized reverse KL, its coefficient written by hand."""
    return -jax.lax.stop_gradient(jnp.exp(log_ratio) * (advantage - 0.1 * (logp - reference_logp))) * logp
