"""Learning rates for a study of stale rollouts: each arm's at either end of the delays, on seeds kept for this choice.

    launch/sweep.sh configs/sweeps/asynchrony_rates.py

7 arms x 2 delays x 7 rates x 2 seeds = 196 runs of about 65 s on one core each. The KL of `urkl` is to the behavior
policy, and is all that holds the policy near it, so that its coefficient is chosen like the rate.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (100, 101)
RATE = 5e-4  # of the base
REINFORCE = {"objective.name": "rpg", "objective.estimator": "reinforce", "objective.beta": 0.0}
ARMS = {
    "none": REINFORCE | {"objective.clip": "none"},
    "rpg": REINFORCE | {"objective.clip": "rpg"},
    "m2po": REINFORCE | {"objective.clip": "m2po"},
    "dppo": REINFORCE | {"objective.clip": "dppo"},
    **{
        f"urkl-{beta:g}": REINFORCE | {"objective.clip": "none", "objective.divergence": "urkl", "objective.beta": beta}
        for beta in (0.01, 0.1, 1.0)
    },
}
VARIANTS = {
    f"{arm}-{delay}-{factor:g}": settings | {"rollout.delay": delay, "optimizer.learning_rate": factor * RATE}
    for arm, settings in ARMS.items()
    for delay in (0, 64)
    for factor in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
}
