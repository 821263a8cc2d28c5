"""Episodes with an environment, each in one of several worker processes, under their limits."""

import contextlib
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from rpg_jax import InputError, gym
from rpg_jax.rewards.pool import Failure, Pool, file_and_name

# Our own environments, by module and class.
NAMED = {
    "calculator": ("rpg_jax.environments.calculator", "Calculator"),
    "guess": ("rpg_jax.environments.guess", "Guess"),
}
TEXTARENA = "textarena"  # textarena:NAME is the game of that name
NO_TOKENS = "returned an observation of no tokens; return None to end the episode"


class Outcome:
    """The rewards of an episode's turns, once it is over: known, or `later`'s, which is played again."""

    def __init__(self, rewards=(), failure: str | None = None, note: str | None = None, later=None):
        self._rewards, self._failure, self._note, self._later = rewards, failure, note, later

    @property
    def note(self) -> str | None:
        """What a reader should know of it."""
        return self._later().note if self._later else self._note

    @property
    def rewards(self) -> list[float]:
        """Of each turn. Raises Failure where the environment failed."""
        if self._failure is not None:
            raise Failure(self._failure)
        return self._later().rewards if self._later else list(self._rewards)

    def result(self) -> float:
        """The episode's return, the sum of its turns' rewards."""
        return sum(self.rewards)


class Environment(contextlib.ExitStack):
    """Plays episodes. `close`, or the end of a `with`, ends the workers and what they have started in their sessions.

    An episode keeps to one worker, which keeps its object. A worker that dies or hangs is replaced, the episode whose
    turn it was fails, and the others are played again from their actions, as after a resume or if memory is full.
    """

    def __init__(
        self, name: str, observations: Callable[[str, int | None], list[int]], stops=None, max_turns: int = 8,
        turn_tokens: int | None = None, workers=2, timeout_seconds=10.0, memory_mb=4096, network=False,
        max_failures=0.25, seed: int = 0,
    ):  # fmt: skip
        """Starts the workers.

        Args:
          name: of `NAMED`, textarena:NAME, or FILE.py:CLASS.
          observations: makes tokens of an observation after a turn's last token (`Observations`).
          stops: i32[states, V] of `sampling.turns.stop_table`, the strings that end a turn; None: stop tokens alone do.
          max_turns: turns of an episode at most; turn_tokens: tokens of a turn at most, None for no such limit.
          seed: of the run, of which those of episodes are made.
          workers, timeout_seconds, memory_mb, network, max_failures: as those of `rewards.Scorer`.

        Raises InputError: there is no such environment, or its class cannot be loaded or lacks a method.
        """
        super().__init__()
        self.name, self.observations, self.stops, self.seed = name, observations, stops, seed
        self.max_turns, self.turn_tokens, self.max_failures = max_turns, turn_tokens, max_failures
        self._pools = []
        limits = dict(timeout_seconds=timeout_seconds, memory_mb=memory_mb, network=network and ".py:" in name)
        try:
            for _ in range(workers):
                pool = Pool(*place(name), workers=1, kind="environment", **limits)
                self._pools.append(self.enter_context(contextlib.closing(pool)))
        except BaseException as error:
            self.close()
            if isinstance(error, Failure):
                raise InputError(f"environment {name!r} cannot be loaded in a worker: {error}") from None
            raise

    def submit(self, episode: str, problem, seed: int, actions: Sequence[str]) -> Future:
        """[observation or None, rewards] of an episode after these actions; none begins it.

        The result raises Failure where the environment raises, hangs, dies or returns something else.
        """
        ours = dict(id=problem.id, task=problem.task, prompt=problem.prompt, answer=told(problem))
        known, played = dict(episode=episode, problem=problem.columns | ours, seed=seed), tuple(actions)
        turns = [known | dict(actions=played[:count]) for count in range(len(played) + 1)]
        return self._pools[zlib.crc32(episode.encode()) % len(self._pools)].submit(turns[-1], turns[:-1])

    def try_out(self, problem) -> None:
        """Plays one turn with a problem's own answer as the action; raises InputError where that fails."""
        try:
            self.submit("try", problem, 0, []).result()
            observation, _ = self.submit("try", problem, 0, [told(problem)]).result()
            if observation is not None and self.max_turns > 1 and not self.observations(observation, None):
                raise Failure(NO_TOKENS)
        except Failure as failure:
            raise InputError(
                f"environment {self.name!r}, tried on problem {problem.id} ({problem.task}) with its answer "
                f"{told(problem)!r:.60} as the first action: {failure}"
            ) from None


def told(problem) -> str:
    """The answer of a problem as an environment gets it: of reasoning-gym, the family's own in place of our record."""
    return gym.own_answer(problem.answer) if problem.task.startswith(gym.PREFIX) else problem.answer


def place(name: str) -> tuple[str, str]:
    """(Python file or module, class) of an environment's name; raises InputError for one of no known form."""
    if name in NAMED:
        return NAMED[name]
    file, _, title = name.rpartition(":")
    if file == TEXTARENA and re.fullmatch(r"[\w.-]+", title):
        return "rpg_jax.environments.textarena_games", title
    return file_and_name("environment", name, f"{', '.join(NAMED)}, {TEXTARENA}:NAME", "FILE.py:CLASS")
