"""The shape of a rollout that others measured on TPUs, for `python -m rpg_jax.plan --calibrate`; nothing to train.

Llama-3.1-8B on four chips, 64 prompts x 16 responses of at most 1,024 tokens. rpg_jax/lab/planning/calibration.py says
who measured it. Adapters alone are trained, so that the plan of the other phases fits beside it.
"""

from configs import base


def get_config():
    return base.get_config(
        base.prepared_sets(train="data/math"),
        steps=1,
        model=dict(size="llama3-8b", lora=dict(rank=8)),
        mesh=dict(tensor=4),
        rollout=dict(prompts=64, samples=16, max_prompt=1024, max_new=1024, slots=256),
        objective=dict(name="rpg"),
        learner=dict(minibatch_prompts=8, microbatch_rows=4),
        optimizer=dict(learning_rate=1e-5, warmup_steps=0),
        evaluation=dict(every=1, k=1),
        checkpoint=dict(every=1),
    )
