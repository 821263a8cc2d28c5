"""Grading responses: a text goes to the scorer once it is complete, while others are still being drawn."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rpg_jax import InputError, parallel
from rpg_jax.data import Problem, Tokenizer
from rpg_jax.parallel import multihost
from rpg_jax.rewards import Scorer, Scores, Submitted, overlong_penalty, weighted_sum
from rpg_jax.sampling.generate import Watch
from rpg_jax.training.settings import RolloutSettings
from rpg_jax.types import Sequences

EXAMPLES = 3  # responses of a step that are logged


class Response(NamedTuple):
    """A complete response that is being scored."""

    problem: Problem
    text: str
    length: int  # in tokens
    verdict: Submitted | InputError


class Graded(NamedTuple):
    """P groups of G responses that were scored; problems and texts are this process's share only."""

    rows: np.ndarray  # i64[N], which of the P are this process's
    problems: list[Problem]  # [N]
    texts: list[list[str]]  # [N][G]
    correct: np.ndarray  # f32[P, G], accuracy
    rewards: dict[str, np.ndarray]  # f32[P, G] of each named reward, before scale and weight
    unpunished: np.ndarray  # f32[P, G], their weighted sum
    reward: np.ndarray  # f32[P, G], that with the overlong punishment
    lengths: np.ndarray  # i32[P, G], in tokens
    failures: list[str]  # one line for each response that could not be scored


def watcher(
    scorer: Scorer, tokenizer: Tokenizer, problems: Sequence[Problem], positions: Sequence[int], runs: np.ndarray,
    sequences: Sequences, samples: int, begun: dict[tuple[int, int], Response], rewards: bool = True,
) -> Watch:  # fmt: skip
    """The `watch` of `generate` that gives each complete response to the scorer.

    `problems`, `positions` and `runs` (bool[N], false for padding) are those of this process's N groups in `sequences`.
    Responses are added to `begun` by position and sample; those that are in it are not scored again. With `rewards`
    false they are scored for their accuracy alone.
    """
    prompt_length = parallel.local_rows(sequences.prompt_length)

    def watch(rows: np.ndarray, tokens: list[list[int]]) -> None:
        for row, ids in zip(rows.tolist(), tokens, strict=True):
            group, sample = divmod(row, samples)
            if not runs[group] or (positions[group], sample) in begun:
                continue
            ids = ids[prompt_length[row] :]
            text = tokenizer.decode(ids)
            verdict: Submitted | InputError
            try:
                verdict = scorer.submit([(problems[group], text)], [len(ids)], rewards)
            except InputError as error:  # raised in `verdicts`: here, other processes would wait for this one
                verdict = error
            begun[positions[group], sample] = Response(problems[group], text, len(ids), verdict)

    return watch


def verdicts(scorer: Scorer, groups: Sequence[Sequence[Response]], rewards: bool = True) -> list[tuple]:
    """Waits for this process's N groups of G responses. An error on one process is raised on all of them.

    For each group its accuracies [G], its named rewards [G] (none if `rewards` is false), its lengths [G], and lines
    that name what could not be scored.
    """
    with multihost.together():
        begun = [response.verdict for group in groups for response in group]
        for failure in begun:
            if isinstance(failure, InputError):
                raise failure
        scores: Scores = functools.reduce(operator.add, begun, scorer.submit([], [], rewards)).result()
    shape = len(groups), -1
    named = {name: values.reshape(shape).tolist() for name, values in scores.rewards.items()} if groups else {}
    return [
        (correct, {name: values[row] for name, values in named.items()}, [r.length for r in groups[row]],
         [] if row else scores.failures)
        for row, correct in enumerate(scores.correct.reshape(shape).tolist() if groups else [])
    ]  # fmt: skip


def make_grade(
    scorer: Scorer, settings: RolloutSettings, scale: Callable[[np.ndarray], np.ndarray], weights: Mapping[str, float]
) -> Callable[[np.ndarray, Sequence[Sequence[Response]]], Graded]:
    """Builds `grade(rows, groups)`, to which each process gives its share of P groups, and which of them they are.

    `scale` turns scores in 0..1 into rewards (`rewards.shaping.SCALES`), whose sum has the `weights`, and the overlong
    punishment is added to it.
    """

    def grade(rows: np.ndarray, groups: Sequence[Sequence[Response]]) -> Graded:
        # From here on every process knows all verdicts, and so decides as the others do.
        known = multihost.gather_rows(rows, verdicts(scorer, groups))
        accuracies, named, counts, lines = zip(*known, strict=True)
        correct, lengths = np.array(accuracies, np.float32), np.array(counts, np.int32)  # [P, G]
        rewards = {name: np.array([row[name] for row in named], np.float32) for name in named[0]}
        unpunished = reward = weighted_sum(rewards or dict(one=correct), weights, scale)
        if settings.overlong_buffer:
            penalty = overlong_penalty(lengths, settings.max_new, settings.overlong_buffer, settings.overlong_factor)
            reward = reward + penalty
        problems, texts = [group[0].problem for group in groups], [[r.text for r in group] for group in groups]
        return Graded(rows, problems, texts, correct, rewards, unpunished, reward, lengths, sum(lines, []))

    return grade


def logged(settings: RolloutSettings, seen: list[Graded]) -> tuple[dict[str, float], list[dict], list[str]]:
    """The metrics, examples and failures of a step in which these groups were graded."""
    correct, unpunished, reward = (
        np.concatenate([getattr(batch, name) for batch in seen]) for name in ("correct", "unpunished", "reward")
    )
    rewards = {name: [batch.rewards[name] for batch in seen] for name in seen[0].rewards}
    failures = [line for batch in seen for line in batch.failures]
    metrics = {
        "accuracy": float(correct.mean()),
        "reward": float(reward.mean()),
        **{f"reward/{name}": float(np.concatenate(values).mean()) for name, values in rewards.items()},
        "kept_fraction": float(settings.usable(unpunished).mean()),
        "generation_batches": len(seen),
        "reward_failures": len(failures),
    }
    return metrics, examples(seen[0]), failures


def examples(batch: Graded) -> list[dict]:
    """The first response to each of this process's first few problems, for the log."""
    rows = zip(batch.rows.tolist(), batch.problems[:EXAMPLES], batch.texts, strict=False)
    return [
        dict(problem=p.id, task=p.task, prompt=p.prompt, response=text[0], answer=p.answer)
        | dict(correct=float(batch.correct[row, 0]), reward=float(batch.reward[row, 0]))
        | {f"reward/{name}": float(values[row, 0]) for name, values in batch.rewards.items()}
        for row, p, text in rows
    ]
