"""RPG-REINFORCE with RPG-Style Clip on three generated task families, on a laptop CPU.

    python -m rpg_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

Hardware: 2 CPU cores, under 5 minutes. Expect held-out mean@8 of about 0.40 - 0.43 after the warm start and 0.92 - 0.95
at the end (seeds 0, 1, 2).
Variants: `:smoke` is the same path in a fraction of a minute, for tests.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(variant=""):
    config = ConfigDict()
    config.seed = 0
    config.steps = 110

    config.model = ConfigDict(
        dict(size="tiny", checkpoint=placeholder(str), dtype="float32", scan=False, remat="none", attention="auto")
    )
    config.mesh = ConfigDict(dict(data=-1, fsdp=1, tensor=1, slices=1))
    config.data = ConfigDict(
        dict(
            directory="runs/data",
            seed=0,
            train_size=580,  # problems of each task
            heldout_size=64,
            vocab_size=512,
            tasks=ConfigDict(
                dict(
                    arithmetic=ConfigDict(dict(steps=3, operand=5, maximum=10)),
                    countdown=ConfigDict(dict(numbers=4, used=2, largest=8, maximum=9, operators="+", attempts=3)),
                    sorting=ConfigDict(dict(length=5, letters=14)),
                )
            ),
        )
    )
    # A temperature under 1 leaves the policy unsure of what it knows: it samples worse than it could, and RL has
    # something to explore.
    config.warm_start = ConfigDict(
        dict(
            steps=500, batch=32, microbatch_rows=8, temperature=0.5, learning_rate=3e-3, warmup_steps=20, save_every=50
        )
    )
    config.rollout = ConfigDict(
        dict(
            prompts=32,
            samples=8,
            max_prompt=20,
            max_new=36,
            slots=128,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            dynamic_sampling=True,
            oversample=2.0,
            max_batches=8,
            overlong_buffer=4,
            overlong_factor=1.0,
        )
    )
    config.reward = ConfigDict(
        dict(
            scale="signed", function=placeholder(str), workers=2, timeout_seconds=5.0, memory_mb=1024, max_failures=0.1
        )
    )
    config.objective = ConfigDict(
        dict(
            name="rpg",
            clip="rpg",
            # What is unset is the objective's own default: for rpg urkl, reinforce and 1e-4.
            divergence=placeholder(str),
            estimator=placeholder(str),
            beta=placeholder(float),
            advantage=placeholder(str),
            level=placeholder(str),
            reduction=placeholder(str),
            denominator=placeholder(float),
            clip_low=placeholder(float),
            clip_high=placeholder(float),
            clip_c=placeholder(float),
            z_old=placeholder(float),
            sampler_correction=placeholder(float),
        )
    )
    config.reference = ConfigDict(dict(mode="iterative", every=placeholder(int), kl_target=placeholder(float)))
    config.learner = ConfigDict(dict(epochs=1, minibatch_prompts=8, microbatch_rows=8, logprob_chunk=32, pack=False))
    config.optimizer = ConfigDict(
        dict(
            name="schedule_free_adamw",
            learning_rate=5e-4,
            warmup_steps=10,
            decay=placeholder(str),
            beta1=0.9,
            beta2=0.99,
            epsilon=1e-8,
            weight_decay=0.0,
            clip_norm=1.0,
            offload=False,
        )
    )
    config.evaluation = ConfigDict(dict(every=10, k=8, temperature=1.0))
    config.checkpoint = ConfigDict(dict(every=10, keep_last=2, most_skipped=10))
    config.log = ConfigDict(dict(tensorboard=True, wandb=placeholder(str)))

    if variant == "smoke":
        config.steps = 3
        config.data.update(dict(train_size=100, heldout_size=4))
        config.warm_start.update(dict(steps=6, batch=16, save_every=3))
        config.rollout.update(dict(prompts=4, samples=4, slots=12, dynamic_sampling=False))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=4))
        config.evaluation.update(dict(every=2, k=4))
        config.checkpoint.update(dict(every=1))
    elif variant:
        raise ValueError(f"unknown variant {variant!r} of configs/quickstart.py; known: smoke")
    return config
