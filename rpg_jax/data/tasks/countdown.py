"""Countdown: make a target from given numbers, each used at most once. Many answers are correct.

    Make 17 from 9,3,8,4,1
    9+3=12
    9-3=6
    9+8=17
    Answer: 9+8

The worked solution is a systematic search: pairs (or more) of the given numbers in their order, each with its value,
until one has the target's value. Every line is a small step from the previous one, which a small model can learn.
"""

import itertools
import json
import re

from rpg_jax import InputError
from rpg_jax.data.tasks import chains


def generate(rng, *, numbers=5, used=2, largest=9, maximum=99, operators="+-", attempts=1):
    """One problem: `numbers` integers in 1..largest and a target in 1..maximum.

    The worked solution uses `used` of the numbers with `operators`, any of "+-*/", applied from left to right, and at
    most `attempts` attempts miss before the one that hits. Raises ValueError for settings without a problem.
    """
    chains.check_operators("countdown", operators)
    if not 2 <= used <= numbers:
        raise InputError(f"task 'countdown': {used=} must be between 2 and {numbers=}")
    if not (largest and maximum):
        raise InputError(f"task 'countdown': {largest=} and {maximum=} must be at least 1")
    for _ in range(200):
        available = [int(n) for n in rng.integers(1, largest + 1, numbers)]
        tries = list(itertools.islice(_tries(available, used, operators, maximum), attempts + 1))
        values = [value for _, value in tries]
        hits = [i for i, value in enumerate(values) if value >= 1 and value not in values[:i]]
        if hits:
            break
    else:
        raise InputError(f"task 'countdown': {operators=} seldom reach a target in 1..{maximum=}; raise maximum")
    hit = hits[rng.integers(len(hits))]
    lines = "".join(f"{text}={value}\n" for text, value in tries[: hit + 1])
    answer = json.dumps({"numbers": sorted(available), "target": values[hit]})
    return f"Make {values[hit]} from {','.join(map(str, available))}\n", f"{lines}Answer: {tries[hit][0]}", answer


def canonical(prompt: str) -> str:
    """The target and the sorted numbers."""
    target, *numbers = map(int, re.findall(r"\d+", prompt))
    return f"{target} {sorted(numbers)}"


def _tries(available, used, operators, maximum):
    """(expression, value) of the chains over `used` numbers, in order, whose value is an integer in 0..maximum."""
    chosen = itertools.combinations(available, used)
    pairs = ((numbers, signs) for numbers in chosen for signs in itertools.product(operators, repeat=used - 1))
    for (start, *rest), choice in itertools.islice(pairs, 10_000):  # of some settings there are far more
        steps = list(zip(choice, rest, strict=True))
        value = chains.value(start, steps)
        if value == int(value) and 0 <= value <= maximum:
            yield chains.text(start, steps), int(value)
