"""A report as a list of blocks, and its two renderings: one HTML page that needs nothing else, and Markdown."""

import pathlib
import re
import urllib.parse
from collections import namedtuple

import jinja2

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


def to_html(title: str, blocks) -> str:
    """One page: its figures are inline, and it refers to nothing outside."""
    return _render("page.html.jinja", blocks, title=title)


def to_markdown(blocks, stem: str) -> str:
    """The same in Markdown, with figures in files STEM-NAME.svg beside it; long responses are cut."""
    return _render("page.md.jinja", blocks, stem=urllib.parse.quote(stem))


def _render(template, blocks, **values) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), undefined=jinja2.StrictUndefined,
        autoescape=jinja2.select_autoescape(["html.jinja"]), keep_trailing_newline=True, trim_blocks=True,
        finalize=_printable,
    )  # fmt: skip
    environment.filters |= dict(plain=_plain, short=_short)
    kinds_and_blocks = [(type(block).__name__, block) for block in blocks]
    return environment.get_template(template).render(blocks=kinds_and_blocks, **values)


def _printable(value):
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


def _short(text: str) -> str:
    return text if len(text) <= CUT else f"{text[:CUT]} …"


def _plain(text) -> str:
    """Text that Markdown shows as it is: no marks, no formulas, and at its start no list, heading or quote."""
    text = re.sub(r"([\\`*_\[\]<|~$&])", r"\\\1", " ".join(_printable(text).split()))
    return re.sub(r"^(\d*)(>|[-+.)#]+ )", r"\1\\\2", text)
