"""RL on conversations: a response has several turns, and an environment answers between them (docs/environments.md).

    python -m rpg_jax.train --config=configs/environments.py:guess --workdir=runs/guess

Variants:
    guess       a small model finds a number by higher and lower; 2 CPU cores, minutes
    calculator  Qwen2.5-Coder-0.5B (runs/real_model_qwen/base, as `launch/real_model.sh qwen2.5-coder-0.5b` makes it)
                gets a calculator for sums that it cannot do in its head; 2 CPU cores and 14 GB, 40 minutes
    textarena   SmolLM2-135M (runs/real_model/base) plays a game of TextArena (requirements-textarena.txt), once
                python -m configs.environments 400 > data/games.jsonl     has written so many problems, a seed each, and
                python -m configs.environments 432 | tail -n 32 > data/heldout_games.jsonl     games of other seeds
`-smoke` after a name is the same path in two steps, for tests.
"""

import json
import sys

from configs import base
from configs.real_model import pretrained
from rpg_jax import InputError


def guess():
    return base.get_config(
        base.generated_tasks(
            tasks=dict(guess=dict(highest=9, fewest=9, most=9, turns=4, listens=20)),
            train_size=480, heldout_size=16, vocab_size=512,
        ),
        steps=100,
        model=dict(size="tiny", dtype="float32", scan=False, remat="none"),
        mesh=dict(data=-1, fsdp=1),
        warm_start=dict(steps=200),
        environment=dict(name="guess", max_turns=4, turn_tokens=3, memory_mb=1024),
        rollout=dict(prompts=32, samples=8, max_prompt=12, max_new=36, slots=64),
        reward=dict(scale="unit"),
        objective=dict(name="rpg", clip="rpg"),
        learner=dict(minibatch_prompts=8, microbatch_rows=8, logprob_chunk=48, pack=True, packed_lengths=2),
        optimizer=dict(name="schedule_free_adamw", learning_rate=2e-3, warmup_steps=10, beta2=0.99),
        evaluation=dict(every=20, k=16),
        checkpoint=dict(every=20),
    )  # fmt: skip


def calculator():
    sums = "gym:chain_sum(min_terms=2, max_terms=2, min_digits=7, max_digits=9, size={})"
    return pretrained(
        base.prepared_sets(train=sums.format(400), heldout=(sums.format(12),), wording="calculator"),
        steps=8,
        model=dict(checkpoint="runs/real_model_qwen/base", lora=dict(rank=16)),
        environment=dict(name="calculator", max_turns=2, turn_tokens=40, stop=("</calc>",), memory_mb=1024),
        rollout=dict(prompts=8, samples=4, max_prompt=160, max_new=96, slots=32),
        learner=dict(minibatch_prompts=4, microbatch_rows=2, pack=True, packed_lengths=2),
        optimizer=dict(learning_rate=5e-4),
    )


def textarena():
    return pretrained(
        base.prepared_sets(train="data/games.jsonl", heldout=("data/heldout_games.jsonl",), wording="none"),
        steps=16,
        model=dict(checkpoint="runs/real_model/base"),
        environment=dict(name="textarena:GuessTheNumber-v0", max_turns=8, turn_tokens=16, memory_mb=2048),
        rollout=dict(prompts=16, samples=8, max_prompt=64, max_new=640, slots=64),
        learner=dict(minibatch_prompts=8, microbatch_rows=8),
        optimizer=dict(learning_rate=1e-5),
    )


VARIANTS = dict(guess=guess, calculator=calculator, textarena=textarena)


def get_config(variant=""):
    name = variant.removesuffix("-smoke")
    if name not in VARIANTS:
        raise InputError(f"variant {variant!r} of configs/environments.py; known: {', '.join(VARIANTS)}")
    config = VARIANTS[name]()
    if variant.endswith("-smoke"):
        config.steps = 2
        config.warm_start.steps = min(config.warm_start.steps, 6)
        config.rollout.update(dict(prompts=4, samples=4, slots=8))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=4))
        config.evaluation.update(dict(every=2, k=2))
        config.checkpoint.update(dict(every=1))
    return config


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        print(json.dumps(dict(prompt=f"Game {seed}. You are told its rules.", answer="a win", seed=seed)))
