"""Does the constant of a divergence act by the branch that it chooses under Algorithm 2's clip, or by its coefficient?

    launch/sweep.sh configs/sweeps/sign.py
    python docs/study/sign.py runs/sign

3 betas x 6 arms x 12 seeds = 216 runs of 75 to 120 s on one core each: 2.5 hours on 2 cores, and the warm start if no
other sweep of this folder has made it. docs/study/sign.md says why.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = tuple(range(12))
BETAS = (0.3, 0.1, 0.03)
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
