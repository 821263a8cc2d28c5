r"""Mathematical equivalence of answers by math-verify; to be called in a worker process, which alone imports sympy.

Sympy hangs, crashes and eats memory on some inputs: the worker's limits are what bounds it, so that math-verify's own
time limits (signals, which cannot interrupt a long integer power) are off.
"""

import logging
import re

from rpg_jax.rewards.answer import boxed_answer, stated_answer
from rpg_jax.rewards.normalize import latex, same

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ImportError(f"math-verify cannot be imported ({error}); pip install math-verify") from None

logging.disable(logging.WARNING)  # a note on every worker that the time limits are off
_LATEX = [LatexExtractionConfig()]  # not its other parser, which evaluates the text as Python
_LONGEST = 1000  # characters of an answer that sympy is asked about
_HUGE = re.compile(r"\^[{(][^{}()]*[})]?\^|\^\{?[0-9]{5}|[0-9]{4} ?!|!!")  # integers that would never be finished
_WORD = re.compile(
    r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{4,}"
)  # no product of variables: cat, but not the word taco, is a t c
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(?:sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan)(?![A-Za-z])")


def math_verify(prompt: str, response: str, answer: str, task: str) -> bool:
    r"""Whether the response's last `Answer:` line, or else its last \boxed{...}, is equivalent to the answer.

    Answers with the same normal form (the DAPO rule's) are, without asking sympy. Both are looked for in the final 300
    characters.
    """
    stated = stated_answer(response)
    stated = boxed_answer(response) if stated is None else stated
    if stated is None or not answer.strip():
        return False
    if same(stated, answer):
        return True
    if len(answer) > _LONGEST or _HUGE.search(latex(stated)) or _HUGE.search(latex(answer)):
        return False
    if _is_sentence(latex(stated)):
        return False
    return verify(_parsed(answer), _parsed(stated), timeout_seconds=None)


def _is_sentence(text):
    """Whether words stand between numbers: math-verify would take them, and all that follows, for a unit."""
    return any(
        re.search("[0-9]", text[: word.start()]) and re.search("[0-9]", text[word.end() :])
        for word in _WORD.finditer(text)
    )


def _parsed(text):
    text = _WORD.sub(r"\\text{\g<0>}", _FUNCTION.sub(r"\\\g<0> ", latex(text)))
    return parse(f"${text}$", _LATEX, parsing_timeout=None)


if not verify(_parsed("1/2"), _parsed("0.5"), timeout_seconds=None):  # also loads what is loaded on first use
    raise ImportError("math-verify does not find 1/2 equal to 0.5; pip install math-verify")
