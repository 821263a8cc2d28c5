"""Calculator: a tool in the text. `<calc>3*17</calc>` is answered by 51, and what ends without a call is the answer."""

import re
from fractions import Fraction

from rpg_jax import answer
from rpg_jax.rewards.verifiers import evaluate

CALL = re.compile(r"<calc>([^<]*)</calc>\W*\Z")  # a token that ends a call may go on, as ">." does
EXPECTED = "error: expected numbers of at most 10 digits, + - * / and parentheses"


class Calculator:
    """An action that ends with a call is answered; any other is rewarded by 1 if its last number is the problem's.

    Exact arithmetic by a parser of its own: no text of a policy is ever evaluated as a program.
    """

    def __init__(self, problem, seed):
        self.answer = last_number(problem["answer"])

    def reset(self):
        return None

    def step(self, action):
        if call := CALL.search(action):
            return calculated(call[1]), 0.0
        return None, float(self.answer is not None and last_number(action) == self.answer)


def last_number(text):
    """The last number in a text, exactly; None if there is none, or one of over 50 characters."""
    found = answer.last_number(text)
    return Fraction(found.replace(",", "")) if found and len(found) <= 50 else None


def calculated(expression):
    """The value of an expression as text, exact if it is whole; what is expected where it has none."""
    value = evaluate(" ".join(expression.split()))
    if value is None or (value[0].denominator > 1 and abs(value[0]) > 1e308):  # no float is as large
        return EXPECTED
    return str(value[0]) if value[0].denominator == 1 else f"{float(value[0]):.6g}"
