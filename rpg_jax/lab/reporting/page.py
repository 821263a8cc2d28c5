"""A report as a list of blocks, and its two renderings: one HTML page that needs nothing else, and Markdown."""

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

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1.2em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #999; }
h3 { font-size: 1em; margin-bottom: .3em; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6em 0; font-size: .9em; }
th, td { border-bottom: 1px solid #bbb; padding: .25em .7em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #111; }
.many { font-size: .8em; } .many th, .many td { white-space: normal; padding: .25em .45em; }
.many td:first-child { position: sticky; left: 0; background: #fff; }
td.text { text-align: left; white-space: normal; min-width: 12em; }
td.quote, blockquote { text-align: left; font-family: ui-monospace, monospace; font-size: .9em; white-space: pre-wrap;
  overflow-wrap: anywhere; } td.quote { max-width: 60em; } blockquote { margin: .3em 0 .3em 1em; }
table:has(td.quote) :is(th, td) { text-align: left; }
u { text-underline-offset: 3px; } figure { margin: 1em 0; } figcaption { color: #333; font-size: .92em; }
svg { max-width: 100%; height: auto; } @media print { body { max-width: none; } }
""".strip()

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<meta name="viewport" content="width=device-width">
<style>
{{ style }}
</style>
</head>
<body>
{{ blocks | join("\n") }}
</body>
</html>
"""
HTML = {
    Heading: "<h{{ level }}>{{ text }}</h{{ level }}>",
    Text: "<p>{{ text }}</p>",
    Quote: "<blockquote>{{ text | cut }}</blockquote>",
    Bullets: "<ul>\n{% for line in lines %}<li>{{ line }}</li>\n{% endfor %}</ul>",
    Figure: "<figure>\n{{ svg | safe }}\n<figcaption>{{ caption }}</figcaption>\n</figure>",
    Table: """<div class="wide"><table class="{{ 'many' if header | length > 9 or header | join | length > 90 }}">
<thead><tr>{% for word in header %}<th>{{ word }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row %}{{ cell | cell }}{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>""",
}
CELLS = {
    "": "<td>{}</td>",
    "text": '<td class="text">{}</td>',
    "best": "<td><b>{}</b></td>",
    "second": "<td><u>{}</u></td>",
    "quote": '<td class="quote">{}</td>',
}
MARKDOWN = {
    Heading: "{{ '#' * level }} {{ text | plain }}",
    Text: "{{ text | plain }}",
    Quote: "{{ text | short | plain }}",
    Bullets: "{% for line in lines %}* {{ line | plain }}{{ '' if loop.last else '\n' }}{% endfor %}",
    Figure: "![{{ name }}]({{ stem }}-{{ name }}.svg)\n\n{{ caption | plain }}",
    Table: """| {{ header | map("plain") | join(" | ") }} |
| --- |{{ " ---: |" * (header | length - 1) }}
{% for row in rows %}| {{ row | map("cell") | join(" | ") }} |{{ '' if loop.last else '\n' }}{% endfor %}""",
}
MARKDOWN_CELLS = {"": "{}", "best": "**{}**", "second": "<ins>{}</ins>", "quote": "{}"}  # GitHub takes no <u>


def to_html(title: str, blocks) -> str:
    """One page: its figures are inline, and it refers to nothing outside."""
    environment = _environment(autoescape=True, cut=_cut, cell=_html_cell)
    rendered = [Markup(environment.from_string(HTML[type(block)]).render(block._asdict())) for block in blocks]
    return environment.from_string(PAGE).render(title=title, style=Markup(STYLE), blocks=rendered)


def to_markdown(blocks, stem: str) -> str:
    """The same in Markdown, with figures in files STEM-NAME.svg beside it; long responses are cut."""
    environment = _environment(autoescape=False, plain=_plain, short=_short, cell=_markdown_cell)
    stem = urllib.parse.quote(stem)
    rendered = [environment.from_string(MARKDOWN[type(block)]).render(block._asdict(), stem=stem) for block in blocks]
    return "\n\n".join(rendered) + "\n"


def _environment(autoescape, **filters) -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=autoescape, undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_printable
    )
    environment.filters |= filters
    return environment


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
