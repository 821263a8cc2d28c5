"""Tempered importance ratios, the example of adding_an_objective.md: each token's ratio counts with a power."""

import jax
import jax.numpy as jnp


def tempered(log_ratio, advantage, logp, *, power=0.5):
    """−ratio^power · A · logp: REINFORCE at power 0, exact off policy at power 1, and what lies between them."""
    ratio = jax.lax.stop_gradient(jnp.exp(power * log_ratio))
    return -ratio * advantage * logp, {"tempered_ratio": ratio}


tempered.declares = ("exact per sample", "biased")  # where policy = behavior policy, and elsewhere
