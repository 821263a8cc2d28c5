"""Multi-step integer arithmetic, worked one operation per line.

    Compute 7+5-8+9
    7+5=12
    12-8=4
    4+9=13
    Answer: 13

Every step is local: it copies the last value and the next operand, and needs one addition or multiplication.
"""

import itertools
import json
import re

from rpg_jax import InputError
from rpg_jax.data.tasks import chains


def generate(rng, *, steps=3, operand=9, maximum=20, operators="+-"):
    """One problem: `steps` operations, operands in 1..operand, every running value in 0..maximum.

    `operators` is any of "+-*". Raises ValueError for settings under which no problem exists.
    """
    chains.check_operators("arithmetic", operators, "+-*")
    if not (steps and operand and maximum):
        raise InputError(f"task 'arithmetic': {steps=}, {operand=} and {maximum=} must all be at least 1")
    for _ in range(1000):
        start = total = int(rng.integers(1, maximum + 1))
        chain, lines = [], []
        for _ in range(steps):
            operator, number = operators[rng.integers(len(operators))], int(rng.integers(1, operand + 1))
            before, total = total, chains.OPERATORS[operator](total, number)
            if not 0 <= total <= maximum:
                break
            chain.append((operator, number))
            lines.append(f"{before}{operator}{number}={total}\n")
        else:
            return f"Compute {chains.text(start, chain)}\n", f"{''.join(lines)}Answer: {total}", json.dumps(total)
    raise InputError(f"task 'arithmetic': {steps=} with {operators=} seldom stays within 0..{maximum=}; raise maximum")


def canonical(prompt: str) -> str:
    """The chain with each run of additions and subtractions, or of multiplications, sorted, because they commute."""
    numbers, operators = re.findall(r"\d+", prompt), re.findall(r"[-+*]", prompt)
    operators.insert(0, "*" if operators[0] == "*" else "+")
    runs = itertools.groupby(zip(operators, numbers, strict=True), key=lambda step: step[0] == "*")
    return " ".join(operator + number for _, run in runs for operator, number in sorted(run))
