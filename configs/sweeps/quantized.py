"""A sampler in 8 bits, whose recorded log-probs are the behavior policy's, or which is taken for the trainer's policy.

    launch/sweep.sh configs/sweeps/quantized.py
    python -m rpg_jax.report runs/quantized

3 variants x 5 seeds = 15 runs of about 65 s on one core each: 8 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. On CPU numbers in 8 bits save memory and no time. docs/study/quantized.md has the
results.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2, 3, 4)
RPG = {
    "objective.name": "rpg",
    "objective.clip": "rpg",
}
INT8 = RPG | {"rollout.weights_dtype": "int8", "rollout.cache_dtype": "int8"}
VARIANTS = {
    "full-precision": RPG | {"behavior.source": "sampler"},
    "int8-recorded": INT8 | {"behavior.source": "sampler"},
    "int8-as-trainer": INT8 | {"behavior.source": "trainer"},
}
