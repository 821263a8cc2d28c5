"""The base of the sweeps in this folder: the quickstart's tasks and model, with a budget for many runs.

    launch/sweep.sh configs/sweeps/objectives.py

Hardware: a run takes one CPU core for about 65 s; two at once on 2 cores. The study of four sweeps, objectives (45
runs), divergences (20), clips (30) and references (25), is 120 x 65 s / 2 = 65 minutes, and 1 for the warm start that
all of them share.
A step is 16 prompts x 8 responses, learned from in 4 updates, without dynamic sampling, so that all objectives have
the same kind of rollouts. The objective is all defaults where a sweep says nothing. Expect a held-out mean@8 of about
0.4 before and 0.75 after 40 steps of RPG-REINFORCE.
Variants: `:smoke` is the same path in a few steps, for tests.
"""

from configs import quickstart


def get_config(variant=""):
    config = quickstart.get_config(variant)
    config.objective.clip = None
    config.log.tensorboard = False
    config.checkpoint.keep_last = 1
    if variant == "smoke":
        config.model.size = "micro"
    else:
        config.steps = 40
        config.rollout.update(dict(prompts=16, dynamic_sampling=False))
        config.learner.minibatch_prompts = 4
        config.evaluation.every = 8
        config.checkpoint.every = 8
    return config
