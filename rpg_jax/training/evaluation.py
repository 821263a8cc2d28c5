"""Accuracy on problems: mean@k, unbiased pass@k and maj@k of each task, with bootstrap intervals over problems."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from rpg_jax import parallel
from rpg_jax.data import Problem, Tokenizer
from rpg_jax.models import Model
from rpg_jax.parallel import multihost
from rpg_jax.rewards import Scorer
from rpg_jax.sampling import Decoding, Sampling, generate
from rpg_jax.training.collect import limits_of, prompts_of
from rpg_jax.training.episodes import Episodes
from rpg_jax.training.grading import Response, verdicts, watcher

ALL = "all"  # the name of all tasks together
EXAMPLES = 4  # held-out problems whose responses are logged
EVALUATED = 2**31  # in place of an RL step in the seed of an environment


@dataclasses.dataclass(frozen=True)
class Answered:
    """The k responses to one problem."""

    problem: Problem
    texts: list[str]
    correct: np.ndarray  # f32[k]
    lengths: np.ndarray  # i32[k], in tokens
    finished: np.ndarray  # bool[k], ended by a stop token
    failures: list[str]  # one line for each response that could not be scored, or whose episode is to be told of
    turns: list[list[dict] | None]  # [k], of an episode: its actions, observations and rewards


def majority_at_k(answers: Sequence[Sequence[str | None]], correct: ArrayLike) -> np.ndarray:
    """The chance that a majority vote over a problem's k responses is right: f64[P] (Wang et al., arXiv 2203.11171).

    Equal answers vote together; the most common one wins and a tie is drawn by lot. An answer is as right as its
    responses are on average.

    Args:
      answers: [P][k], the normalized final answer of each response; None has no vote.
      correct: bool or float [P, k], scores in 0..1.
    """
    chances = []
    for row, scores in zip(answers, np.asarray(correct, np.float64), strict=True):
        votes = Counter(answer for answer in row if answer is not None)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        means = [np.mean([score for vote, score in zip(row, scores, strict=True) if vote == x]) for x in winners]
        chances.append(float(np.mean(means)) if means else 0.0)
    return np.array(chances)


def bootstrap_interval(
    values: ArrayLike, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """A percentile bootstrap interval of the mean of `values` f[P]: problems are redrawn, not responses."""
    values = np.asarray(values, np.float64)
    random = np.random.default_rng(seed)
    means = values[random.integers(values.size, size=(resamples, values.size))].mean(axis=1)
    low, high = np.quantile(means, [(1.0 - level) / 2, (1.0 + level) / 2])
    return float(low), float(high)


def metrics(answered: list[Answered], vote: Callable[[Problem, str], str | None]) -> dict[str, float]:
    """`<task>/{mean,pass,maj}@k`, their 95 % `_low` and `_high`, `<task>/response_length`, `<task>/finished`.

    For each task in the order of first appearance, and for `all`. mean@k is the mean score, partial credit included;
    pass@k asks for full credit; maj@k is the score of the answer that most responses vote for.

    Args:
      vote: the answer of a response to a problem, or None; that of the scorer (`Scorer.vote`).
    """
    tasks, k = np.array([answer.problem.task for answer in answered]), len(answered[0].texts)
    correct = np.stack([answer.correct for answer in answered])  # [P, k]
    voted = majority_at_k([[vote(answer.problem, text) for text in answer.texts] for answer in answered], correct)
    row: dict[str, float] = {}
    passed = (correct == 1.0).any(axis=1).astype(np.float64)  # of n = k responses that is the unbiased estimate
    values = {f"mean@{k}": correct.mean(axis=1, dtype=np.float64), f"pass@{k}": passed, f"maj@{k}": voted}
    plain = {
        "response_length": np.array([answer.lengths.mean() for answer in answered]),
        "finished": np.array([answer.finished.mean() for answer in answered]),
    }
    for task in [ALL, *dict.fromkeys(tasks.tolist())]:
        chosen = (tasks == task) | (task == ALL)
        for name, value in values.items():
            low, high = bootstrap_interval(value[chosen])
            key = f"{task}/{name}"
            row |= {key: float(value[chosen].mean()), f"{key}_low": low, f"{key}_high": high}
        row |= {f"{task}/{name}": float(value[chosen].mean()) for name, value in plain.items()}
    return row


def examples(answered: list[Answered], vote: Callable[[Problem, str], str | None]) -> list[dict]:
    """The first response to the first problem of each task, then to the second of each, `EXAMPLES` in all.

    Every evaluation of the same problems chooses the same ones. The dicts are rows of `heldout.jsonl`.
    """
    tasks: dict[str, list[Answered]] = defaultdict(list)
    for answer in answered:
        tasks[answer.problem.task].append(answer)
    ranked = [(rank, answer) for task in tasks.values() for rank, answer in enumerate(task)]
    chosen = sorted(ranked, key=lambda pair: pair[0])[:EXAMPLES]
    return [
        dict(problem=answer.problem.id, task=answer.problem.task, prompt=answer.problem.prompt)
        | dict(response=answer.texts[0], vote=vote(answer.problem, answer.texts[0]))
        | dict(answer=answer.problem.answer, correct=float(answer.correct[0]))
        | ({} if answer.turns[0] is None else dict(turns=answer.turns[0]))
        for _, answer in chosen
    ]


def problems_of(mesh: Mesh, responses: int, k: int) -> int:
    """The problems to answer at a time, so that k responses to each are so many in all, and at least one on each data
    shard. With the responses of a generation batch they fill its slots, and run the program of rollouts."""
    shards = parallel.row_shards(mesh)
    return max(responses // (k * shards), 1) * shards


def make_evaluate(
    model: Model, tokenizer: Tokenizer, scorer: Scorer, mesh: Mesh, *,
    k: int, rows: int, temperature: float, max_prompt: int, max_new: int, decoding: Decoding,
    key: jax.Array, top_k: int = 0, top_p: float = 1.0, routes: int = 0,
) -> Callable[..., Iterator[Answered]]:  # fmt: skip
    """Builds `evaluate(params, problems, should_stop=…, positions=None, progress=None)`, which yields the answers to
    problems in order, of which k are sampled to each of `rows` at a time (`problems_of`).

    Noise depends on `key`, on the problem's position in the set and on the response's number alone: evaluations of one
    run share it, and an interrupted one may go on with the problems that are left, to the same result, if given their
    `positions` (their own order if None). When asked to stop, it ends after a whole problem. Processes divide the
    problems among themselves, and each yields all of the answers. `progress` is called about once a second with the
    number of responses that are complete, over all processes as this one's share tells, and after every batch.
    """
    sampling = Sampling.make(temperature=temperature, top_k=top_k, top_p=top_p, stop_ids=tokenizer.stop_ids)
    sizes: dict[str, Any] = dict(samples=k, max_new=max_new)

    def evaluate(params, problems, should_stop=lambda: False, positions=None, progress=None):
        def tell(watch, begun, before, count, mine, complete):
            """Scores; says how many responses of all processes are there, as this one's of `count` problems tell."""
            watch(complete)
            if len(begun) < k * mine:  # else it is said after the batch
                progress(before + round(len(begun) * count / mine))

        positions = range(len(problems)) if positions is None else positions
        for start in range(0, len(problems), rows):
            batch = [problems[i] for i in range(start, min(start + rows, len(problems)))]
            held = multihost.row_indices(mesh, rows)  # of this process, those that pad the last batch included
            runs = held < len(batch)
            mine = held[runs]
            padded = [min(row, len(batch) - 1) for row in held]
            own, places = [batch[row] for row in padded], [positions[start + row] for row in padded]
            sequences = prompts_of(mesh, tokenizer, own, places, max_prompt=max_prompt, routes=routes, **sizes)
            begun: dict[tuple[int, int], Response] = {}
            names = [(EVALUATED, place) for place in places]
            episodes = scorer.environment and Episodes(scorer.environment, tokenizer, own, names, **sizes)
            watch = watcher(scorer, tokenizer, own, places, runs, k, begun, False, episodes)
            drawn = generate(
                model, params, sequences, key=key, step=np.zeros(rows, np.int32), decoding=decoding, sampling=sampling,
                limits=limits_of(mesh, runs, max_new), should_stop=should_stop, conversation=episodes,
                watch=partial(tell, watch, begun, k * start, len(batch), len(mine)) if progress else watch, **sizes,
            )  # fmt: skip
            if should_stop():
                return
            groups = [[begun[place, sample] for sample in range(k)] for place in places[: len(mine)]]
            said = verdicts(scorer, groups, rewards=False)
            texts = [[response.text for response in group] for group in groups]
            turns = [[response.rewarded_turns for response in group] for group in groups]
            finished = parallel.local_rows(drawn.finished).reshape(-1, k).tolist()
            answers = zip(texts, said, turns, finished, strict=False)
            for problem, answer in zip(batch, multihost.gather_rows(mine, answers), strict=True):
                texts, (correct, _, lengths, _, (failures, notes, _)), turns, finished = answer
                lines = [*(f"{line}; it scores 0" for line in failures), *notes]
                arrays = np.array(correct, np.float32), np.array(lengths, np.int32), np.array(finished)
                yield Answered(problem, texts, *arrays, lines, turns)
            if progress is not None:
                progress(k * (start + len(batch)))

    return evaluate
