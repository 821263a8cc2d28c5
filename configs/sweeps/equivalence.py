"""Whether what separates DAPO, RPG as printed and RPG as released matters at the paper's coefficient of the KL.

    launch/sweep.sh configs/sweeps/equivalence.py
    python -m rpg_jax.report runs/equivalence --margin=0.01

7 variants x 10 seeds = 70 runs of about 25 s each.
"""

CONFIG = "configs/sweeps/short.py"
SEEDS = tuple(range(10))
RPG = {"objective.name": "rpg", "objective.beta": 1e-4, "objective.advantage": "group_mean"}
ALGORITHM_2 = RPG | {"objective.estimator": "reinforce", "objective.clip": "rpg"}
VARIANTS = {
    "dapo": {"objective.name": "dapo"},
    "dapo-without-deviation": {"objective.name": "dapo", "objective.advantage": "group_mean"},
    "algorithm-2-urkl": ALGORITHM_2 | {"objective.divergence": "urkl"},
}


