"""Your own file of problems, checkpoint and reward: docs/your_own_experiment.md goes through it.

    python -m rpg_jax.train --config=configs/my_data.py --workdir=runs/my_data

Hardware: one GPU or TPU of 40 GB for a model of 0.5B parameters. What to expect depends on what you bring.
Variants: `:smoke` is two short steps, to see that the files are right.
"""

from configs import base
from rpg_jax import InputError


def get_config(variant=""):
    config = base.get_config(
        base.prepared_sets(train="data/mine/train.jsonl", heldout="data/mine/heldout.jsonl", wording="none"),
        steps=100,
        model=dict(checkpoint="checkpoints/Qwen2.5-0.5B-Instruct"),
        rollout=dict(prompts=16, samples=8, max_prompt=256, max_new=512, slots=128),
        reward=dict(function="docs/examples/my_reward.py:right"),
        objective=dict(name="rpg", clip="rpg"),
        learner=dict(minibatch_prompts=8, microbatch_rows=8),
        optimizer=dict(learning_rate=1e-6, warmup_steps=5),
        evaluation=dict(every=20, k=4),
        checkpoint=dict(every=10),
    )
    if variant == "smoke":
        config.steps = 2
        config.rollout.update(dict(prompts=2, samples=4, max_new=16, slots=8))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=4))
        config.evaluation.update(dict(every=2, k=2))
    elif variant:
        raise InputError(f"unknown variant {variant!r} of configs/my_data.py; known: smoke")
    return config
