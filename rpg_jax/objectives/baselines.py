"""Published baselines in the contract of `surrogates`: functions from arrays to per-token losses (method.md 7).

`(logp, behavior_logp, reference_logp, advantage, ...)`, floating arrays of one shape and dtype; the loss of every
entry in that shape. w = exp(logp − behavior_logp) and y = exp(reference_logp − logp). To add one: its loss here, its
recipe in `registry`.
"""

import jax.numpy as jnp

from rpg_jax.objectives.divergences import DIVERGENCES
from rpg_jax.objectives.surrogates import ppo, regularizer


def k3(log_ratio):
    """Schulman's estimator y − 1 − log y of KL(policy || reference), at log_ratio = log y = log(reference / policy)."""
    return jnp.expm1(log_ratio) - log_ratio


def policy_gradient(logp, behavior_logp, reference_logp, advantage):
    """−A·log policy: REINFORCE (Williams 1992). No importance ratio, so right on policy only."""
    del behavior_logp, reference_logp
    return -advantage * logp


def ppo_clip(logp, behavior_logp, reference_logp, advantage, **bounds):
    """−min(wA, clip(w, 1 − clip_low, 1 + clip_high)·A) (Schulman et al., arXiv 1707.06347); DAPO with two bounds."""
    del reference_logp
    return ppo(jnp.exp(logp - behavior_logp), advantage, **bounds)


def grpo(logp, behavior_logp, reference_logp, advantage, *, beta, **bounds):
    """GRPO as published (Shao et al., arXiv 2402.03300): PPO's clip plus beta·k3(y), which lacks the importance ratio.

    The gradient of k3(y) is 1 − 1/u: not that of the reverse KL, on or off policy.
    """
    return ppo_clip(logp, behavior_logp, reference_logp, advantage, **bounds) + beta * k3(reference_logp - logp)


def grpo_corrected(logp, behavior_logp, reference_logp, advantage, *, beta, **bounds):
    """GRPO with beta·w·k3(y), differentiated through both and unclipped (RPG paper, section 2.2).

    w·k3(y) is the regularizer r·rho(u) of `urkl`, and is computed as such: y alone can overflow.
    """
    penalty = regularizer(logp, behavior_logp, reference_logp, divergence=DIVERGENCES["urkl"])
    return ppo_clip(logp, behavior_logp, reference_logp, advantage, **bounds) + beta * penalty
