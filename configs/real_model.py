"""RL on a real pretrained model on a laptop: SmolLM2-135M-Instruct, or a larger one, and families of reasoning-gym.

    ./launch/real_model.sh [MODEL]

fetches the model, converts it, trains with this config, and evaluates before and after; docs/running.md says what
came of it. Hardware: 2 CPU cores and 8 GB.
    python -m configs.real_model --heldout=trained [MODEL]     the problems of these evaluations, for `evaluate --data`;
                                                               the other set is `untrained`
    python -m configs.real_model FOLDER...     their scores, once launch/real_model.sh has written them there; of
                                               several folders, runs of other seeds, their mean, too; of one, what a
                                               constant answer scores, and scores without operands seen in training
Variants: `:qwen2.5-coder-0.5b` is that model, with adapters; `:smoke` is the path of SmolLM2 in two steps, for tests.
"""

import json
import pathlib
import re
import statistics
import sys

from configs import base
from rpg_jax import InputError

# Sums and differences, products, greatest common divisors. Small numbers, because these models answer in one sentence
# of 24 tokens: what RL can raise is what a model gets right now and then.
FAMILIES = {
    "smollm2": (  # 135M parameters
        "chain_sum(min_terms=2, max_terms=2, min_digits=1, max_digits=2, size={0})",
        "products(min_digits=1, max_digits=1, size={1})",
        "gcd(max_value=20, size={2})",
    ),
    "qwen2.5-coder-0.5b": (  # 494M
        "chain_sum(min_terms=3, max_terms=3, min_digits=2, max_digits=2, size={0})",
        "products(min_digits=1, max_digits=2, size={1})",
        "gcd(max_value=100, size={2})",
    ),
}
SMOLLM2, QWEN = FAMILIES
# Two families that they are evaluated on and never trained on: one near to those, one that is not about arithmetic.
UNTRAINED = "gym:lcm(max_value=20, size=24) + letter_counting(min_words=1, max_words=3, size=24)"
EVALUATIONS = [f"{when}-{how}" for how in ("sampled", "greedy") for when in ("before", "after")]
SETS = ("trained", "untrained")
TRAINED = dict(chain_sum=300, products=80, gcd=200)  # problems of each


def mixture(model, *sizes):
    """The three families of a model, with so many problems of each."""
    return "gym:" + " + ".join(FAMILIES[model]).format(*sizes)


def heldout(families, model=SMOLLM2):
    """The problems of the evaluations before and after."""
    return {"trained": mixture(model, 24, 10, 22), "untrained": UNTRAINED}[families]


def get_config(variant=""):
    if variant not in ("", QWEN, "smoke"):
        raise InputError(f"unknown variant {variant!r} of configs/real_model.py; known: {QWEN}, smoke")
    model = variant if variant in FAMILIES else SMOLLM2
    config = base.get_config(
        base.prepared_sets(
            train=mixture(model, *TRAINED.values()),
            heldout=(heldout("trained", model),),
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
        reward=dict(extraction="number", timeout_seconds=5.0, memory_mb=2048, max_failures=0.1),
        objective=dict(name="rpg", clip="rpg"),
        learner=dict(minibatch_prompts=8, microbatch_rows=8, scoring_rows=16, logprob_chunk=22),
        optimizer=dict(name="adamw", learning_rate=1e-5, warmup_steps=4),
        evaluation=dict(every=8, k=4),
        checkpoint=dict(every=2, keep_last=1),
    )
    if variant == QWEN:
        config.model.checkpoint = "runs/real_model_qwen/base"
        config.model.lora.rank = 16  # of all weights, gradients and moments alone are 8 GB
        config.optimizer.learning_rate = 1e-4
    if variant == "smoke":
        config.steps = 2
        config.data.update(dict(train=mixture(model, 12, 6, 6), heldout=(mixture(model, 2, 1, 1),)))
        config.rollout.update(dict(prompts=2, samples=2, slots=4))
        config.learner.update(dict(minibatch_prompts=2, microbatch_rows=2, scoring_rows=4))
        config.evaluation.update(dict(every=2, k=2))
        config.reward.workers = 1
    return config


def scores(folder: pathlib.Path, evaluation: str, families: str) -> dict[str, tuple[float, float, float]]:
    """name -> (mean score, and its 95 % bootstrap interval over problems), of all families together first."""
    values = json.loads((folder / f"{evaluation}-{families}" / "evaluation.json").read_text())
    keys = [key for key in values if key.endswith(f"/mean@{values['k']}")]
    named = {key.partition("/")[0].replace("all", families): key for key in keys}
    return {name: (values[key], values[f"{key}_low"], values[f"{key}_high"]) for name, key in named.items()}


def table(folder: pathlib.Path) -> str:
    """Mean scores before and after training, sampled and greedy, with 95 % bootstrap intervals over problems."""
    rows: dict[str, list[str]] = {"": EVALUATIONS}
    for families in SETS:
        for evaluation in EVALUATIONS:
            for name, (mean, low, high) in scores(folder, evaluation, families).items():
                rows.setdefault(name, []).append(f"{mean:.1%} ({low:.1%} - {high:.1%})")
    return aligned(rows)


def table_of_seeds(folders: list[pathlib.Path]) -> str:
    """Mean scores of runs that differ in their seeds, then their mean with the least and the highest."""
    rows: dict[str, list[str]] = {"": EVALUATIONS}
    for families in SETS:
        for evaluation in EVALUATIONS:
            means = [scores(folder, evaluation, families)[families][0] for folder in folders]
            for folder, mean in zip(folders, means, strict=True):
                rows.setdefault(f"{families}, {folder}", []).append(f"{mean:.1%}")
            text = f"{statistics.mean(means):.1%} ({min(means):.1%} - {max(means):.1%})"
            rows.setdefault(f"{families}, {len(means)} runs", []).append(text)
    return aligned(rows)


def table_of_constants(folder: pathlib.Path) -> str:
    """What always giving a family's commonest training answer scores, of all held-out problems and of the new ones.

    A problem is new if no training problem has its answer and, in any order, its words: swapped operands are not new.
    A family that is not trained has the answers of 100 problems of its training split, and all of its problems are new.
    """
    from rpg_jax import gym  # takes NumPy

    header = ["constant answer", "scores", "problems", "of them new", "constant, new"]
    rows: dict[str, list[str]] = {"": [*header, *(f"{evaluation}, new" for evaluation in EVALUATIONS)]}
    files = {families: folder / f"{EVALUATIONS[0]}-{families}" / "settings.json" for families in SETS}
    sets = {title: families for families, file in files.items() for title in json.loads(file.read_text())["data"]}
    parts = {part.family: (part, families) for title, families in sets.items() for part in gym.parse(title)}
    given = [part for part, _ in parts.values()]
    training = [part._replace(size=TRAINED.get(part.family, 100)) for part in given]
    seen = [described(problem)[1] for problem in gym.drawn(training, "train", "training problems")]
    problems = dict(described(problem) for problem in gym.drawn(given, "heldout", "held-out problems"))
    for family, (_, families) in parts.items():
        constant = statistics.mode(answer for of, answer, _ in seen if of == family)
        right = {digest: float(answer == constant) for digest, (of, answer, _) in problems.items() if of == family}
        new = [digest for digest in right if family not in TRAINED or problems[digest] not in seen]
        rows[family] = [constant, mean(right, right), str(len(right)), str(len(new)), mean(right, new)]
        rows[family] += [mean(correct(folder / f"{evaluation}-{families}"), new) for evaluation in EVALUATIONS]
    return aligned(rows)


def described(problem: dict) -> tuple[str, tuple]:
    """A digest of a problem of reasoning-gym; its family, answer and sorted words."""
    record = json.loads(problem["answer"])
    return record["digest"], (record["family"], record["answer"], sorted(re.findall(r"\w+", problem["question"])))


def correct(place: pathlib.Path) -> dict[str, float]:
    """digest -> mean score of its responses in an evaluation's folder."""
    found: dict[str, list[float]] = {}
    for row in map(json.loads, (place / "responses.jsonl").read_text().splitlines()):
        found.setdefault(json.loads(row["answer"])["digest"], []).append(row["correct"])
    return {digest: statistics.mean(scores) for digest, scores in found.items()}


def mean(scores: dict[str, float], digests) -> str:
    return f"{statistics.mean(scores[digest] for digest in digests):.1%}" if digests else "-"


def aligned(rows: dict[str, list[str]]) -> str:
    """Rows as text, each with its name before its cells."""
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}" + "".join(f"{cell:>26}" for cell in cells) for name, cells in rows.items())


if __name__ == "__main__":
    if sys.argv[1].startswith("--heldout="):
        print(heldout(sys.argv[1].removeprefix("--heldout="), *sys.argv[2:]))
    else:
        places = list(map(pathlib.Path, sys.argv[1:]))
        print("\n\n".join([*map(table, places), table_of_seeds(places) if places[1:] else table_of_constants(*places)]))
