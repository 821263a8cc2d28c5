"""Sorting: letters into the order of the alphabet. Not mathematics: at each step, the next of those not yet placed.

    Sort k,b,x,d
    b<d<k<x
    Answer: b,d,k,x

The first line is the work, the second repeats it.
"""

import json
import string

from rpg_jax import InputError


def generate(rng, *, length=5, letters=26):
    """One problem: `length` distinct letters out of the first `letters` of the alphabet.

    Raises ValueError unless 2 <= length <= letters <= 26.
    """
    if not 2 <= length <= letters <= 26:
        raise InputError(f"task 'sorting': {length=} and {letters=} must satisfy 2 <= length <= letters <= 26")
    word = [string.ascii_lowercase[i] for i in rng.permutation(letters)[:length]]
    result = ",".join(sorted(word))
    return f"Sort {','.join(word)}\n", f"{result.replace(',', '<')}\nAnswer: {result}", json.dumps(result)


def canonical(prompt: str) -> str:
    """The set of letters: another order of the same letters has the same answer."""
    return ",".join(sorted(prompt.split()[1].split(",")))
