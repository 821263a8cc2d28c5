r"""Mathematical equivalence of answers by math-verify; called in a worker process only, because it imports sympy.

Sympy hangs, crashes and exhausts memory on some inputs. The worker's limits bound it; math-verify's own time limits are
off, because they are signals, which cannot interrupt a long integer power.
"""

import logging
import re

from rpg_jax.rewards.normalize import latex, same
from rpg_jax.rewards.rules import stated_or_boxed_answer

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ImportError(f"math-verify cannot be imported ({error}); pip install math-verify") from None

logging.disable(logging.WARNING)  # each worker would log that the time limits are off
_LATEX = [LatexExtractionConfig()]  # the other parser evaluates the text as Python
_LONGEST = 1000  # characters of an answer that sympy is asked about
_HUGE = re.compile(r"\^[{(][^{}()]*[})]?\^|\^\{?[0-9]{5}|[0-9]{4} ?!|!!")  # integers too large to compute
# A word, not a product of variables: `cat` may be a product, `taco` is a word.
_WORD = re.compile(r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{4,}")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(?:sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan)(?![A-Za-z])")


def math_verify(prompt: str, response: str, answer: str, task: str) -> bool:
    r"""Whether the response's last `Answer:` line, or else its last \boxed{...}, is equivalent to the answer.

    Both must be within the final 300 characters. Answers with the same normal form (the DAPO rule's) are equivalent
    without asking sympy.
    """
    stated = stated_or_boxed_answer(response)
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
    """Whether a word stands between numbers; math-verify would read it, and the text after it, as a unit."""
    return any(
        re.search("[0-9]", text[: word.start()]) and re.search("[0-9]", text[word.end() :])
        for word in _WORD.finditer(text)
    )


def _parsed(text):
    text = _WORD.sub(r"\\text{\g<0>}", _FUNCTION.sub(r"\\\g<0> ", latex(text)))
    return parse(f"${text}$", _LATEX, parsing_timeout=None)


if not verify(_parsed("1/2"), _parsed("0.5"), timeout_seconds=None):  # also triggers lazy imports
    raise ImportError("math-verify does not find 1/2 equal to 0.5; pip install math-verify")
