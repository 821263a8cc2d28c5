"""Rollouts of 0, 4, 16 and 64 updates ago: no clip, RPG-Style Clip, M2PO, DPPO, and a KL to the behavior policy alone.

    python docs/study/trials.py configs/sweeps/asynchrony.py --out=docs/study/asynchrony.parquet --steps=60

5 arms x 4 delays x 10 seeds = 200 runs, 13 minutes. `launch/sweep.sh configs/sweeps/asynchrony.py` runs them on the
quickstart's tasks, for about 65 s on one core each. The learning rates, and the coefficient of `urkl`, are those that
`asynchrony_rates.py` found best at delays 0 and 64; delays of 4 take those of 0, and delays of 16 those of 64.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = tuple(range(10))
RATE = 5e-4  # of the base
REINFORCE = {"objective.name": "rpg", "objective.estimator": "reinforce", "objective.beta": 0.0}
ARMS = {
    "none": REINFORCE | {"objective.clip": "none"},
    "rpg": REINFORCE | {"objective.clip": "rpg"},
    "m2po": REINFORCE | {"objective.clip": "m2po"},
    "dppo": REINFORCE | {"objective.clip": "dppo"},
    "urkl": REINFORCE | {"objective.clip": "none", "objective.divergence": "urkl", "objective.beta": 0.01},
}
# Times RATE, at delays up to 4 and beyond.
FACTORS = {"none": (32, 8), "rpg": (32, 32), "m2po": (32, 8), "dppo": (32, 32), "urkl": (32, 16)}
VARIANTS = {
    f"{arm}-{delay}": settings | {"rollout.delay": delay, "optimizer.learning_rate": FACTORS[arm][delay > 4] * RATE}
    for arm, settings in ARMS.items()
    for delay in (0, 4, 16, 64)
}
