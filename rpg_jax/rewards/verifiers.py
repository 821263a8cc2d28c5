"""Rules that decide whether a response is right, one a task.

Each is `(response, answer) -> bool`, where `answer` is the JSON that the task's generator wrote. They are total (any
response gives a verdict, never an exception) and bounded in steps, not in seconds: the text alone decides.
"""

import json
import re
from collections import Counter
from fractions import Fraction

from rpg_jax.rewards.answer import final_answer

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_EXPRESSION_TOKEN = re.compile(r" ?([0-9]{1,10}|[-+*/()])")
_MAX_TOKENS = 64  # of an expression; numbers of 10 digits keep every value under 3,000 bits
_MAX_DEPTH = 16


def arithmetic(response: str, answer: str) -> bool:
    """The final answer is the integer that `answer` holds."""
    text = final_answer(response)
    return text is not None and bool(_INTEGER.fullmatch(text)) and int(text) == json.loads(answer)


def countdown(response: str, answer: str) -> bool:
    """The final answer is an expression of + - * / and parentheses that equals the target exactly.

    Each given number may be used at most once, and no other number. `answer` is {"numbers": [...], "target": ...}.
    """
    text, goal = final_answer(response), json.loads(answer)
    parsed = evaluate(text) if text is not None else None
    if parsed is None:
        return False
    value, used = parsed
    return value == goal["target"] and Counter(used) <= Counter(goal["numbers"])


def word(response: str, answer: str) -> bool:
    """The final answer is the comma-separated word that `answer` holds; spaces do not count."""
    text = final_answer(response)
    return text is not None and text.replace(" ", "") == json.loads(answer)


VERIFIERS = {"arithmetic": arithmetic, "countdown": countdown, "sorting": word, "rewriting": word}


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it, or None if it is not one.

    Grammar, with at most 64 tokens (single spaces between them allowed) and 16 nested parentheses:
        sum     = product (("+" | "-") product)*
        product = factor (("*" | "/") factor)*
        factor  = digits{1..10} | "(" sum ")"
    Division by zero makes it no expression.
    """
    tokens = _tokens(expression)
    try:
        value, rest = _sum(tokens, 0)
    except (_NoExpression, ZeroDivisionError):
        return None
    return (value, [int(token) for token in tokens if token.isdigit()]) if not rest else None


class _NoExpression(Exception):
    pass


def _tokens(expression: str) -> list[str]:
    """The tokens, or [] (which no rule accepts) when some text is none or there are too many."""
    tokens, end = [], 0
    while end < len(expression):
        match = _EXPRESSION_TOKEN.match(expression, end)
        if not match or len(tokens) == _MAX_TOKENS:
            return []
        tokens.append(match[1])
        end = match.end()
    return tokens


def _sum(tokens, depth):
    value, tokens = _product(tokens, depth)
    while tokens and tokens[0] in "+-":
        operator, (term, tokens) = tokens[0], _product(tokens[1:], depth)
        value = value + term if operator == "+" else value - term
    return value, tokens


def _product(tokens, depth):
    value, tokens = _factor(tokens, depth)
    while tokens and tokens[0] in "*/":
        operator, (factor, tokens) = tokens[0], _factor(tokens[1:], depth)
        value = value * factor if operator == "*" else value / factor
    return value, tokens


def _factor(tokens, depth):
    if tokens and tokens[0].isdigit():
        return Fraction(int(tokens[0])), tokens[1:]
    if tokens and tokens[0] == "(" and depth < _MAX_DEPTH:
        value, tokens = _sum(tokens[1:], depth + 1)
        if tokens and tokens[0] == ")":
            return value, tokens[1:]
    raise _NoExpression
