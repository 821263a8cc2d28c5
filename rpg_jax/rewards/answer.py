r"""Where a response states its answer: its last `Answer: ...` line, or its last \boxed{...}."""

import re

_TAIL = 300  # characters at the end of a response in which the answer is looked for
_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]*)", re.IGNORECASE)
_WRAPPING = "$*` \t"

_MARKER = re.compile(r"answer[\s*_]*[:：]", re.IGNORECASE)
# What follows it: a line of text, perhaps after a line that only opens a display or bold type.
_STATED = re.compile(r"\s*(?:(?:\\\[|\$\$?|\*\*)[ \t]*[\r\n]\s*)?([^\r\n]+)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def final_answer(response: str) -> str | None:
    """The text after the last `Answer:` within the final 300 characters, normalized, or None without one.

    For the generated tasks. Normalizing strips white space, dollar signs, asterisks, backticks and a full stop around
    it, and makes inner white space single spaces.
    """
    found = _LINE.findall(response[-_TAIL:])
    if not found:
        return None
    text = found[-1].strip(_WRAPPING).removesuffix(".").strip(_WRAPPING)
    return " ".join(text.split()) or None


def stated_answer(response: str) -> str | None:
    """What follows the last `Answer:` (in any case) that anything follows, within the final 300 characters; raw text.

    As in DAPO's rule (verl, `math_dapo`) the text may begin on a later line and ends with its line. Theirs reads
    `Answer: 5 Answer: 6` as one answer, and `**Answer**: 5` and a display's opening line as none.
    """
    tail = response[-_TAIL:]
    for marker in reversed(list(_MARKER.finditer(tail))):
        if stated := _STATED.match(tail, marker.end()):
            return stated[1]
    return None


def boxed_answer(response: str) -> str | None:
    r"""The contents of the last \boxed{...} that begins within the final 300 characters, or None if it never closes."""
    tail = response[-_TAIL:]
    start = tail.rfind(r"\boxed{")
    return braced(tail, start + len(r"\boxed")) if start >= 0 else None


def braced(text: str, start: int) -> str | None:
    """What stands between the brace at `start` and the one that closes it; None if none does."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + 1 : match.start()]
    return None
