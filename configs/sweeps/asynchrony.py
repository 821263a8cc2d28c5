"""Rollouts of 0, 4, 16 and 64 updates ago: no clip, RPG-Style Clip, M2PO, DPPO, and a KL to the behavior policy alone.

    launch/sweep.sh configs/sweeps/asynchrony.py

5 arms x 4 delays x 10 seeds = 200 runs of about 65 s on one core each. docs/study/asynchrony.md has them on a smaller
task. The learning rates, and the coefficient of `urkl`, are those that
`asynchrony_rates.py` found best at delays 0 and 64; delays of 4 take those of 0, and delays of 16 those of 64.
"""

from configs.sweeps.asynchrony_rates import ARMS, RATE

CONFIG = "configs/sweeps/small.py"
SEEDS = tuple(range(10))
# Times RATE, at delays up to 4 and beyond.
FACTORS = {"none": (32, 8), "rpg": (32, 32), "m2po": (32, 8), "dppo": (32, 32), "urkl-0.01": (32, 16)}
VARIANTS = {
    f"{arm.partition('-')[0]}-{delay}": ARMS[arm]
    | {"rollout.delay": delay, "optimizer.learning_rate": factors[delay > 4] * RATE}
    for arm, factors in FACTORS.items()
    for delay in (0, 4, 16, 64)
}
