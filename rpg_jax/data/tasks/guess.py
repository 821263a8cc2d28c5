"""Guess: find a number by asking whether it is higher or lower. A conversation, for `environments.guess`.

    kqz 3-14
    9
      lower
    5

Three letters make problems distinct, as the number is drawn by the environment. The worked solution guesses at random
and listens to the answers now and then, which is enough for RL to find out what they are good for.
"""

import json
import string

from rpg_jax import InputError

TURN = "\x1e"  # stands before and after an observation in a worked solution


def generate(rng, *, highest=12, fewest=12, most=12, turns=5, listens=30):
    """One problem: a range of `fewest` to `most` numbers up to `highest`; the solution has at most so many turns.

    `listens` percent of its guesses are among the numbers that the answers have left, the others anywhere.
    Raises ValueError unless 1 <= fewest <= most <= highest and turns >= 1.
    """
    if not 1 <= fewest <= most <= highest or not turns:
        raise InputError(
            f"task 'guess': {fewest=}, {most=} and {highest=} must satisfy 1 <= fewest <= most <= highest, and "
            f"{turns=} be at least 1"
        )
    low = int(rng.integers(1, highest - fewest + 2))
    high = low + int(rng.integers(fewest, min(most, highest - low + 1) + 1)) - 1
    number, said, left = int(rng.integers(low, high + 1)), [], [low, high]
    for _ in range(turns):
        first, last = left if rng.random() < listens / 100 else (low, high)
        guess = int(rng.integers(first, last + 1))
        said.append(str(guess))
        if guess == number:
            break
        left = [max(left[0], guess + 1), left[1]] if guess < number else [left[0], min(left[1], guess - 1)]
        said.append("higher\n" if guess < number else "lower\n")
    solution = TURN.join(said if len(said) % 2 else said[:-1])
    letters = "".join(string.ascii_lowercase[i] for i in rng.integers(0, 26, size=3))
    return f"{letters} {low}-{high}\n", solution, json.dumps([low, high])


def canonical(prompt: str) -> str:
    """The letters and the range."""
    return prompt.strip()
