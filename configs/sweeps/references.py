"""How often the reference policy is renewed: every rollout, every K updates, at a KL target, never.

    launch/sweep.sh configs/sweeps/references.py
    python -m rpg_jax.report runs/references

5 schedules x 5 seeds = 25 runs of about 65 s on one core each: 14 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. A run makes 160 updates, 4 a rollout. beta is 0.3, so that the reference matters.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
RPG = {
    "objective.divergence": "urkl",
    "objective.estimator": "reinforce",
    "objective.clip": "rpg",
    "objective.beta": 0.3,
}
VARIANTS = {
    "every-rollout": RPG | {"reference.mode": "iterative"},
    "every-16-updates": RPG | {"reference.mode": "every", "reference.every": 16},
    "every-64-updates": RPG | {"reference.mode": "every", "reference.every": 64},
    "kl-target-0.05": RPG | {"reference.mode": "kl_target", "reference.kl_target": 0.05},
    "never": RPG | {"reference.mode": "fixed"},
}
