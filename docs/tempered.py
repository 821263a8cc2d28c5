"""Tempered importance ratios, the example of adding_an_objective.md: each token's ratio counts with a power."""

import jax
import jax.numpy as jnp

from rpg_jax.objectives.metrics import mean_of


def tempered(logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None, *, power=0.5):
    """−ratio^power · A · logp: REINFORCE at power 0, exact off policy at power 1, and what lies between them."""
    mask = mask.astype(bool)
    logp, behavior_logp, advantage = (jnp.where(mask, x, 0) for x in (logp, behavior_logp, advantage))
    weight = 1.0 if weight is None else jnp.where(mask, weight, 0)
    ratio = jnp.exp(power * (logp - behavior_logp))
    losses = -jax.lax.stop_gradient(weight * ratio * advantage) * logp
    count = jnp.maximum(jnp.sum(mask), 1) if denominator is None else denominator
    return jnp.sum(losses) / count, {"tempered_ratio": mean_of(jax.lax.stop_gradient(ratio), mask)}


tempered.declares = ("exact per sample", "biased")  # where policy = behavior policy, and elsewhere
