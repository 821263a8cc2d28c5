"""Objectives head to head: RPG-REINFORCE with each of the paper's divergences, and every off-policy baseline.

    launch/sweep.sh configs/sweeps/objectives.py
    python -m rpg_jax.report runs/objectives

12 objectives x 5 seeds = 60 runs of about 75 s on one core each: 40 minutes on 2 cores, warm start included. Each
objective has the settings of its paper (method.md 7) where it names them; all have the same rollouts, optimizer and
budget. CISPO's paper gives no bound: 4 caps ratios at 5. `dapo` samples dynamically, which is a part of it.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
RPG = {"objective.name": "rpg", "objective.estimator": "reinforce", "objective.clip": "rpg", "objective.beta": 1e-4}
VARIANTS = {
    **{
        f"rpg-{divergence}": RPG | {"objective.divergence": divergence} for divergence in ("urkl", "rkl", "ufkl", "fkl")
    },
    "grpo": {"objective.name": "grpo"},
    "grpo-corrected": {"objective.name": "grpo_corrected"},
    "dapo": {"objective.name": "dapo", "rollout.dynamic_sampling": True},
    "dr-grpo": {"objective.name": "dr_grpo"},
    "rloo": {"objective.name": "rloo"},
    "reinforce++-baseline": {"objective.name": "reinforce_pp_baseline"},
    "gspo": {"objective.name": "gspo"},
    "cispo": {"objective.name": "cispo", "objective.clip_high": 4.0},
}
