"""Chains: an integer and a sequence of (operator, operand) applied to it from left to right."""

from fractions import Fraction
from operator import add, mul, sub

from rpg_jax import InputError

OPERATORS = {"+": add, "-": sub, "*": mul, "/": Fraction}  # of a quotient's two parts


def check_operators(task: str, operators: str, known: str = "".join(OPERATORS)) -> None:
    """Raises ValueError unless `operators` is a non-empty string of distinct characters out of `known`."""
    if not operators or set(operators) - set(known) or len(set(operators)) < len(operators):
        raise InputError(f"task {task!r}: operators={operators!r} must be distinct characters out of {known!r}")


def text(start: int, steps) -> str:
    """The chain in standard notation, with parentheses only where precedence asks for them: (1+2)*3."""
    expression, is_sum = str(start), False
    for operator, operand in steps:
        if operator in "*/" and is_sum:
            expression = f"({expression})"
        expression, is_sum = f"{expression}{operator}{operand}", operator in "+-"
    return expression


def value(start: int, steps):
    """The chain's exact value, int or Fraction."""
    total = start
    for operator, operand in steps:
        total = OPERATORS[operator](total, operand)
    return total
