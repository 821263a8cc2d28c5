"""TextArena's games for one player (package textarena), by their names: `textarena:GuessTheNumber-v0`.

The first observation is the rules of the game, and the return what it rewards. Games draw from Python's global random
numbers: an episode has its own, which are put in place while it plays. A column `seed` of a problem's row stands in
place of the episode's seed, so that all responses to the problem play the same game.
"""

import contextlib
import random


class Game:
    """One episode of the game `name`."""

    name = ""

    def __init__(self, problem, seed):
        import textarena

        # Without the wrappers, which would repeat at every turn what has been said before.
        self.game = textarena.make(f"{self.name}-raw")
        self.numbers = random.Random(problem.get("seed", seed)).getstate()

    def reset(self):
        with self.own_numbers():
            self.game.reset(num_players=1, seed=random.getrandbits(32))
        return self.said()

    def step(self, action):
        with self.own_numbers():
            done, _ = self.game.step(action)
        if not done:
            return self.said(), 0.0
        rewards, _ = self.game.close()
        return None, float(rewards[0])

    def said(self):
        """What the game has said since the last time."""
        import textarena

        _, messages = self.game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind != own) or "Go on."

    @contextlib.contextmanager
    def own_numbers(self):
        """Python's random numbers are the episode's."""
        before = random.getstate()
        random.setstate(self.numbers)
        try:
            yield
        finally:
            self.numbers = random.getstate()
            random.setstate(before)


def __getattr__(name):
    """The class of a game's name. Raises LookupError for one that TextArena does not have."""
    if name.startswith("__"):
        raise AttributeError(name)
    import textarena.envs

    games = textarena.envs.registration.ENV_REGISTRY
    if f"{name}-raw" not in games:
        raise LookupError(f"TextArena has no game {name!r}; names look like GuessTheNumber-v0")
    return type(name, (Game,), {"name": name})
