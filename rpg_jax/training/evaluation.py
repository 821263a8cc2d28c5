"""Accuracy on problems: mean@k, unbiased pass@k and maj@k of each task, with bootstrap intervals over problems."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from rpg_jax import parallel
from rpg_jax.data import Problem
from rpg_jax.parallel import multihost
from rpg_jax.rewards import voted_answer
from rpg_jax.sampling import Sampling
from rpg_jax.training.rollout import grade, respond
from rpg_jax.training.statistics import bootstrap_interval, majority_at_k, mean_at_k, pass_at_k

ALL = "all"  # the name under which every problem of every task is counted
EXAMPLES = 4  # held-out problems whose responses are logged


@dataclasses.dataclass(frozen=True)
class Answered:
    """The k responses to one problem."""

    problem: Problem
    texts: list[str]
    correct: np.ndarray  # f32[k]
    lengths: np.ndarray  # i32[k], in tokens
    finished: np.ndarray  # bool[k], ended by a stop token
    failures: list[str]  # lines that name what could not be scored


def metrics(answered: list[Answered]) -> dict:
    """`<task>/{mean,pass,maj}@k`, their 95 % `_low` and `_high`, `<task>/response_length`, `<task>/finished`.

    For each task in the order of first appearance, and for `all`.
    """
    tasks, k, found = np.array([one.problem.task for one in answered]), len(answered[0].texts), {}
    correct = np.stack([one.correct for one in answered])
    voted = majority_at_k([[voted_answer(text) for text in one.texts] for one in answered], correct)
    values = {f"mean@{k}": mean_at_k(correct), f"pass@{k}": pass_at_k(correct, k), f"maj@{k}": voted}
    plain = {
        "response_length": np.array([one.lengths.mean() for one in answered]),
        "finished": np.array([one.finished.mean() for one in answered]),
    }
    for task in [ALL, *dict.fromkeys(tasks.tolist())]:
        chosen = (tasks == task) | (task == ALL)
        for name, value in values.items():
            low, high = bootstrap_interval(value[chosen])
            key = f"{task}/{name}"
            found |= {key: float(value[chosen].mean()), f"{key}_low": low, f"{key}_high": high}
        found |= {f"{task}/{name}": float(value[chosen].mean()) for name, value in plain.items()}
    return found


def examples(answered: list[Answered]) -> list[dict]:
    """The first response to the first problem of each task, then to the second of each, `EXAMPLES` in all.

    Every evaluation of the same problems chooses the same ones. The dicts are rows of `heldout.jsonl`.
    """
    tasks = defaultdict(list)
    for one in answered:
        tasks[one.problem.task].append(one)
    ranked = sorted(((rank, one) for task in tasks.values() for rank, one in enumerate(task)), key=lambda pair: pair[0])
    return [
        dict(problem=one.problem.id, task=one.problem.task, prompt=one.problem.prompt, response=one.texts[0])
        | dict(answer=one.problem.answer, correct=float(one.correct[0]))
        for _, one in ranked[:EXAMPLES]
    ]


def make_evaluate(
    model, tokenizer, scorer, mesh, *, k, rows, temperature, max_prompt, max_new, slots, key, top_k=0, top_p=1.0
) -> Callable:
    """Builds `evaluate(params, problems, should_stop=None)`, an iterator over `Answered`s, `rows` problems at a time.

    Noise depends on `key`, problem and sample alone: evaluations of one run share it, and one that was interrupted
    goes on with the problems that are left as if it had not been. When asked to stop, it ends after a whole problem.
    Processes divide the problems among them, and each yields all of the answers.
    """
    sampling = Sampling.make(temperature=temperature, top_k=top_k, top_p=top_p, stop_ids=tokenizer.stop_ids)

    def evaluate(params, problems, should_stop=None):
        for start in range(0, len(problems), rows):
            some = [problems[i] for i in range(start, min(start + rows, len(problems)))]
            held = multihost.row_indices(mesh, rows)
            mine = held[held < len(some)]
            own = [some[min(row, len(some) - 1)] for row in held]
            rollout, texts = respond(
                model, params, tokenizer, mesh, own, samples=k, max_prompt=max_prompt, max_new=max_new, run=len(mine),
                key=key, step=0, sampling=sampling, slots=slots, should_stop=should_stop,
            )  # fmt: skip
            if should_stop is not None and should_stop():
                return
            lengths = parallel.local_rows(rollout.response_mask).sum(-1).reshape(-1, k)
            finished = parallel.local_rows(rollout.finished).reshape(-1, k)
            verdicts = grade(scorer, own[: len(mine)], texts)
            told = zip(texts, *verdicts, lengths.tolist(), finished.tolist(), strict=False)
            for problem, one in zip(some, multihost.gather_rows(mine, told), strict=True):
                texts, correct, lines, lengths, finished = one
                yield Answered(
                    problem,
                    texts,
                    np.array(correct, np.float32),
                    np.array(lengths, np.int32),
                    np.array(finished),
                    lines,
                )

    return evaluate
