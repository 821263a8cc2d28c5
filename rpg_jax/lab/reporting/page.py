"""A report as a list of blocks, and its two renderings: one HTML page that needs nothing else, and Markdown."""

import pathlib
import re
import urllib.parse
from collections import namedtuple

import jinja2
from markupsafe import Markup

CUT = 240  # characters of a response that are shown without unfolding it
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # untrained policies write such characters, and HTML forbids them


# The blocks of a report. A table's header is strings, its rows are lists of strings or Cells; a Cell's mark is best,
# second, quote or nothing. A quote is of a model or a data set, and may be long. A figure's name is that of its file.
Heading = namedtuple("Heading", "text level", defaults=[2])
Text = namedtuple("Text", "text")
Quote = namedtuple("Quote", "text")
Bullets = namedtuple("Bullets", "lines")
Cell = namedtuple("Cell", "text mark", defaults=[""])
Table = namedtuple("Table", "header rows")
Figure = namedtuple("Figure", "name svg caption")

CELLS = {
    "": "<td>{}</td>",
    "text": '<td class="text">{}</td>',
    "best": "<td><b>{}</b></td>",
    "second": "<td><u>{}</u></td>",
    "quote": '<td class="quote">{}</td>',
}
MARKDOWN_CELLS = {"": "{}", "best": "**{}**", "second": "<ins>{}</ins>", "quote": "{}"}  # GitHub takes no <u>


def to_html(title: str, blocks) -> str:
    """One page: its figures are inline, and it refers to nothing outside."""
    return _render("page.html.jinja", blocks, dict(cut=_cut, cell=_html_cell), title=title)


def to_markdown(blocks, stem: str) -> str:
    """The same in Markdown, with figures in files STEM-NAME.svg beside it; long responses are cut."""
    filters = dict(plain=_plain, short=_short, cell=_markdown_cell)
    return _render("page.md.jinja", blocks, filters, stem=urllib.parse.quote(stem))


def _render(template, blocks, filters, **values) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=template == "page.html.jinja",
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, finalize=_printable,
    )  # fmt: skip
    environment.filters |= filters
    kinds_and_blocks = [(type(block).__name__, block) for block in blocks]
    return environment.get_template(template).render(blocks=kinds_and_blocks, **values)


def _printable(value):
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


def _html_cell(cell) -> Markup:
    text, mark = (cell, "") if isinstance(cell, str) else cell
    kind = "text" if not mark and len(text) > 40 else mark
    return Markup(CELLS[kind]).format(_cut(text) if mark == "quote" else text.replace(" – ", "\xa0–\xa0"))


def _cut(text: str) -> Markup:
    """A text whose end unfolds where it is long."""
    text = _printable(text)
    if len(text) <= CUT:
        return Markup("{}").format(text)
    return Markup("<details><summary>{}</summary>{}</details>").format(_short(text), text)


def _short(text: str) -> str:
    return text if len(text) <= CUT else f"{text[:CUT]} …"


def _markdown_cell(cell) -> str:
    text, mark = (cell, "") if isinstance(cell, str) else cell
    return MARKDOWN_CELLS[mark].format(_plain(_short(text) if mark == "quote" else text))


def _plain(text) -> str:
    """Text that Markdown shows as it is: no marks, no formulas, and at its start no list, heading or quote."""
    text = re.sub(r"([\\`*_\[\]<|~$&])", r"\\\1", " ".join(_printable(text).split()))
    return re.sub(r"^(\d*)(>|[-+.)#]+ )", r"\1\\\2", text)
