"""The path of the paper's experiments in miniature: a Hugging Face checkpoint, sets in the paper's format, RPG.

    python third_party/transformers/end_to_end.py --peer_python=VENV/bin/python

makes the checkpoint and the sets, prepares, converts, trains with this config, evaluates and exports; see there for
each command. Hardware: 2 CPU cores, under 10 minutes in all. Expect held-out mean@8 of about 0.2 after the warm start
and above 0.6 at the end.
Variants: `:smoke` is the same path in a few steps, for CI.
"""

from configs import base, quickstart
from rpg_jax import InputError


def get_config(variant=""):
    config = quickstart.get_config()
    config.steps = 36
    config.model.update(dict(size=None, checkpoint="runs/word_problems/converted"))
    config.data = base.prepared_sets(
        train="runs/word_problems/train",
        heldout=("runs/word_problems/heldout",),
        tokenizer="runs/word_problems/converted",
    )
    config.warm_start.update(dict(steps=160, temperature=0.7, learning_rate=2e-3))
    config.rollout.update(dict(max_prompt=160, max_new=40))
    if variant == "smoke":
        config.steps = 2
        config.warm_start.update(dict(steps=4, batch=8, save_every=4))
        config.rollout.update(dict(prompts=4, samples=4, slots=8, dynamic_sampling=False))
        config.learner.update(dict(minibatch_prompts=4, microbatch_rows=4))
        config.evaluation.update(dict(every=2, k=4))
    elif variant:
        raise InputError(f"unknown variant {variant!r} of configs/word_problems.py; known: smoke")
    return config
