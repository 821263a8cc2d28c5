"""Does the constant of a divergence act by the branch that it chooses under Algorithm 2's clip, or by its coefficient?

    launch/sweep.sh configs/sweeps/sign.py
    python docs/study/sign.py runs/sign

6 arms x 12 seeds = 72 runs of about 2 minutes on one core each: 70 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. docs/study/sign.md says why, and which further values of beta were planned.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = tuple(range(12))
BETAS = (0.3,)
FIXED = {"objective.name": "docs/study/sign_loss.py:loss", "reference.mode": "fixed"}
FIXED |= {"evaluation.every": 40, "checkpoint.every": 40}  # the last score is what counts
FIXED |= {"learner.microbatch_rows": 4}  # of packed rows: 32 responses fill ten, which 8 would round up to 16
ARMS = {
    **{f"branch{b}-coefficient{c}": {"objective.branch": float(b), "objective.coefficient": float(c)}
       for b in (0, 1) for c in (0, 1)},
    **{f"unclipped-coefficient{c}": {"objective.clipped": False, "objective.coefficient": float(c)} for c in (0, 1)},
}  # fmt: skip
VARIANTS = {
    f"{arm}-beta{beta:g}": FIXED | settings | {"objective.beta": beta}
    for beta in BETAS
    for arm, settings in ARMS.items()
}
