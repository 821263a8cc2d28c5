"""Grading responses: a text goes to the scorer once it is complete, while others are still being drawn."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rpg_jax import InputError
from rpg_jax.data import Problem, Tokenizer
from rpg_jax.environments import Outcome
from rpg_jax.parallel import multihost
from rpg_jax.rewards import ENVIRONMENT, Scorer, Scores, Submitted, overlong_penalty, weighted_sum
from rpg_jax.rewards.pool import Failure
from rpg_jax.rewards.scorer import ONE
from rpg_jax.sampling.generate import Watch
from rpg_jax.sampling.turns import Row, spans
from rpg_jax.training.episodes import Episodes
from rpg_jax.training.settings import RolloutSettings

EXAMPLES = 3  # responses of a step that are logged


class Response(NamedTuple):
    """A complete response that is being scored."""

    problem: Problem
    text: str
    length: int  # in tokens that the policy drew
    verdict: Submitted | InputError
    turns: list[dict[str, str]] | None = None  # of an episode: the action and the observation after it
    outcome: Outcome | None = None  # of an episode

    @property
    def turn_rewards(self) -> list[float] | None:
        """Of each turn of an episode; None where its environment failed."""
        try:
            return [] if self.outcome is None else self.outcome.rewards
        except Failure:
            return None

    @property
    def rewarded_turns(self) -> list[dict] | None:
        """`turns` with the reward of each action; waits for the episode."""
        rewards = iter(self.turn_rewards or ())
        scored = [turn | (dict(reward=next(rewards, None)) if "action" in turn else {}) for turn in self.turns or ()]
        return None if self.turns is None else scored


class Graded(NamedTuple):
    """P groups of G responses that were scored; `responses` are this process's share only."""

    rows: np.ndarray  # i64[N], which of the P are this process's
    responses: list[Sequence[Response]]  # [N][G]
    correct: np.ndarray  # f32[P, G], accuracy
    rewards: dict[str, np.ndarray]  # f32[P, G] of each named reward, before scale and weight
    unpunished: np.ndarray  # f32[P, G], their weighted sum
    reward: np.ndarray  # f32[P, G], that with the overlong punishment
    failed: np.ndarray  # bool[P, G], episodes that are left out of training
    failures: list[str]  # one line for each response that could not be scored
    notes: list[str]  # one line for what else there is to know of an episode
    environment_failures: int  # episodes whose environment failed
    turn_reward: np.ndarray | None  # f32[P, G, K], weighted rewards of an episode's turns; 0 beyond the last

    @property
    def scores(self) -> dict[str, np.ndarray]:
        """f32[P, G] of each name under which they are logged."""
        named = {f"reward/{name}": values for name, values in self.rewards.items()}
        return dict(correct=self.correct, reward=self.reward) | named


def watcher(
    scorer: Scorer, tokenizer: Tokenizer, problems: Sequence[Problem], positions: Sequence[int], runs: np.ndarray,
    samples: int, begun: dict[tuple[int, int], Response], rewards: bool = True, episodes: Episodes | None = None,
) -> Watch:  # fmt: skip
    """The `watch` of `generate` that gives each complete response to the scorer.

    `problems`, `positions` and `runs` (bool[N], false for padding) are those of this process's N groups. Responses are
    added to `begun` by position and number; those that are in it are not scored again. With `rewards` false they are
    scored for their accuracy alone. `episodes` are those of a conversation.
    """

    def watch(rows: Sequence[Row]) -> None:
        for row in rows:
            group, sample = divmod(row.number, samples)
            if not runs[group] or (positions[group], sample) in begun:
                continue
            text, length = tokenizer.decode(row.tokens[row.prompt :]), sum(row.drawn)
            outcomes = [] if episodes is None else [episodes.outcome(row)]
            turns = None if episodes is None else turns_of(row, tokenizer)
            verdict: Submitted | InputError
            try:
                verdict = scorer.submit([(problems[group], text)], [length], rewards, outcomes)
            except InputError as error:  # raised in `verdicts`: here, other processes would wait for this one
                verdict = error
            begun[positions[group], sample] = Response(problems[group], text, length, verdict, turns, *outcomes)

    return watch


def turns_of(row: Row, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """The turns of an episode, for the log: each action with the observation after it, and an opening one first."""
    cuts = [row.prompt, *(cut for span in spans(row.drawn) for cut in span), len(row.tokens)]
    opening, *rest = (tokenizer.decode(row.tokens[begin:end]) for begin, end in zip(cuts, cuts[1:], strict=False))
    turns = [dict(action=action, observation=said) for action, said in zip(rest[::2], rest[1::2], strict=True)]
    return [dict(observation=opening), *turns] if opening else turns


def verdicts(scorer: Scorer, groups: Sequence[Sequence[Response]], rewards: bool = True) -> list[tuple]:
    """Waits for this process's N groups of G responses. An error on one process is raised on all of them.

    For each group its accuracies [G], its named rewards [G] (none if `rewards` is false), its lengths [G], the rewards
    of its episodes' turns [G] (None where one failed), and, with the first, what could not be scored: lines, notes, and
    the number of episodes whose environment failed.
    """
    with multihost.together():
        begun = [response.verdict for group in groups for response in group]
        for failure in begun:
            if isinstance(failure, InputError):
                raise failure
        scores: Scores = functools.reduce(operator.add, begun, scorer.submit([], [], rewards)).result()
    shape = len(groups), len(groups[0] if groups else ())
    named = {name: values.reshape(shape).tolist() for name, values in scores.rewards.items()}
    return [
        (correct, {name: values[row] for name, values in named.items()}, [r.length for r in groups[row]],
         [r.turn_rewards for r in groups[row]],
         ([], [], 0) if row else (scores.failures, scores.notes, scores.environment_failures))
        for row, correct in enumerate(scores.correct.reshape(shape).tolist())
    ]  # fmt: skip


def make_grade(
    scorer: Scorer, settings: RolloutSettings, scale: Callable[[np.ndarray], np.ndarray], weights: Mapping[str, float]
) -> Callable[[np.ndarray, Sequence[Sequence[Response]]], Graded]:
    """Builds `grade(rows, groups)`, to which each process gives its share of P groups, and which of them they are.

    `scale` turns scores in 0..1 into rewards (`rewards.shaping.SCALES`), whose sum has the `weights`, and the overlong
    punishment is added to it. An episode that is left out of training has the mean reward of its group's others.
    """

    def grade(rows: np.ndarray, groups: Sequence[Sequence[Response]]) -> Graded:
        # From here on every process knows all verdicts, and so decides as the others do.
        known = multihost.gather_rows(rows, verdicts(scorer, groups))
        accuracies, named, counts, of_turns, said = zip(*known, strict=True)
        failed = np.array([[values is None for values in group] for group in of_turns])
        left_out = failed & (settings.environment_failures == "mask")
        correct, lengths = np.array(accuracies, np.float32), np.array(counts, np.int32)  # [P, G]
        rewards = {name: np.array([row[name] for row in named], np.float32) for name in named[0]}
        unpunished = reward = weighted_sum(rewards or {ONE: correct}, weights, scale, unscaled=[ENVIRONMENT])
        turn_reward = None
        if scorer.environment is not None:
            turn_reward = np.zeros((*correct.shape, scorer.environment.max_turns), np.float32)
            for group, responses in enumerate(of_turns):
                for sample, values in enumerate(responses):
                    turn_reward[group, sample, : len(values or ())] = values or ()
            turn_reward *= weights.get(ENVIRONMENT, 1.0)
        if settings.overlong_buffer:
            penalty = overlong_penalty(lengths, settings.max_new, settings.overlong_buffer, settings.overlong_factor)
            reward = reward + penalty
        if left_out.any():
            unpunished, reward = without(unpunished, left_out), without(reward, left_out)
        failures, notes, broken = zip(*said, strict=True)
        return Graded(
            rows, list(groups), correct, rewards, unpunished, reward, left_out, sum(failures, []), sum(notes, []),
            sum(broken), turn_reward,
        )  # fmt: skip

    return grade


def without(reward: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Rewards f32[P, G], with the mean of a group's others for those that failed, so that its mean is theirs."""
    count = np.sum(~failed, axis=1, keepdims=True)
    mean = np.sum(np.where(failed, 0, reward), axis=1, keepdims=True, dtype=np.float64) / np.maximum(count, 1)
    return np.where(failed, mean, reward).astype(np.float32)


def logged(settings: RolloutSettings, seen: list[Graded]) -> tuple[dict[str, float], list[dict], list[str]]:
    """The metrics, examples and failures of a step in which these groups were graded."""
    means = {name: float(np.concatenate([b.scores[name] for b in seen]).mean()) for name in seen[0].scores}
    unpunished = np.concatenate([batch.unpunished for batch in seen])
    failures = [f"{line}; it scores 0" for batch in seen for line in batch.failures]
    failures += [line for batch in seen for line in batch.notes]
    of_environment = sum(batch.environment_failures for batch in seen)
    metrics = {
        "accuracy": means.pop("correct"),
        **means,
        "kept_fraction": float(settings.usable(unpunished).mean()),
        "generation_batches": len(seen),
        "reward_failures": sum(len(batch.failures) for batch in seen) - of_environment,
    }
    if seen[0].turn_reward is not None:
        metrics["environment_failures"] = of_environment
    return metrics, examples(seen[0]), failures


def examples(batch: Graded) -> list[dict]:
    """The first response to each of this process's first few problems, for the log."""
    firsts = [group[0] for group in batch.responses[:EXAMPLES]]
    return [
        dict(problem=first.problem.id, task=first.problem.task, prompt=first.problem.prompt)
        | dict(response=first.text, answer=first.problem.answer)
        | ({} if first.turns is None else dict(turns=first.rewarded_turns))
        | {name: float(values[row, 0]) for name, values in batch.scores.items()}
        for row, first in zip(batch.rows.tolist(), firsts, strict=False)
    ]
