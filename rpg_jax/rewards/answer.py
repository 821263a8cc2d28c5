"""The final answer of a response: its last `Answer: ...` line."""

import re

_TAIL = 300  # characters at the end of a response in which the answer is looked for
_LINE = re.compile(r"answer[ \t]*:[ \t]*([^\n]*)", re.IGNORECASE)
_WRAPPING = "$*` \t"


def final_answer(response: str) -> str | None:
    """The text after the last `Answer:` within the final 300 characters, normalized, or None without one.

    Normalizing strips white space, dollar signs, asterisks, backticks and a full stop around it, and makes inner white
    space single spaces.
    """
    found = _LINE.findall(response[-_TAIL:])
    if not found:
        return None
    text = found[-1].strip(_WRAPPING).removesuffix(".").strip(_WRAPPING)
    return " ".join(text.split()) or None
