"""Episodes: the rows of a rollout whose turns an environment answers (`sampling.turns.Conversation`).

Everything that an episode needs is in its row, the problem and the seed: after a resume its actions are read off the
tokens, and its environment plays them again.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from rpg_jax.data import Problem, Tokenizer
from rpg_jax.environments import Environment, Outcome
from rpg_jax.environments.environment import NO_TOKENS
from rpg_jax.rewards.pool import Failure
from rpg_jax.sampling.turns import Answer, Row, matched, spans


@dataclasses.dataclass
class Episode:
    """An episode under way."""

    problem: Problem
    name: str  # the workers' name of it
    seed: int  # of the environment, the same after a resume
    row: Row  # as it was when the episode was last told of it
    actions: list[str]  # of the turns that are over
    begin: int = 0  # column at which the coming turn begins, or the one under way
    asked: Future | None = None  # [observation or None, rewards]


class Episodes:
    """The conversations of this process's rows in one call of `generate`."""

    def __init__(
        self, environment: Environment, tokenizer: Tokenizer, problems: Sequence[Problem],
        names: Sequence[tuple[int, ...]], *, samples: int, max_new: int,
    ):  # fmt: skip
        """`problems` and `names` are those of this process's groups: what tells a group from every other one, such as
        the step and the position."""
        self.stops, self.waited = environment.stops, 0.0  # seconds that decoding waited for environments
        self._environment, self._text = environment, tokenizer.decode
        self._problems, self._names = problems, names
        self._samples, self._max_new = samples, max_new
        self._episodes = dict[int, Episode]()  # by row
        self._outcomes = dict[int, Outcome]()
        self._ready = list[Answer]()

    def __call__(self, rows: Sequence[Row], seconds: float | None) -> list[Answer]:
        for row in rows:
            if episode := self._episodes.get(row.number):
                episode.row = row
                episode.actions.append(self._text(row.tokens[episode.begin :]))
                self._ask(episode)
            else:
                self._begins(row)
        begin, futures = time.monotonic(), [e.asked for e in self._episodes.values() if e.asked]
        concurrent.futures.wait(futures, seconds)
        self.waited += time.monotonic() - begin
        answers, self._ready = self._ready, []
        for episode in self._episodes.values():
            if episode.asked and episode.asked.done():
                answers.append(self._answer(episode))
                episode.asked = None
        return answers

    def outcome(self, row: Row) -> Outcome:
        """Of an episode that is over; one that was before this call of `generate` is played again."""
        if row.number not in self._outcomes:
            episode = self._of(row, spans(row.drawn))
            self._ask(episode)
            self._outcomes[row.number] = Outcome(later=functools.cache(lambda: self._decided(episode)[0]))
        return self._outcomes[row.number]

    def _of(self, row: Row, turns: Sequence[tuple[int, int]]) -> Episode:
        """The episode of a row of which these turns are over."""
        group, sample = divmod(row.number, self._samples)
        name = *self._names[group], sample
        seed = int(np.random.SeedSequence([self._environment.seed, *name]).generate_state(1)[0])
        actions = [self._text(row.tokens[begin:end]) for begin, end in turns]
        return Episode(self._problems[group], "-".join(map(str, name)), seed, row, actions)

    def _ask(self, episode: Episode) -> None:
        episode.asked = self._environment.submit(episode.name, episode.problem, episode.seed, episode.actions)

    def _begins(self, row: Row) -> None:
        """A row that this call has not seen: it begins, or goes on where an earlier call left it."""
        turns, length = spans(row.drawn), len(row.tokens)
        under_way = bool(turns) and turns[-1][1] == length
        episode = self._episodes[row.number] = self._of(row, turns[:-1] if under_way else turns)
        if length == row.prompt:
            return self._ask(episode)
        episode.begin = turns[-1][0] if under_way else length
        state = 0 if self.stops is None else matched(self.stops, row.tokens[episode.begin :])
        self._ready.append(self._goes_on(episode, matched=state))

    def _goes_on(self, episode: Episode, observation: Sequence[int] = (), matched: int = 0) -> Answer:
        limit = self._max_new
        if self._environment.turn_tokens is not None:
            limit = min(limit, episode.begin - episode.row.prompt + self._environment.turn_tokens)
        return Answer(episode.row.number, observation, limit, matched)

    def _answer(self, episode: Episode) -> Answer:
        """How a row goes on after what its environment has answered."""
        outcome, finished, ids = self._decided(episode)
        if ids is None:
            self._outcomes[episode.row.number] = outcome
            return Answer(episode.row.number, ended=True, finished=finished)
        return self._goes_on(episode, ids)

    def _decided(self, episode: Episode) -> tuple[Outcome, bool, list[int] | None]:
        """What an episode comes to, whether its environment has ended it, and the observation if it goes on."""
        assert episode.asked is not None
        try:
            observation, rewards = episode.asked.result()
        except Failure as failure:
            return Outcome(failure=str(failure)), False, None
        tokens, left = episode.row.tokens, episode.row.prompt + self._max_new - len(episode.row.tokens)
        if observation is None and episode.actions:
            return Outcome(rewards), True, None
        if len(episode.actions) >= self._environment.max_turns or left < 1:
            return Outcome(rewards), False, None
        ids, last = list[int](), tokens[-1] if episode.actions else None
        if observation is not None:
            ids = self._environment.observations(observation, last)
        if observation is not None and not ids and episode.actions:  # an opening of no tokens is none
            return Outcome(failure=NO_TOKENS), False, None
        if len(ids) >= left:
            room = f"an observation of {len(ids)} tokens leaves none of rollout.max_new={self._max_new} to the policy"
            return Outcome(rewards, note=f"{room}; the episode ends there"), False, None
        episode.begin = len(tokens) + len(ids)
        return Outcome(rewards), False, ids
