"""RPG-REINFORCE with RPG-Style Clip on three generated task families, on a laptop CPU.

    python -m rpg_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: 2 CPU cores, minutes. Expect held-out mean@8 of about 0.4 after the warm start and above 0.9 at the end.
Variants: `:smoke` is the same path in a fraction of a minute, for tests.
"""

from configs import base
from rpg_jax import InputError


def get_config(variant=""):
    tasks = dict(
        arithmetic=dict(
            steps=3,  # [operations] of a problem
            operand=5,  # [number] largest operand
            maximum=10,  # [number] largest value on the way
        ),
        countdown=dict(
            numbers=4,  # [numbers] given
            used=2,  # [numbers] that the worked solution uses
            largest=8,  # [number] largest of those given
            maximum=9,  # [number] largest target
            operators="+",  # [characters] any of "+-*/"
            attempts=3,  # [attempts] that may miss before the one that hits, in the worked solution
        ),
        sorting=dict(
            length=5,  # [letters] to sort
            letters=14,  # [letters] of the alphabet that they are drawn from
        ),
    )
    config = base.get_config(
        base.generated_tasks(tasks=tasks, train_size=580, heldout_size=64, vocab_size=512),
        steps=100,
        model=dict(size="tiny", dtype="float32", scan=False, remat="none"),
        mesh=dict(data=-1, fsdp=1),
        warm_start=dict(steps=500),
        rollout=dict(
            prompts=32,
            samples=8,
            max_prompt=20,
            max_new=36,
            slots=32,
            dynamic_sampling=True,
            max_batches=16,
            overlong_buffer=4,
        ),
        reward=dict(timeout_seconds=5.0, memory_mb=1024, max_failures=0.1),
        objective=dict(name="rpg", clip="rpg"),
        learner=dict(minibatch_prompts=8, microbatch_rows=8, logprob_chunk=56, pack=True, packed_lengths=2),
        optimizer=dict(name="schedule_free_adamw", learning_rate=5e-4, warmup_steps=10, beta2=0.99),
        evaluation=dict(every=20, k=8),
        checkpoint=dict(every=10),
    )
    if variant == "smoke":
        config.steps = 3
        config.data.update(dict(train_size=100, heldout_size=4))
        config.warm_start.update(dict(steps=6, batch=16, save_every=3))
        config.rollout.update(dict(prompts=4, samples=4, slots=8, dynamic_sampling=False))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=4))
        config.evaluation.update(dict(every=2, k=4))
        config.checkpoint.update(dict(every=1))
    elif variant:
        raise InputError(f"unknown variant {variant!r} of configs/quickstart.py; known: smoke")
    return config
