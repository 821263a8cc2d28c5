"""RL on a real pretrained model on a laptop: SmolLM2-135M-Instruct, or a larger one, and families of reasoning-gym.

    ./launch/real_model.sh [MODEL]

fetches the model, converts it, trains with this config, and evaluates before and after; docs/running.md says what
came of it. Hardware: 2 CPU cores and 8 GB, or the GPU that a variant names.
    python -m configs.real_model trained [MODEL]    the problems of these evaluations, for `evaluate --data`; the other
                                                    set is `untrained`
Variants: `:qwen2.5-coder-0.5b` is that model, with adapters, and `:qwen2.5-coder-0.5b-gpu` the same on an NVIDIA GPU of
80 GB, all weights; `:study-LEVEL` and `:study-gpu-LEVEL` are SmolLM2 and Qwen as docs/study/real_model.md compares
objectives with them, on problems from easier (1) to harder; `:smoke` is the path of SmolLM2 in two steps, for tests.
"""

import sys

from configs import base
from rpg_jax import InputError

# Small numbers, because SmolLM2 answers in one sentence of 24 tokens: what RL can raise is what a model gets right now
# and then. The larger model has room for several steps, under the paper's wording.
FAMILIES = {
    "smollm2": (  # 135M parameters
        "chain_sum(min_terms=2, max_terms=2, min_digits=1, max_digits=2, size={})",
        "products(min_digits=1, max_digits=1, size={})",
        "gcd(max_value=20, size={})",
    ),
    "qwen2.5-coder-0.5b": (  # 494M
        "chain_sum(min_terms=3, max_terms=4, min_digits=1, max_digits=2, size={})",
        "simple_equations(min_terms=2, max_terms=2, max_value=20, size={})",
        "leg_counting(min_animals=2, max_animals=3, max_instances=4, size={})",
    ),
}
SMOLLM2, QWEN = FAMILIES
ON_GPU = f"{QWEN}-gpu"
# Those of the study, from easier to harder. No family has a constant answer that is often right.
LEVELS = {
    SMOLLM2: tuple(
        (
            f"chain_sum(min_terms={least}, max_terms={most}, min_digits=1, max_digits=2, size={{}})",
            f"products(min_digits={digits}, max_digits=2, size={{}})",
        )
        for least, most, digits in ((2, 2, 1), (2, 3, 1), (3, 4, 2))
    ),
    QWEN: tuple(
        (
            f"chain_sum(min_terms={terms}, max_terms={terms + 2}, min_digits=1, max_digits={digits}, size={{}})",
            f"simple_equations(min_terms={terms - 1}, max_terms={terms}, max_value={value}, size={{}})",
            f"leg_counting(min_animals={terms - 1}, max_animals={terms + 1}, max_instances={instances}, size={{}})",
        )
        for terms, digits, value, instances in ((3, 2, 30, 6), (4, 3, 50, 8), (6, 3, 100, 12))
    ),
}
STUDIES = {
    f"{name}-{level}": (model, level)
    for name, model in (("study", SMOLLM2), ("study-gpu", QWEN))
    for level in range(1, len(LEVELS[model]) + 1)
}
# Two families that they are evaluated on and never trained on: one near to those, one that is not about arithmetic.
UNTRAINED = "gym:lcm(max_value=20, size=24) + letter_counting(min_words=1, max_words=3, size=24)"
EVALUATIONS = [f"{when}-{how}" for how in ("sampled", "greedy") for when in ("before", "after")]
SETS = ("trained", "untrained")
# Problems of each family, for training and held out.
TRAINED = dict(chain_sum=300, products=80, gcd=200, simple_equations=200, leg_counting=200)
HELDOUT = dict(chain_sum=24, products=10, gcd=22, simple_equations=16, leg_counting=16)


def mixture(model, sizes):
    """The families of a model, with so many problems of each, {family: problems}."""
    return "gym:" + " + ".join(text.format(sizes[text.partition("(")[0]]) for text in FAMILIES[model])


def heldout(families, model=SMOLLM2):
    """The problems of the evaluations before and after."""
    return {"trained": mixture(model, HELDOUT), "untrained": UNTRAINED}[families]


def pretrained(data, *, model, learner, optimizer, **settings):
    """RL on a pretrained model on a CPU, with what differs."""
    return base.get_config(
        data,
        model=dict(dtype="float32", remat="dots") | model,
        behavior=dict(source="sampler"),  # saves a forward pass over every response, a sixth of a step
        objective=dict(name="rpg", clip="rpg"),
        learner=dict(scoring_rows=16, logprob_chunk=32) | learner,
        optimizer=dict(name="adamw", warmup_steps=2) | optimizer,
        evaluation=dict(every=8, k=4),
        checkpoint=dict(every=2, keep_last=1),
        **settings,
    )


def get_config(variant=""):
    if variant in STUDIES:
        return study(*STUDIES[variant])
    if variant not in ("", QWEN, ON_GPU, "smoke"):
        known = ", ".join((QWEN, ON_GPU, "smoke", *STUDIES))
        raise InputError(f"unknown variant {variant!r} of configs/real_model.py; known: {known}")
    model = QWEN if variant.startswith(QWEN) else SMOLLM2
    config = pretrained(
        base.prepared_sets(train=mixture(model, TRAINED), heldout=(heldout("trained", model),), wording="none"),
        steps=16,
        model=dict(checkpoint="runs/real_model/base"),
        rollout=dict(prompts=16, samples=8, max_prompt=64, max_new=24, slots=128),
        reward=dict(extraction="number", timeout_seconds=5.0, memory_mb=2048, max_failures=0.1),
        learner=dict(minibatch_prompts=8, microbatch_rows=8, logprob_chunk=22),
        optimizer=dict(learning_rate=1e-5, warmup_steps=4),
    )
    if model == QWEN:
        config.model.checkpoint = "runs/real_model_qwen/base"
        config.model.lora.rank = 16  # of all weights, gradients and moments alone are 8 GB
        config.optimizer.learning_rate = 1e-4
        config.data.wording = "paper"
        config.rollout.update(dict(prompts=8, max_prompt=192, max_new=128, slots=32))
        # Before training a row fills 4 in 10 of its 320 columns: packed, an update computes few others.
        config.learner.update(dict(minibatch_prompts=4, microbatch_rows=2, logprob_chunk=32, pack=True))
        config.learner.packed_lengths = 2
        config.steps = config.evaluation.every = 8
    if variant == ON_GPU:  # trains what a CPU had no memory for, and draws more responses, which may be longer
        config.model.update(dict(checkpoint="runs/real_model_qwen_gpu/base", dtype="bfloat16"))
        config.model.lora.rank = 0
        config.optimizer.learning_rate = 5e-6
        config.behavior.source = "trainer"  # the sampler rounds otherwise in bfloat16
        config.rollout.update(dict(prompts=32, samples=16, max_new=256, slots=512))
        config.learner.update(dict(minibatch_prompts=16, microbatch_rows=8, scoring_rows=16, logprob_chunk=256))
        config.steps, config.evaluation.every, config.checkpoint.every = 20, 10, 10
    if variant == "smoke":
        config.steps = 2
        train, held = dict(chain_sum=12, products=6, gcd=6), dict(chain_sum=2, products=1, gcd=1)
        config.data.update(dict(train=mixture(model, train), heldout=(mixture(model, held),)))
        config.rollout.update(dict(prompts=2, samples=2, slots=4))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=2, scoring_rows=4))
        config.evaluation.update(dict(every=2, k=2))
        config.reward.workers = 1
    return config


def study(model, level):
    """A run of docs/study/real_model.py, of `rpg` with 8 updates a rollout: its flags make the others of it."""
    config = get_config(ON_GPU if model == QWEN else "")
    train, held = (400, 72) if model == QWEN else (300, 100)  # problems of a family
    texts = ["gym:" + " + ".join(text.format(size) for text in LEVELS[model][level - 1]) for size in (train, held)]
    # In so few words nearly every letter stands once, and a constant answer would be right in 7 of 8.
    untrained = UNTRAINED.replace("min_words=1, max_words=3", "min_words=4, max_words=8")
    config.data.update(dict(train=texts[0], heldout=(texts[1], untrained)))
    config.reward.function = "docs/study/last_number.py:right"  # where reasoning-gym is not installed, too
    config.reference.mode = "fixed"  # every arm logs its KL to the base model; GRPO's penalty is of it
    config.log.update(dict(look_every=0, tensorboard=False))
    if model == QWEN:
        config.rollout.update(dict(max_prompt=256, max_new=384))
        config.learner.update(dict(microbatch_rows=16, scoring_rows=32))  # as many tokens as the pilot's
        config.steps, config.evaluation.every = 20, 5
    else:
        config.rollout.update(dict(prompts=8, slots=64))
        config.evaluation.k = 1
        config.steps, config.evaluation.every = 8, 4
    config.learner.minibatch_prompts = config.rollout.prompts // 8
    config.checkpoint.update(dict(every=config.evaluation.every, most_skipped=1000))  # a run that breaks ends as it is
    return config


if __name__ == "__main__":
    print(heldout(*sys.argv[1:]))
