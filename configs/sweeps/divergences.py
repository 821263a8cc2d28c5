"""Forward and reverse KL head to head, each normalized and not, against a reference that is never renewed.

    launch/sweep.sh configs/sweeps/divergences.py
    python -m rpg_jax.report runs/divergences

4 divergences x 5 seeds = 20 runs of about 65 s on one core each: 11 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. beta is 0.3, large enough that the policy stays visibly nearer the reference.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
RPG = {
    "objective.estimator": "reinforce",
    "objective.clip": "rpg",
    "objective.beta": 0.3,
    "reference.mode": "fixed",
}
VARIANTS = {divergence: RPG | {"objective.divergence": divergence} for divergence in ("rkl", "urkl", "fkl", "ufkl")}
