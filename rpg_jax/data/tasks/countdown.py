"""Countdown: make a target from given numbers, each used at most once. Many answers are right.

    Make 13 from 9,3,8,4,1
    9+3=12
    9+4=13
    Answer: 9+4

The worked solution is a search that checks itself: attempts that miss, each with its value, then one that hits.
"""

import json
import re

from rpg_jax.data.tasks import chains


def generate(rng, *, numbers=5, used=2, largest=9, maximum=99, operators="+-", attempts=1):
    """One problem: `numbers` integers in 1..largest and a target in 1..maximum.

    Args:
      rng: numpy Generator.
      numbers: how many are given; used: how many the worked solution uses.
      operators: any of "+-*/", applied from left to right in the worked solution.
      attempts: at most so many attempts miss before the one that hits.

    Raises:
      ValueError: for settings under which no problem exists.
    """
    chains.check_operators("countdown", operators)
    if not 2 <= used <= numbers:
        raise ValueError(f"task 'countdown': {used=} must be between 2 and {numbers=}")
    if not (largest and maximum):
        raise ValueError(f"task 'countdown': {largest=} and {maximum=} must be at least 1")
    given = [int(n) for n in rng.integers(1, largest + 1, numbers)]
    hit = _attempt(rng, given, used, operators, lambda value: 1 <= value <= maximum)
    if hit is None:
        raise ValueError(f"task 'countdown': {operators=} seldom reach a target in 1..{maximum=}; raise maximum")
    expression, target = hit
    lines = []
    for _ in range(int(rng.integers(attempts + 1))):
        miss = _attempt(rng, given, used, operators, lambda value: 0 <= value <= maximum and value != target)
        if miss is not None:
            lines.append(f"{miss[0]}={miss[1]}\n")
    prompt = f"Make {target} from {','.join(map(str, given))}\n"
    solution = f"{''.join(lines)}{expression}={target}\nAnswer: {expression}"
    return prompt, solution, json.dumps({"numbers": sorted(given), "target": target})


def canonical(prompt: str) -> str:
    """The target and the given numbers in order."""
    target, *given = map(int, re.findall(r"\d+", prompt))
    return f"{target} {sorted(given)}"


def _attempt(rng, given, used, operators, fits):
    """(expression, value) of a random chain over `used` of the numbers whose value is an integer that fits, or None."""
    for _ in range(200):
        start, *rest = (given[i] for i in rng.permutation(len(given))[:used])
        steps = [(operators[rng.integers(len(operators))], operand) for operand in rest]
        value = chains.value(start, steps)
        if value == int(value) and fits(value):
            return chains.text(start, steps), int(value)
    return None
