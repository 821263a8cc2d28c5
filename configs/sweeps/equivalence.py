"""Whether DAPO, RPG as printed and RPG as released are equal, at the paper's coefficient of the KL.

    launch/sweep.sh configs/sweeps/equivalence.py
    python -m rpg_jax.report runs/equivalence --margin=0.01

7 variants x 10 seeds = 70 runs of about 65 s on one core each: 38 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. docs/study/released.md has them on a smaller task. All have the same rollouts and no
dynamic sampling. As released, RPG-REINFORCE has no KL, PPO's dual clip with c = 10, and half of the learning rate
(configs/paper.py).
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = tuple(range(10))
DAPO = {"objective.name": "dapo"}
RPG = {"objective.name": "rpg", "objective.beta": 1e-4}
ALGORITHM_2 = RPG | {"objective.estimator": "reinforce", "objective.clip": "rpg"}
RELEASED = {"objective.clip": "dual_reward", "objective.clip_c": 10.0, "objective.estimator": "differentiable"}
VARIANTS = {
    "dapo": DAPO,
    "dapo-without-deviation": DAPO | {"objective.advantage": "group_mean"},
    "as-released": RPG | RELEASED | {"objective.beta": 0.0, "optimizer.learning_rate": 2.5e-4},
    "algorithm-2-urkl": ALGORITHM_2 | {"objective.divergence": "urkl"},
    "algorithm-2-ufkl": ALGORITHM_2 | {"objective.divergence": "ufkl"},
    "algorithm-1": RPG | {"objective.estimator": "differentiable", "objective.clip": "dual"},
    "no-kl": ALGORITHM_2 | {"objective.beta": 0.0},
}
