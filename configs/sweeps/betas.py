"""The coefficient of the KL, against a reference that is never renewed.

    launch/sweep.sh configs/sweeps/betas.py
    python -m rpg_jax.report runs/betas

5 values x 3 seeds = 15 runs of about 65 s on one core each: 8 minutes on 2 cores, and the warm start if no other sweep
of this folder has made it.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2)
RPG = {
    "objective.divergence": "urkl",
    "objective.estimator": "reinforce",
    "objective.clip": "rpg",
    "reference.mode": "fixed",
}
VARIANTS = {f"beta-{beta:g}": RPG | {"objective.beta": beta} for beta in (0.0, 1e-3, 1e-2, 1e-1, 1.0)}
