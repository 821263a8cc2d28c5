r"""Normal forms of mathematical answers, so that answers can be compared as text.

The rules are those of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858, appendix D), as DAPO's reward (verl,
`math_dapo`) uses them, with their errors corrected; "DAPO" in the comments names each difference. Values are not
computed: `1/2` and `0.5` differ here, and `math_verify` compares them. Every step takes time linear in the text.
"""

import decimal
import functools
import re
import unicodedata

from rpg_jax.answer import BOX, box_at

_GREEK = {letter: f"\\{unicodedata.name(letter).split()[-1].lower()} " for letter in "αβγδθλμπρστφψω"}
_SYMBOLS = str.maketrans(
    _GREEK
    | dict.fromkeys("−–—‐‑", "-")
    | dict.fromkeys("⁄∕÷", "/")
    | dict.fromkeys("×·⋅∙", "\\cdot ")
    | dict.fromkeys("“”", '"')
    | {"∞": "\\infty ", "°": "^\\circ ", "≤": "<=", "≥": ">=", "≠": "\\neq ", "±": "\\pm ", "≈": "\\approx "}
    | {"∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "√": "\\sqrt "}
)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_ROOT = re.compile(r"√ ?([0-9]+(?:\.[0-9]+)?)")

FONT = (
    r"\\(?:text(?:bf|it|rm|sf|tt|sc|up|md|normal)?|mbox|math(?:rm|bf|it|sf|tt|bb)|operatorname|emph|bm|bold(?:symbol)?|underline"
    r"|(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?=\{)|(?:text)?color ?\{[a-z]+\})\*? ?"
)
_POWER = r"(?: ?\^ ?(?:[23]|\{[23]\}))?"
_UNIT = (
    r"square|cubic|sq\.?|units?|inch(?:es)?|f(?:ee|oo)t|miles?|mph|[kcm]m|(?:kilo|centi|milli)?meters?|[kgm]g|grams?"
    r"|gm|pounds?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|dollars?|cents?|degrees?|percent|ways?|integers?"
    r"|points?|digits?|meals?|edges?|students?|people|(?:children ?)?tickets|multiples"
)
# DAPO also cuts units out of words (`sue` from `issue`), and keeps their powers.
_UNITS = re.compile(rf"(?<![\\A-Za-z])(?:{_UNIT})(?![A-Za-z]){_POWER}")


def _in_digits(power):
    return format(decimal.Decimal(f"{power[1] or 1}e{power[2]}"), "f")


def _rules(*rules):
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


# Applied in this order, on text whose white space is single spaces. Matching takes linear time because no pattern
# begins with a repetition that could start again inside its own match.
_SPACES = _rules(
    (r"(?<!\\)\\!|(?<!\\)\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
    (r"(?<!\\)\\(?:displaystyle|textstyle|limits|boldmath|checkmark|therefore|implies)(?![A-Za-z])", ""),
    (r"(?<!\\)\\(?:bf|it|rm|sf|tt|tiny|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z{]) ?", ""),
    (r"(?<!\\)\\color ?\{[a-z]+\}(?! ?\{)", ""),
    (r"(?<!\\)\\(?:[hv]?phantom|[hv]space\*?) ?\{[^{}]*\}", ""),
    (r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~", " "),
    (r"\\\\ ?\[[0-9.]+ ?[a-z]{2}\]", r"\\\\"),  # extra space between rows
    (r"\{([,:])\}", r"\1"),
    (r"(?<!\\)\\(?:\$|(?:pounds|euro|yen|textdollar)(?![A-Za-z]))", ""),
    (r"(?<![\\A-Za-z])Rs\b\.?(?= ?[-0-9$])", ""),
    (r"(?<!\\)\\[()\[\]]|\$\$", "$"),
    (r"\.\$", "$"),
    (r" +", " "),
)
_TO_LATEX = _rules(
    # Units of one letter are recognizable by \text only.
    (rf"(?<=[^ $({{\[,=]) ?{FONT}\{{ ?[msgh] ?\}}{_POWER}", " "),
    (rf",? ?{FONT}\{{ ?and ?\}}", ","),
    (rf"{FONT}\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r" \1 "),
    (r"\\overline ?\{([A-Za-z]+)\}", r"\1"),  # of a segment; DAPO also makes 0.\overline{3} 0.3
    (r" +", " "),
)
_TO_PLAIN = _rules(
    # DAPO cuts `a ` and `an ` off the ends of words and out of `a + b`.
    (r"(?<![\\A-Za-z])(?:[Aa]n?|[Tt]he) (?!or |and )(?=[A-Za-z]{2})", ""),
    (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
    (r"\\lbrace(?![A-Za-z]) ?", r"\\{"),
    (r" ?\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\minus(?![A-Za-z])", "-"),
    (r"\\(?:approx|simeq)(?![A-Za-z])|^ ?\\sim(?![A-Za-z])", "="),
    (r"\\(?:leq?|leqslant)(?![A-Za-z])", "<="),
    (r"\\(?:geq?|geqslant)(?![A-Za-z])", ">="),
    (r"\\(?:times|ast)(?![A-Za-z])", r"\\cdot "),
    (r"(?<=[0-9]) ?x ?(?=10 ?\^)", r"\\cdot "),  # 1.5 x 10^8
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
    (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z])\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])sqrt ?([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
    (r"(?<![A-Za-z0-9.}])([0-9]+(?:\.[0-9]+)?)[eE]\+?(-?)0*([0-9]+)(?![A-Za-z0-9.])", r"\1\\cdot 10^{\2\3}"),
    (r"(?:\{ ?\})?\^ ?(?:\\circ|\{ ?(?:\\circ|o) ?\}|o(?![A-Za-z])|\\degree)(?: ?[CF](?![A-Za-z]))?", ""),
    (r"\\(?:text)?degree", ""),
    (r"(?<=[0-9]) ?(?:\^?\{ ?(?:st|nd|rd|th) ?\}|\^? ?(?:st|nd|rd|th)(?![A-Za-z]))", ""),  # 5th, 5^{\text{th}}
    (r"(?<=[0-9]) ?dozen(?![A-Za-z])", r"\\cdot 12 "),
    *(
        (rf"(?<=[0-9]) ?{word}(?![A-Za-z])", rf"\\cdot 10^{power} ")
        for word, power in {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}.items()
    ),
)
_TO_TEX = _rules(
    (r"\{((?:(?!\\over(?![A-Za-z]))[^{}])*+)\\over([^{}]*+)\}", r"\\frac{\1}{\2}"),
    # TeX's arguments without braces; DAPO makes \frac1{72} \frac{1}{{}72}.
    (r"\\(frac|sqrt) ?([0-9A-Za-z]|\\[A-Za-z]+)", r"\\\1{\2}"),
    (r"(\\frac\{(?:[^{}]|\{[^{}]*\})*\}) ?([0-9A-Za-z]|\\[A-Za-z]+)", r"\1{\2}"),
    (r"\\frac (?=\{)", r"\\frac"),
    (r"(\\frac\{[^{}]*\}) (?=\{)", r"\1"),
    (r"([\^_]) ?(-?[0-9]+|[A-Za-z])", r"\1{\2}"),  # x^2 is x^{2}
    (r"([0-9]) ([0-9]+)/([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),  # DAPO reads 3 1/2 as 31/2
    (r"[0-9]\.[0-9]{3}(?: [0-9]{3})* [0-9]{1,3}(?![0-9./])", lambda match: match[0].replace(" ", "")),  # 0.000 000 1
    (r" +", " "),
)
_TO_TEXT = _rules(
    (r" ?,? ?(?<![A-Za-z\\])and(?![A-Za-z]) ?", ", "),
    (r"\\?%", ""),  # 50\% is 50, as in Hendrycks's MATH
    (r"\\[lc]?dots(?![A-Za-z])", "..."),
    (r'"', ""),
    (r"(?<![0-9.,])([0-9]{1,3}(?: [0-9]{3})+)(?! ?[0-9])", lambda match: match[1].replace(" ", "")),
    (r"(?<![0-9]) | (?![0-9])", ""),  # all spaces except between digits: DAPO reads 5 6 as 56
    (r"(?<![0-9A-Za-z}])\.(?=[0-9])", "0."),
    (r"(?<![^-+/=,(])\{([0-9.]+)\}(?=[-+/=,)]|$)", r"\1"),
    (r"(?<![\w.^}/!])(?:([0-9]+(?:\.[0-9]+)?)\\cdot)?10\^\{(-?[0-9]{1,2})\}(?![\w.^{(!])", _in_digits),
    (r"(?<=[0-9])\.0+(?![0-9])", ""),
    (r"(\.[0-9]*[1-9])0+(?![0-9])", r"\1"),
    (r"(?<![0-9A-Za-z.,])0+(?=[0-9])", ""),
    (r"(?<![^(\[{,=])(?:\+|-(?=0(?![\w.\\])))", ""),  # of +5 and -0
    (r"(?<![^(\[{,=])\\frac\{-([0-9A-Za-z.]+)\}", r"-\\frac{\1}"),
    (r"(?<![^(\[{,=+-])([0-9]+)/([0-9]+)(?![^)\]},=+-])", r"\\frac{\1}{\2}"),
)
_TITLE = re.compile(r"(?<![\\A-Za-z])[A-Z][a-z]{2,}")  # Yes is yes; N and n, AB and ab differ
_GROUPED = re.compile(r"(?<![0-9.,(\[])[0-9]{1,3}(?:,[0-9]{3})+(?!,?[0-9])")
_STRUCTURE = re.compile(r"\\begin|\\end|[()\[\]{}]|,|(?<![\\A-Za-z])or(?![A-Za-z])|(?<![<>!])=")
COMMAND = re.compile(r"\\[A-Za-z]+")
_ALSO = re.compile(r"[0-9]|\bor\b")  # text beside a formula with one of these is part of the answer
_AROUND = " *`_\"'"


def latex(text: str) -> str:
    """An answer as LaTeX without delimiters, boxes, fonts, units and shorthand, for a parser."""
    text = _rewrite(_rewrite(formula(text), _TO_LATEX), _TO_PLAIN)
    bare = _UNITS.sub(" ", text)
    text = bare if bare.strip(_AROUND + ".,;:") else text  # `square` may be the answer
    return _rewrite(text, _TO_TEX).strip(_AROUND)


@functools.lru_cache(maxsize=1024)
def forms(text: str, last: bool = False) -> frozenset[str]:
    """The normal forms of an answer; none if it is empty.

    There is one for each reading of commas (1,000 is one number or two) and, if `last`, of equations.
    """
    plain = latex(text)
    readings = {_right_sides(plain, last=False)}
    if last and not re.search(r"\bor\b", plain):  # `x = 5 or x = 6` is not 6
        readings.add(_right_sides(plain, last=True))
    readings |= {_GROUPED.sub(lambda match: match[0].replace(",", ""), reading) for reading in readings}
    return frozenset(map(_normal, readings)) - {""}


def _normal(text: str) -> str:
    text = _rewrite(_TITLE.sub(lambda match: match[0].lower(), text), _TO_TEXT).lstrip(" ,;:").rstrip(" .,;:\\")
    text = re.sub(r"^\(([^(),;]*)\)$|^\{([^{},;]*)\}$", r"\1\2", text)  # the choice (A) is A, the number (5) is 5
    return re.sub(r"^\{([^{}]*)\}$", r"\\{\1\\}", text)  # a set typed without backslashes


def _rewrite(text, rules):
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _characters(text: str) -> str:
    """The text with Unicode mathematics as ASCII or LaTeX, and without invisible characters and currencies."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
        text = _ROOT.sub(r"\\sqrt{\1}", _VULGAR.sub(r" \g<0>", text)).replace("º", "°")
        text = "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Sc") or c == "$")
        text = unicodedata.normalize("NFKC", text).translate(_SYMBOLS)
    return re.sub(r"[\x00-\x1f\x7f]", " ", text)


def formula(text: str) -> str:
    r"""The only box or $...$ of a sentence; if the text has other answers, all of it without delimiters.

    DAPO keeps the first of several, so that `$5$ or $6$` is 5.
    """
    text = _rewrite(" ".join(_characters(text).split()).strip(_AROUND), _SPACES)
    boxes = list(BOX.finditer(text))
    if boxes:
        inside, end = box_at(text, boxes[-1].end())
        beside = text[: boxes[-1].start()] + text[end:]
        also = _ALSO.search(beside) if len(boxes) == 1 else BOX.sub("", beside).strip("{}$ ")  # boxes within boxes
        if inside is not None and not also:
            text = inside
    text = BOX.sub(" ", text)
    parts = text.split("$")
    if len(parts) == 3 and parts[1].strip() and not _ALSO.search(parts[0] + parts[2]):
        return parts[1]
    return "".join(parts)


def _right_sides(text: str, last: bool) -> str:
    """The text after its last equals sign if `last`, else the list without the left sides of its items.

    An equation with operators and variables on its left, such as x^2+y^2=5, is kept in a list. DAPO reduces every
    equation to its right side, and a list to the last right side, so that x=1,y=2 equals x=5,y=2.
    """
    kept, start, begin, depth = [], 0, 0, 0
    for match in _STRUCTURE.finditer(text):
        token = match[0]
        if token in ("\\begin", "(", "[", "{"):
            depth += 1
        elif token in ("\\end", ")", "]", "}"):
            depth = max(0, depth - 1)
        elif depth == 0 and token in (",", "or"):
            kept.append(text[start : match.end()])
            start = begin = match.end()
        elif depth == 0:
            if last:
                kept.clear()
            if last or not is_equation(text[begin : match.start()]):
                start = match.end()
            begin = match.end()
    return "".join([*kept, text[start:]])


def is_equation(left: str) -> bool:
    """Whether the left side of an equals sign makes an equation, such as x^2+y^2, not a definition, such as f(x)."""
    left = COMMAND.sub("", left)
    return bool(re.search("[A-Za-z]", left) and re.search(r"[-+*/^]", left))
