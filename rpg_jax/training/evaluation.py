"""Held-out accuracy: mean@k and unbiased pass@k of each task, with bootstrap intervals over problems."""

import dataclasses
from collections.abc import Callable

import numpy as np

from rpg_jax.sampling import Sampling
from rpg_jax.training.rollout import grade, respond
from rpg_jax.training.statistics import bootstrap_interval, mean_at_k, pass_at_k

ALL = "all"  # the name under which every problem of every task is counted


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Per problem, in the given order: how many of its k responses were right, and the texts."""

    problems: list
    correct: np.ndarray  # f32[P, k]
    texts: list  # [P][k]
    tokens: int

    def metrics(self) -> dict:
        """`<task>/mean@k`, `<task>/pass@k` and their 95 % `_low` and `_high`, for each task and for `all`."""
        tasks, k, found = np.array([p.task for p in self.problems]), self.correct.shape[1], {}
        for task in [ALL, *dict.fromkeys(tasks.tolist())]:
            chosen = self.correct[tasks == task] if task != ALL else self.correct
            for name, values in ((f"mean@{k}", mean_at_k(chosen)), (f"pass@{k}", pass_at_k(chosen, k))):
                low, high = bootstrap_interval(values)
                key = f"{task}/{name}"
                found |= {key: float(values.mean()), f"{key}_low": float(low), f"{key}_high": float(high)}
        return found


def make_evaluate(
    model,
    tokenizer,
    scorer,
    mesh,
    problems,
    *,
    k,
    rows,
    temperature,
    max_prompt,
    max_new,
    slots,
    key,
    top_k=0,
    top_p=1.0,
) -> Callable:
    """Builds `evaluate(params, on_batch=None, should_stop=None) -> Evaluation`, `rows` problems at a time.

    Noise depends on `key`, problem and sample alone, so that evaluations of one run share it. `on_batch(done)` is
    called with the number of problems done.
    """
    sampling = Sampling.make(temperature=temperature, top_k=top_k, top_p=top_p, stop_ids=tokenizer.stop_ids)

    def evaluate(params, on_batch=None, should_stop=None):
        correct, texts, tokens = [], [], 0
        for start in range(0, len(problems), rows):
            some = problems[start : start + rows]
            rollout, responses = respond(
                model, params, tokenizer, mesh, some, samples=k, max_prompt=max_prompt, max_new=max_new, rows=rows,
                key=key, step=0, sampling=sampling, slots=slots, should_stop=should_stop,
            )  # fmt: skip
            correct.append(grade(scorer, some, responses)[0])
            texts += responses
            tokens += int(np.asarray(rollout.response_mask).sum())
            if on_batch:
                on_batch(start + len(some))
        return Evaluation(problems, np.concatenate(correct), texts, tokens)

    return evaluate
