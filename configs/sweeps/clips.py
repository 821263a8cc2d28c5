"""RPG-Style Clip in isolation: none, its thresholds, and truncated weights, all else the same.

    launch/sweep.sh configs/sweeps/clips.py
    python -m rpg_jax.report runs/clips

6 variants x 5 seeds = 30 runs of about 65 s on one core each: 16 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. Thresholds are those of the ratio, below and above 1; the paper uses 0.2 and 0.28.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
RPG = {"objective.divergence": "urkl", "objective.estimator": "reinforce", "objective.beta": 1e-4}


def clip(name, low=None, high=None):
    bounds = {"objective.clip_low": low, "objective.clip_high": high} if low else {}
    return RPG | {"objective.clip": name} | bounds


VARIANTS = {
    "rpg-0.2-0.28": clip("rpg", 0.2, 0.28),
    "rpg-0.05": clip("rpg", 0.05, 0.05),
    "rpg-0.1": clip("rpg", 0.1, 0.1),
    "rpg-0.4": clip("rpg", 0.4, 0.4),
    "truncate-0.2-0.28": clip("truncate", 0.2, 0.28),
    "none": clip("none"),
}
