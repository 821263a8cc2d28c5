"""Objectives head to head: RPG-REINFORCE with RPG-Style Clip, and every off-policy baseline.

    launch/sweep.sh configs/sweeps/objectives.py
    python -m rpg_jax.report runs/objectives

9 objectives x 5 seeds = 45 runs of about 65 s on one core each: 25 minutes on 2 cores, warm start included. Each
objective has the settings of its paper (docs/method.md 7) where named; all have the same rollouts, optimizer and
budget. CISPO's paper gives no bound: 4 caps ratios at 5. `dapo` samples dynamically, which is a part of it. The
divergences differ too little at RPG's coefficient of 1e-4: `divergences.py` compares them where they matter.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
VARIANTS = {
    "rpg": {
        "objective.name": "rpg",
        "objective.divergence": "urkl",
        "objective.estimator": "reinforce",
        "objective.clip": "rpg",
        "objective.beta": 1e-4,
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
