"""How far off policy a rollout is learned from: in 1, 2, 4, 8 or 16 updates, with RPG-Style Clip.

    launch/sweep.sh configs/sweeps/off_policy.py
    python -m rpg_jax.report runs/off_policy

5 numbers x 3 seeds = 15 runs of about 65 s on one core each: 8 minutes on 2 cores, and the warm start if no other
sweep of this folder has made it. More updates a rollout are also more updates in all, of smaller minibatches: the three
cannot be told apart here. `rollout.delay` changes how old the data are and nothing else.
"""

CONFIG = "configs/sweeps/small.py"
SEEDS = (0, 1, 2)
RPG = {"objective.divergence": "urkl", "objective.estimator": "reinforce", "objective.clip": "rpg"}
VARIANTS = {
    f"{updates}-updates": RPG | {"learner.minibatch_prompts": prompts}
    for updates, prompts in {1: 16, 2: 8, 4: 4, 8: 2, 16: 1}.items()
}
