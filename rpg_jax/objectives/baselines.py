"""Published baselines, each a function from arrays to the loss of every entry (docs/method.md 7).

A loss, of ours or of a user's file, names what it takes of log_ratio = log w = logp − behavior_logp, advantage, logp,
behavior_logp and reference_logp: floating arrays of one shape and dtype, tokens or whole responses. What else it takes
are its settings, `clip` and `beta` here. It returns its losses in that shape, alone or with what is to be logged, which
for these is where they were clipped. `objective` does all else: masks, weights, levels, sums and what they are divided
by. w̄ is w as the clip bounds it, and y = reference / policy. To add one: its loss here, its recipe in `registry`.
"""

import jax.numpy as jnp
from jax import Array

from rpg_jax.objectives.clips import Clip
from rpg_jax.objectives.divergences import DIVERGENCES
from rpg_jax.objectives.surrogates import Losses, regularizer, scaled, stop


def k3(log_ratio: Array) -> Array:
    """Schulman's estimator y − 1 − log y of KL(policy || reference), at log_ratio = log y = log(reference / policy)."""
    return jnp.expm1(log_ratio) - log_ratio


def policy_gradient(log_ratio: Array, advantage: Array, logp: Array, *, clip: Clip) -> Losses:
    """−A·log policy: REINFORCE (Williams 1992), GPG (Chu et al., arXiv 2504.02546, equation 5).

    No importance ratio, so right on policy only; `off_policy_gap` among the metrics says how far from it.
    """
    return -advantage * logp, clip(log_ratio, advantage)[1]


def weighted_policy_gradient(log_ratio: Array, advantage: Array, logp: Array, *, clip: Clip) -> Losses:
    """−SG(w̄)·A·log policy: CISPO with clip "cap" (MiniMax-M1, arXiv 2506.13585, equations 4 and 5).

    Unclipped and over whole sequences it is RLOO (Ahmadian et al., arXiv 2402.14740), on policy there: w = 1.
    """
    bounded, clipped = clip(log_ratio, advantage)
    return -stop(bounded) * advantage * logp, clipped


def ppo_clip(log_ratio: Array, advantage: Array, *, clip: Clip) -> Losses:
    """−w̄A, which with clip "ppo" is −min(wA, clip(w, 1 − clip_low, 1 + clip_high)·A) (arXiv 1707.06347, equation 7).

    REINFORCE++ (arXiv 2501.03262) with its KL in the reward; GSPO (arXiv 2507.18071, equation 5) where log-probs are
    means over a response.
    """
    bounded, clipped = clip(log_ratio, advantage)
    return -bounded * advantage, clipped


def grpo(log_ratio: Array, advantage: Array, logp: Array, reference_logp: Array, *, beta: float, clip: Clip) -> Losses:
    """−min(w·A, clip(w)·A) + beta·k3(y): GRPO as published (Shao et al., arXiv 2402.03300, equations 3 and 4).

    k3 lacks the importance ratio. Its gradient is 1 − 1/u: not that of the reverse KL, on or off policy. With beta 0
    DAPO (arXiv 2503.14476, equation 8) with two bounds, Dr. GRPO (arXiv 2503.20783, section 3.2) with a constant
    denominator, and SAPO with its smooth clip.
    """
    bounded, clipped = clip(log_ratio, advantage)
    return -bounded * advantage + scaled(beta, lambda: k3(reference_logp - logp)), clipped


def grpo_corrected(
    logp: Array, behavior_logp: Array, reference_logp: Array, advantage: Array, *, beta: float, clip: Clip
) -> Losses:
    """−min(w·A, clip(w)·A) + beta·w·k3(y), differentiated through both (RPG paper, section 2.2).

    w·k3(y) is the regularizer r·rho(u) of `urkl`, and is computed as such: y alone can overflow.
    """
    urkl = DIVERGENCES["urkl"]
    penalty = scaled(beta, lambda: regularizer(logp, behavior_logp, reference_logp, divergence=urkl))
    bounded, clipped = clip(logp - behavior_logp, advantage)
    return -bounded * advantage + penalty, clipped


def reinforce_pp_baseline(
    log_ratio: Array, advantage: Array, logp: Array, reference_logp: Array, *, beta: float, clip: Clip
) -> Losses:
    """−w̄A + beta·½(log policy − log reference)² (REINFORCE++-Baseline, arXiv 2501.03262; OpenRLHF's k2 loss).

    The gradient of k2 is log u: on policy that of `urkl`, and off policy it lacks the importance ratio.
    """
    bounded, clipped = clip(log_ratio, advantage)
    return -bounded * advantage + scaled(beta, lambda: 0.5 * (logp - reference_logp) ** 2), clipped
