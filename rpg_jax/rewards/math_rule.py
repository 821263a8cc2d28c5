r"""Mathematical equivalence of answers by math-verify; called in a worker process only, because it imports sympy.

Sympy hangs, crashes and exhausts memory on some inputs. The worker's limits bound it; math-verify's own time limits are
off, because they are signals, which cannot interrupt a long integer power.
"""

import logging
import re
from dataclasses import replace

from rpg_jax.rewards.normalize import latex
from rpg_jax.rewards.rules import stated_or_boxed_answer
from rpg_jax.rewards.same import is_letter, quantity, same, words_agree

try:
    from math_verify import LatexExtractionConfig, parse, verify

    from rpg_jax.rewards import values
except (ImportError, AttributeError) as error:  # values.py stands on names of another version, perhaps
    raise ImportError(f"math-verify cannot be imported ({error}); pip install math-verify") from None

values.use()
logging.disable(logging.WARNING)  # each worker would log that the time limits are off
_LATEX = LatexExtractionConfig()  # the other parser evaluates the text as Python
_UNITS_KEPT = replace(_LATEX, normalization_config=replace(_LATEX.normalization_config, units=False))
_LONGEST = 1000  # characters of an answer that sympy is asked about
_HUGE = re.compile(r"\^[{(][^{}()]*[})]?\^|\^\{?-?[0-9]{5}|[0-9]{4} ?!|!!")  # integers too large to compute
# A word, not a product of variables: `cat` may be a product, `taco` is a word.
_WORD = re.compile(r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)[A-Za-z]{4,}")
# 5 ab, which math-verify takes for five of a unit.
_PRODUCT = re.compile(r"[0-9)}] ?[A-Za-z](?: ?[A-Za-z]){1,2}(?![A-Za-z])")
_RELATION = re.compile(r" ?(?:[<>]|\\(?:n(?:e|eq|ot)|[gl](?:e|t|eq|eqslant))(?![A-Za-z]))")
_EXPONENT = re.compile(r"\^ ?(?:-?[0-9]|\{ ?-?[0-9] ?\})")
_CLOCK = re.compile(r"[0-9]{1,2} ?: ?[0-5][0-9]")  # a time is no ratio
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
    if is_letter(answer) or _CLOCK.fullmatch(latex(answer)) or len(answer) > _LONGEST:
        return False
    if not words_agree(latex(stated), latex(answer)):
        return False
    stated, answer = (latex(quantity(text) or text) for text in (stated, answer))
    if _HUGE.search(stated) or _HUGE.search(answer) or _between_numbers(stated):
        return False
    if _RELATION.match(stated) and not _RELATION.match(answer):  # math-verify finds > 5 equal to 5
        return False
    return _verified(_words(stated), _words(answer), _UNITS_KEPT if _PRODUCT.search(stated) else _LATEX)


def _between_numbers(text):
    """Whether a word stands between numbers; math-verify would read it, and the text after it, as a unit."""
    return any(
        re.search("[0-9]", text[: found.start()]) and re.search("[0-9]", _EXPONENT.sub("", text[found.end() :]))
        for found in _WORD.finditer(text)
    )


def _words(text):
    return "$" + _WORD.sub(r"\\text{\g<0>}", _FUNCTION.sub(r"\\\g<0> ", text)) + "$"


def _verified(stated, answer, reading):
    # The first match, because the others are parts of what could not be read.
    texts = [parse(text, [reading], extraction_mode="first_match", parsing_timeout=None) for text in (answer, stated)]
    return verify(*texts, timeout_seconds=None)


# Also triggers lazy imports.
if not _verified("$0.5$", "$1/2$", _LATEX) or _verified("$0.0000001$", "$0.0000002$", _LATEX):
    raise ImportError("math-verify finds 1/2 not equal to 0.5, or 1e-7 equal to 2e-7; pip install math-verify")
