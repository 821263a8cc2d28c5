"""RL on a real pretrained model on a laptop: SmolLM2-135M-Instruct and three families of reasoning-gym.

    ./launch/real_model.sh

fetches the model, converts it, trains with this config, and evaluates before and after; docs/real_model.md says what
came of it. Hardware: 2 CPU cores and 8 GB.
    python -m configs.real_model --heldout=trained     the problems of these evaluations, for `evaluate --data`; the
                                                       other set is `untrained`
    python -m configs.real_model FOLDER                their scores, once launch/real_model.sh has written them there
Variants: `:smoke` is the same path in two steps, for tests.
"""

import json
import pathlib
import sys

from configs import base

# Two-term sums and differences, products of digits, greatest common divisors. Small numbers, because this model has
# 135M parameters and answers in one sentence: what RL can raise is what it gets right now and then.
SUMS = "chain_sum(min_terms=2, max_terms=2, min_digits=1, max_digits=2, size={0})"
PRODUCTS = "products(min_digits=1, max_digits=1, size={1})"
GCD = "gcd(max_value=20, size={2})"
# Two families that it is evaluated on and never trained on: one near to those, one that is not about arithmetic.
UNTRAINED = "gym:lcm(max_value=20, size=24) + letter_counting(min_words=1, max_words=3, size=24)"


def mixture(*sizes):
    """The three families, with so many problems of each."""
    return "gym:" + " + ".join((SUMS, PRODUCTS, GCD)).format(*sizes)


HELDOUT = {"trained": mixture(24, 10, 22), "untrained": UNTRAINED}


def get_config(variant=""):
    config = base.get_config(
        base.prepared_sets(
            train=mixture(300, 80, 200),
            heldout=(HELDOUT["trained"],),
            wording="none",
        ),
        steps=16,
        model=dict(checkpoint="runs/real_model/base", dtype="float32", remat="dots"),
        rollout=dict(
            prompts=16,
            samples=8,
            max_prompt=64,
            max_new=24,
            slots=128,
        ),
        behavior=dict(source="sampler"),  # saves a forward pass over every response, a sixth of a step
        reward=dict(extraction="number", workers=2, timeout_seconds=5.0, memory_mb=2048, max_failures=0.1),
        objective=dict(name="rpg", clip="rpg"),
        learner=dict(minibatch_prompts=8, microbatch_rows=8, scoring_rows=16, logprob_chunk=22),
        optimizer=dict(name="adamw", learning_rate=1e-5, warmup_steps=4),
        evaluation=dict(every=8, k=4),
        checkpoint=dict(every=2, keep_last=1),
    )
    if variant == "smoke":
        config.steps = 2
        config.data.update(dict(train=mixture(12, 6, 6), heldout=(mixture(2, 1, 1),)))
        config.rollout.update(dict(prompts=2, samples=2, slots=4))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=2, scoring_rows=4))
        config.evaluation.update(dict(every=2, k=2))
        config.reward.workers = 1
    elif variant:
        raise ValueError(f"unknown variant {variant!r} of configs/real_model.py; known: smoke")
    return config


def table(folder: pathlib.Path) -> str:
    """Mean scores before and after training, sampled and greedy, with 95 % bootstrap intervals over problems.

    Of all problems of the trained families together, then of each; likewise of the others.
    """
    columns = [f"{when}-{how}" for how in ("sampled", "greedy") for when in ("before", "after")]
    rows: dict[str, list[str]] = {"": columns}
    for families in HELDOUT:
        for column in columns:
            scores = json.loads((folder / f"{column}-{families}" / "evaluation.json").read_text())
            for key in [key for key in scores if key.endswith(f"/mean@{scores['k']}")]:
                mean, low, high = (scores[key + suffix] for suffix in ("", "_low", "_high"))
                name = key.partition("/")[0].replace("all", families)
                rows.setdefault(name, []).append(f"{mean:.1%} ({low:.1%} - {high:.1%})")
    return "\n".join(f"{name:20}" + "".join(f"{cell:>26}" for cell in cells) for name, cells in rows.items())


if __name__ == "__main__":
    name = sys.argv[1].removeprefix("--heldout=")
    print(table(pathlib.Path(name)) if name == sys.argv[1] else HELDOUT[name])
