"""What each estimator of the KL costs in score and buys in KL, against a reference that is never renewed.

    launch/sweep.sh configs/sweeps/betas.py
    python -m rpg_jax.report runs/betas

7 estimators x 5 coefficients x 2 seeds = 70 runs of about 65 s on one core each: 38 minutes on 2 cores, and the warm
start if no other sweep of this folder has made it. `k3` is GRPO's, without the importance ratio, `wk3` the same with
it; `to-go` is k1 of each token and all later ones; the others are Algorithm 2's. Advantages, clip bounds and reduction
are the same for all.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1)
FIXED = {"reference.mode": "fixed", "objective.advantage": "group_mean", "objective.reduction": "token_mean"}
GRPO = FIXED | {"objective.clip_low": 0.2, "objective.clip_high": 0.28}
RPG = FIXED | {"objective.name": "rpg", "objective.estimator": "reinforce", "objective.clip": "rpg"}
ESTIMATORS = {
    "k3": GRPO | {"objective.name": "grpo"},
    "wk3": GRPO | {"objective.name": "grpo_corrected"},
    **{divergence: RPG | {"objective.divergence": divergence} for divergence in ("rkl", "urkl", "fkl", "ufkl")},
    "to-go": RPG | {"objective.divergence": "urkl", "objective.kl": "to_go"},
}
VARIANTS = {
    f"{name}-{beta:g}": settings | {"objective.beta": beta}
    for name, settings in ESTIMATORS.items()
    for beta in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
}
