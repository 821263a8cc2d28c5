"""Guess: find a number by asking whether it is higher or lower. A conversation, for `environments.guess`.

    kq 3-14
    9
      lower
    5

Two letters make problems distinct, as the number is drawn by the environment. The worked solution guesses at random: it
shows what a turn looks like, and leaves it to RL to listen to the answers.
"""

import json
import string

from rpg_jax import InputError

TURN = "\x1e"  # stands before and after an observation in a worked solution


def generate(rng, *, highest=12, fewest=12, most=12, turns=4):
    """One problem: a range of `fewest` to `most` numbers up to `highest`; the solution has at most so many turns.

    Raises ValueError unless 1 <= fewest <= most <= highest and turns >= 1.
    """
    if not 1 <= fewest <= most <= highest or not turns:
        raise InputError(
            f"task 'guess': {fewest=}, {most=} and {highest=} must satisfy 1 <= fewest <= most <= highest, and "
            f"{turns=} be at least 1"
        )
    low = int(rng.integers(1, highest - fewest + 2))
    high = low + int(rng.integers(fewest, min(most, highest - low + 1) + 1)) - 1
    number, said = int(rng.integers(low, high + 1)), []
    for guess in rng.integers(low, high + 1, size=turns).tolist():
        said.append(str(guess))
        if guess == number:
            break
        said.append("higher\n" if guess < number else "lower\n")
    solution = TURN.join(said if len(said) % 2 else said[:-1])
    letters = "".join(string.ascii_lowercase[i] for i in rng.integers(0, 26, size=2))
    return f"{letters} {low}-{high}\n", solution, json.dumps([low, high])


def canonical(prompt: str) -> str:
    """The letters and the range."""
    return prompt.strip()
