"""A student of half the width learns from the quickstart's policy without a reward, by divergences sampled and in full.

    launch/sweep.sh configs/sweeps/distillation.py
    python -m rpg_jax.report runs/distillation

9 variants x 5 seeds = 45 runs. The teacher is exports/quickstart (configs/distill.py says how to make it). A sampled
variant minimizes the divergence of a token's distribution from the teacher's by one sample of it, without a clip;
`full` ones sum over the vocabulary, and `rkl-control` takes that sum off its sample as a baseline.
"""

CONFIG = "configs/distill.py"
SEEDS = (0, 1, 2, 3, 4)
SAMPLED = {"objective.estimator": "reinforce", "objective.kl": "token"}
VARIANTS = {name: SAMPLED | {"objective.divergence": name} for name in ("ufkl", "fkl", "js", "rkl", "urkl")}
VARIANTS |= {f"{name}-full": {"objective.divergence": name, "objective.kl": "full"} for name in ("rkl", "fkl", "js")}
VARIANTS["rkl-control"] = VARIANTS["rkl"] | {"objective.control": "kl"}
