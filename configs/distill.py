"""On-policy distillation without a reward: the quickstart's policy teaches a model of half its width.

    launch/quickstart.sh
    python -m rpg_jax.convert --workdir=runs/quickstart --target=exports/quickstart
    python -m rpg_jax.train --config=configs/distill.py --workdir=runs/distill

Hardware: 2 CPU cores, minutes. Expect held-out mean@8 of 0.17 after the warm start and 0.87 at the end, with a teacher
of 0.93 (docs/study/distillation.md). The student has its own warm start from worked solutions, as the teacher had, so
that it finds the form of an answer; what it learns after that, it learns from the teacher alone. The accuracy is
measured and not trained on. configs/sweeps/distillation.py compares divergences, docs/distillation.md explains all.
Variants: `:smoke` is the same path in a few steps, for tests.
"""

from configs import quickstart


def get_config(variant=""):
    config = quickstart.get_config(variant)
    config.model.size = "micro" if variant == "smoke" else "tiny-narrow"
    config.reward.function = "none"
    config.reference.update(dict(mode="fixed", checkpoint="exports/quickstart"))
    config.objective.update(dict(divergence="rkl", kl="full", beta=1.0, clip="none"))
    config.rollout.update(dict(samples=1, dynamic_sampling=False, overlong_buffer=0))
    config.checkpoint.keep_last = 1
    if variant == "smoke":
        config.steps = 2
        config.rollout.prompts = 8
        config.learner.minibatch_prompts = 4
    else:
        config.steps = 60
        config.warm_start.steps = 600
        config.optimizer.learning_rate = 2e-3
        config.rollout.update(dict(prompts=128, slots=128))
        config.learner.update(dict(minibatch_prompts=32, microbatch_rows=16))
    return config
