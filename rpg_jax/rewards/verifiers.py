"""Rules that decide whether a response is correct, one per task.

Each is `(response, answer) -> bool`, where `answer` is the JSON of the task's generator. No response raises an
exception, and steps, not seconds, are bounded, so that the verdict depends on the text alone.
"""

import ast
import itertools
import json
import operator
import re
from collections import Counter
from fractions import Fraction

from rpg_jax.answer import final_answer

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_EXPRESSION = re.compile(r"(?: ?(?:[0-9]{1,10}(?![0-9])|[-+*/()])){1,64}")  # every value stays under 3,000 bits
_MAX_DEPTH = 16
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def arithmetic(response: str, answer: str) -> bool:
    """Whether the final answer is the integer in `answer`."""
    text = final_answer(response)
    return text is not None and bool(_INTEGER.fullmatch(text)) and int(text) == json.loads(answer)


def countdown(response: str, answer: str) -> bool:
    """Whether the final answer is an expression of + - * / and parentheses that equals the target exactly.

    It may use each of the numbers at most once, and no other number. `answer` is {"numbers": [...], "target": ...}.
    """
    text, goal = final_answer(response), json.loads(answer)
    parsed = evaluate(text) if text is not None else None
    if parsed is None:
        return False
    value, used = parsed
    return value == goal["target"] and Counter(used) <= Counter(goal["numbers"])


def word(response: str, answer: str) -> bool:
    """Whether the final answer is the comma-separated word in `answer`; spaces are ignored."""
    text = final_answer(response)
    return text is not None and text.replace(" ", "") == json.loads(answer)


def guess(response: str, answer: str) -> bool:
    """Whether the last number is within the range in `answer`: which one is right, the environment draws."""
    numbers, (low, high) = re.findall("[0-9]+", response), json.loads(answer)
    return bool(numbers) and len(numbers[-1]) < 30 and low <= int(numbers[-1]) <= high


VERIFIERS = {"arithmetic": arithmetic, "countdown": countdown, "guess": guess, "sorting": word}


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it, or None for any other text.

    It has + - * / and parentheses between numbers of at most 10 digits, single spaces at most between these tokens, no
    signs, at most 64 tokens and 16 nested parentheses. An expression that divides by zero gives None.
    """
    depths = itertools.accumulate((c == "(") - (c == ")") for c in expression)
    if not _EXPRESSION.fullmatch(expression) or max(depths) > _MAX_DEPTH:
        return None
    numbers = re.findall("[0-9]+", expression)
    try:
        tree = ast.parse(re.sub("(?<![0-9])0+(?=[0-9])", "", expression).strip(), mode="eval")
        return _value(tree.body), list(map(int, numbers))
    except (SyntaxError, LookupError, ZeroDivisionError):
        return None


def _value(node: ast.expr) -> Fraction:
    """The value of a number or an operation; raises LookupError for anything else."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise LookupError
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
