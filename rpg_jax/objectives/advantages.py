"""Baselines subtracted from rewards: rewards [P, G], G responses to each of P prompts, to advantages of that shape.

At least float32. Rewards are centered on a group's first one before anything is averaged, so that a group of equal
rewards gets exactly zero.
"""

import jax.numpy as jnp


def _rewards(rewards, least):
    rewards = jnp.asarray(rewards)
    if rewards.ndim != 2 or rewards.shape[1] < least:
        expected = "[P, G], G responses to each of P prompts" + (", G at least 2" if least > 1 else "")
        raise ValueError(f"rewards have shape {rewards.shape}; expected {expected}")
    return rewards.astype(jnp.promote_types(rewards.dtype, jnp.float32))


def _centered(rewards):
    shifted = rewards - rewards[:, :1]
    return shifted - jnp.mean(shifted, axis=1, keepdims=True)


def group_mean(rewards):
    """R − mean of the group. Not exact: the mean contains the sample itself.

    The reward part of the gradient is scaled by (G − 1) / G, turned nowhere: the effective beta is beta·G / (G − 1).
    """
    return _centered(_rewards(rewards, 2))


def group_mean_std(rewards, epsilon=1e-6):
    """(R − mean) / (std + epsilon) with Bessel's standard deviation (GRPO, arXiv 2402.03300).

    Not exact: dividing by the group's own deviation changes the objective.
    """
    centered = _centered(_rewards(rewards, 2))
    variance = jnp.sum(centered**2, axis=1, keepdims=True) / (centered.shape[1] - 1)
    return centered / (jnp.sqrt(variance) + epsilon)


def leave_one_out(rewards):
    """R − mean of the group's other rewards (RLOO, arXiv 2402.14740). Exact: it does not depend on the sample."""
    centered = _centered(_rewards(rewards, 2))
    return centered * (centered.shape[1] / (centered.shape[1] - 1))


def batch_mean(rewards):
    """R − mean over the whole batch. Not exact, as the group mean: the reward part is scaled by (PG − 1) / PG."""
    rewards = _rewards(rewards, 1)
    shifted = rewards - rewards[:1, :1]
    return shifted - jnp.mean(shifted)
