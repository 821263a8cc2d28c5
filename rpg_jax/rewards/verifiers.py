"""Rules that decide whether a response is correct, one per task.

Each is `(response, answer) -> bool`, where `answer` is the JSON of the task's generator. No response raises an
exception, and steps, not seconds, are bounded, so that the verdict depends on the text alone.
"""

import json
import re
from collections import Counter
from fractions import Fraction

from rpg_jax import InputError
from rpg_jax.rewards.answer import final_answer

_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_EXPRESSION_TOKEN = re.compile(r" ?([0-9]{1,10}|[-+*/()])")
_MAX_TOKENS = 64  # of an expression; with numbers of 10 digits every value stays under 3,000 bits
_MAX_DEPTH = 16


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


VERIFIERS = {"arithmetic": arithmetic, "countdown": countdown, "sorting": word, "rewriting": word}


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it, or None for any other text.

    Grammar, with at most 64 tokens (single spaces between them allowed) and 16 nested parentheses:
        sum     = product (("+" | "-") product)*
        product = factor (("*" | "/") factor)*
        factor  = digits{1..10} | "(" sum ")"
    An expression that divides by zero gives None.
    """
    tokens = _tokens(expression)
    try:
        value, rest = _sum(tokens, 0)
    except (ValueError, ZeroDivisionError):
        return None
    return (value, [int(token) for token in tokens if token.isdigit()]) if not rest else None


def _tokens(expression: str) -> list[str]:
    """The tokens, or [], which no rule accepts, for other text or too many tokens."""
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
    raise InputError("no expression")
