"""The base of the sweeps with many short runs: the tasks of `small.py`, a model of a fifth of its size, fewer steps.

    launch/sweep.sh configs/sweeps/equivalence.py

Hardware: a run takes about 15 s of 2 CPU cores, most of which is starting and loading compiled programs. A step is 16
prompts x 8 responses, learned from in 4 updates. Scores are means of 32 responses to each of 192 held-out problems, so
that sampling them adds half a point to the standard deviation of a run's score.
Variants: `:smoke` is the same path in a few steps, for tests.
"""

from configs.sweeps import small


def get_config(variant=""):
    config = small.get_config(variant)
    if not variant:
        config.model.size = "mini"
        config.steps = 30
        config.rollout.prompts = 16
        config.evaluation.update(dict(every=30, k=32))
        config.checkpoint.every = 30
    return config
