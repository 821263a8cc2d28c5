r"""Where a response states its answer: its last `Answer: ...` line, its last \boxed{...}, tags, or its last number."""

import re

_TAIL = 300  # characters at the end of a response that may state the answer
_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]*)", re.IGNORECASE)
_WRAPPING = "$*` \t"

_MARKER = re.compile(r"answer[\s*_]*[:：]", re.IGNORECASE)
# The text after the marker: one line, perhaps after a line that only opens displayed mathematics or bold type.
_STATED = re.compile(r"\s*(?:(?:\\\[|\$\$?|\*\*)[ \t]*[\r\n]\s*)?([^\r\n]+)")
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")  # a minus after a number or a word is none
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# What a box without braces holds: the rest of its formula, if no word stands in it, else the next word.
_REST_OF_FORMULA = re.compile(
    r"(?:\\[A-Za-z]+|\\[^)\]A-Za-z\n]|[^\\$A-Za-z\n]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))*+(?=\$|\\[)\]])"
)
_NEXT_WORD = re.compile(r"(?:\\.|\{[^{}]*\}|[^\s\\${}])*")


def final_answer(response: str) -> str | None:
    """The normalized text after the last `Answer:` within the final 300 characters, or None; for generated tasks.

    Normalizing strips white space, dollar signs, asterisks, backticks and a full stop around the text, and replaces
    inner white space by single spaces.
    """
    lines = _LINE.findall(response[-_TAIL:])
    if not lines:
        return None
    text = lines[-1].strip(_WRAPPING).removesuffix(".").strip(_WRAPPING)
    return " ".join(text.split()) or None


def stated_answer(response: str) -> str | None:
    """The raw text after the last `Answer:` (in any case) with text after it, within the final 300 characters.

    As in DAPO's rule (verl, `math_dapo`) the text may begin on a later line and ends with its line. DAPO's rule reads
    `Answer: 5 Answer: 6` as one answer, and finds none in `**Answer**: 5` or after a line that opens a display.
    """
    tail = response[-_TAIL:]
    for marker in reversed(list(_MARKER.finditer(tail))):
        if stated := _STATED.match(tail, marker.end()):
            return stated[1]
    return None


def boxed_answer(response: str) -> str | None:
    r"""What the last box that begins within the final 300 characters holds; None if there is none or it never closes.

    A box is \boxed{12} or \fbox{12}, perhaps with white space before the brace, or without braces, as in `\boxed 12`.
    Empty boxes are passed over, as in "I was asked to use \boxed{}".
    """
    tail = response[-_TAIL:]
    for box in reversed(list(BOX.finditer(tail))):
        inside, _ = box_at(tail, box.end())
        if inside is None or inside.strip(_WRAPPING):
            return inside
    return None


def box_at(text: str, start: int) -> tuple[str | None, int]:
    """What a box holds whose brace, or contents without one, are at `start`, and its end; None if it never closes."""
    if text.startswith("{", start):
        inside = braced(text, start)
        return inside, start + 2 + len(inside or "")
    inside = (_REST_OF_FORMULA.match(text, start) or _NEXT_WORD.match(text, start))[0]
    return inside, start + len(inside)


def braced(text: str, start: int) -> str | None:
    """The text between the brace at `start` and its closing brace; None if it is never closed."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start + 1 : match.start()]
    return None


def tagged_answer(response: str) -> str | None:
    """The text between the last <answer> and </answer>, of any number of lines; None if there are none."""
    start = response.rfind("<answer>", 0, max(response.rfind("</answer>"), 0))
    return response[start + len("<answer>") : response.find("</answer>", start)].strip() or None if start >= 0 else None


def last_number(response: str) -> str | None:
    """The last number in a response, 1,234.5 or -7, as it is written; None if there is none."""
    numbers = _NUMBER.findall(response)
    return numbers[-1] if numbers else None


def whole_text(response: str) -> str | None:
    """The response without white space around it; None if nothing else is there."""
    return response.strip() or None


# reward.extraction -> where the answer to a problem of reasoning-gym is looked for.
EXTRACTIONS = {
    "stated": final_answer,
    "boxed": boxed_answer,
    "tags": tagged_answer,
    "number": last_number,
    "text": whole_text,
}
