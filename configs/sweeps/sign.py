"""Does the constant of a divergence act by the branch that it chooses under Algorithm 2's clip, or by its coefficient?

    launch/sweep.sh configs/sweeps/sign.py
    python docs/study/sign.py runs/sign

6 arms x 3 values of beta x 12 seeds = 216 runs of about 65 s on one core each: 2 hours on 2 cores, and the warm start
if no other sweep of this folder has made it. docs/study/sign.md says why.
"""

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

CONFIG = "configs/sweeps/small.py"
SEEDS = tuple(range(12))
BETAS = (0.03, 0.1, 0.3)
FIXED = {"objective.name": "configs/sweeps/sign.py:loss", "reference.mode": "fixed"}
ARMS = {
    **{f"branch{b}-coefficient{c}": {"objective.branch": float(b), "objective.coefficient": float(c)}
       for b in (0, 1) for c in (0, 1)},
    **{f"unclipped-coefficient{c}": {"objective.clipped": False, "objective.coefficient": float(c)} for c in (0, 1)},
}  # fmt: skip
VARIANTS = {
    f"{arm}-beta{beta:g}": FIXED | settings | {"objective.beta": beta}
    for beta in BETAS
    for arm, settings in ARMS.items()
}
