r"""Whether two answers are the same as text: by a normal form, as a choice's letter, or as a number beside its unit."""

import re

from rpg_jax.rewards.normalize import COMMAND, FONT, forms, formula, is_equation

# (B) 12, B: 12 cm, B. 12, option B: a letter that is marked as a choice, and the text of the choice.
_CHOICE = re.compile(
    r"(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?:? ?)?"
    r"(?:\( ?([A-Z]) ?\)|\[ ?([A-Z]) ?\]|([A-Z])(?= ?[.:)]| ?$))[.:) ]*+(?![+*/^_!=<>])(.*)"
)
_OTHER_CHOICE = re.compile(r"(?<![\\A-Za-z])[A-J](?![A-Za-z])")

_POWER = r"(?: ?\^ ?(?:-?[1-4]|\{ ?-?[1-4] ?\}))?"
_TEXT = rf"{FONT}\{{(?:[^{{}}0-9]|\^ ?\{{?-?[1-4]\}}?)*\}}{_POWER}"
_PER = r"/ ?(?:[kcm]?m|h|hr|s|sec|min|day|[kmc]?g|m?[lL]|mol|K)(?![A-Za-z])"
# Where the words after a number begin. A word has three letters, so that `2 ab` is a product.
_AFTER = re.compile(
    rf"(?:\\mu ?|\\frac ?\{{ ?)?{FONT}\{{|(?<=[0-9)}}] )[A-Za-z](?:[a-z]? ?{_PER}|[a-z]{{2}}|[A-Z]{{2}})"
)
_UNIT = re.compile(
    rf"(?:{_TEXT}|\\frac ?\{{ ?{_TEXT} ?\}} ?\{{ ?{_TEXT} ?\}}|\\(?:mu|cdot)(?![A-Za-z])|[ /.-]"
    rf"|(?<![A-Za-z])(?:[A-Za-z]{{2,}}|a|[A-Za-z] ?(?={_PER})|(?<=/)[A-Za-z]|(?<=/ )[A-Za-z])(?![A-Za-z]){_POWER})*+"
)
_BEFORE = re.compile(
    rf"(?:\\approx|\\sim|\\?#|[A-Z]{{2,3}}(?= ?[0-9])"
    rf"|{FONT}\{{(?:[^{{}}0-9]*(?:\b(?:is|are)|[:=])|[A-Z]{{2,3}}|Rs\.?)? ?\}}| )*+"
)
# Words beside a number that make another answer of it.
_CHANGES = re.compile(
    r"(?<![\\A-Za-z])(?:or|to|out|than|least|most|not|half|twice|mod|minus|plus|over|squared|cubed|factorial|choose"
    r"|hundreds?|thousands?|[a-z]+illions?|dozens?|halves|lakhs?|crores?|scores?|negative|below|wrong|incorrect|thirds?|quarters?|fifths?|tenths?)(?![A-Za-z])"
)
# A letter set as text that is no unit's: 5\mathrm{i}, 5\text{x}.
_LETTER = re.compile(rf"{FONT}\{{ ?[BDEGIOQRUX-Za-fijkn-rtv-z] ?\}}")
_HALF_OF_THE_DAY = re.compile(r"(?<![A-Za-z])[ap](?=\.? ?m(?![A-Za-z]))")
_NAMES = re.compile(r"(?<![A-Za-z])(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|max|min|gcd|lcm|inf)(?![A-Za-z])")


def same(prediction: str, answer: str) -> bool:
    """Whether two answers share a normal form, are the same choice, or the same number, one of them beside words.

    An answer with an empty normal form equals no answer.
    """
    truths, readings = forms(answer), forms(prediction, last=True)
    if not truths.isdisjoint(readings):
        return True
    if is_letter(answer):
        return choice(prediction) in truths
    return _meet(truths, quantity(prediction)) or _meet(readings, quantity(answer))


def canonical(text: str) -> str | None:
    """The shortest normal form of an answer, under which its votes are counted; None for an empty answer."""
    text = choice(text) or quantity(text) or text
    return min(forms(text, last=True), key=lambda form: (len(form), form), default=None)


def is_letter(answer: str) -> bool:
    """Whether an answer is one capital letter, such as a choice's."""
    return any(len(form) == 1 and "A" <= form <= "Z" for form in forms(answer))


def choice(text: str) -> str | None:
    """The letter of an answer such as `(B) 12` or `B: 12 cm`; None for other answers, two choices among them."""
    plain = re.sub(rf"{FONT}|[{{}}$*]", "", formula(text))
    match = _CHOICE.fullmatch(" ".join(plain.split()))
    return (match[1] or match[2] or match[3]) if match and not _OTHER_CHOICE.search(match[4]) else None


def quantity(text: str) -> str | None:
    r"""The number of an answer that is one number and words: 15 of `15\text{ m/s}`, 500 of `Rs. 500`; else None."""
    text = formula(text)
    if whole := re.fullmatch(rf"{FONT}\{{([^{{}}]*)\}}", text):
        text = whole[1].strip()
    if _changing(text):
        return None
    if "," not in text and "<" not in text and ">" not in text:
        left, _, text = text.rpartition("=")
        if is_equation(left):
            return None
    text = text[_BEFORE.match(text).end() :]
    words = _AFTER.search(text)
    number = text[: words.start()] if words else text
    if words and (not _UNIT.fullmatch(text, words.start()) or _NAMES.search(text, words.start())):
        return None
    number = number.removesuffix("/-")  # of rupees
    return number if _is_number(number) else None


def words_agree(left: str, right: str) -> bool:
    """Whether the words in two answers, but for "or", allow their numbers to be compared: "million" must stand in both
    or neither."""
    halves = [set(_HALF_OF_THE_DAY.findall(text.lower())) for text in (left, right)]
    if all(halves) and halves[0] != halves[1]:
        return False
    return _changing(left) ^ _changing(right) <= {"or"}


def _changing(text):
    return {*_CHANGES.findall(text.lower()), *_LETTER.findall(text)}


def _meet(readings, text):
    return text is not None and any(_is_number(reading) for reading in readings & forms(text))


def _is_number(text):
    return bool(re.search("[0-9]", text)) and not re.search("[^\\W\\d_]", COMMAND.sub("", text))
