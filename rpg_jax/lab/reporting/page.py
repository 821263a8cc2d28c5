"""A report as a list of blocks, and its two renderings: one HTML page that needs nothing else, and Markdown."""

import html
import re
import urllib.parse
from typing import NamedTuple

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 1180px; margin: 2em auto;
  padding: 0 1.2em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid #999; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .6em 0; font-size: .9em; }
th, td { border-bottom: 1px solid #bbb; padding: .25em .7em; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #111; }
.many { font-size: .8em; } .many th, .many td { white-space: normal; padding: .25em .45em; }
.interval { white-space: nowrap; } .many td:first-child { position: sticky; left: 0; background: #fff; }
td.text { text-align: left; white-space: normal; min-width: 12em; }
u { text-underline-offset: 3px; } figure { margin: 1em 0; } figcaption, .note { color: #333; font-size: .92em; }
svg { max-width: 100%; height: auto; } @media print { body { max-width: none; } }
""".strip()


class Heading(NamedTuple):
    text: str
    level: int = 2


class Text(NamedTuple):
    text: str


class Bullets(NamedTuple):
    lines: list[str]


class Cell(NamedTuple):
    text: str
    mark: str = ""  # best, second, or nothing


class Table(NamedTuple):
    header: list[str]
    rows: list[list]  # of Cells or strings


class Figure(NamedTuple):
    name: str  # of its file beside the Markdown
    svg: str
    caption: str


MARKS = {"best": ("<b>", "</b>"), "second": ("<u>", "</u>"), "": ("", "")}
MARKDOWN_MARKS = {"best": ("**", "**"), "second": ("<ins>", "</ins>"), "": ("", "")}  # GitHub takes no <u>


def to_html(title: str, blocks) -> str:
    """One page: its figures are inline, and it refers to nothing outside."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n'
        f"{body}\n</body>\n</html>\n"
    )


def to_markdown(blocks, stem: str) -> str:
    """The same in Markdown, with figures in files STEM-NAME.svg beside it."""
    return "\n\n".join(_markdown(block, stem) for block in blocks) + "\n"


def _html(block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Bullets(lines):
            return "<ul>\n" + "\n".join(f"<li>{html.escape(line)}</li>" for line in lines) + "\n</ul>"
        case Figure(_, svg, caption):
            return f"<figure>\n{svg}\n<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
        case Table(header, rows):
            many = ' class="many"' if len(header) > 9 or len("".join(header)) > 90 else ""
            head = "".join(f"<th>{html.escape(word)}</th>" for word in header)
            lines = ["".join(_html_cell(cell) for cell in row) for row in rows]
            body = "\n".join(f"<tr>{line}</tr>" for line in lines)
            table = f"<table{many}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
            return f'<div class="wide">{table}</div>'


def _html_cell(cell) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    before, after = MARKS[cell.mark]
    kind = ' class="text"' if len(cell.text) > 40 else ""
    text = re.sub(r"\(?[0-9.]+ – [0-9.]+\)?", r'<span class="interval">\g<0></span>', html.escape(cell.text))
    return f"<td{kind}>{before}{text}{after}</td>"


def _markdown(block, stem) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Bullets(lines):
            return "\n".join(f"* {_plain(line)}" for line in lines)
        case Figure(name, _, caption):
            return f"![{name}]({urllib.parse.quote(stem)}-{name}.svg)\n\n{_plain(caption)}"
        case Table(header, rows):
            rule = "|".join([" --- ", *[" ---: "] * (len(header) - 1)])
            lines = [
                " | ".join(map(_plain, header)),
                rule.strip(),
                *(" | ".join(map(_markdown_cell, row)) for row in rows),
            ]
            return "\n".join(f"| {line} |" for line in lines)


def _markdown_cell(cell) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    before, after = MARKDOWN_MARKS[cell.mark]
    return f"{before}{_plain(cell.text)}{after}"


def _plain(text) -> str:
    """Text that Markdown shows as it is: no marks, no formulas, and at its start no list, heading or quote."""
    text = re.sub(r"([\\`*_\[\]<|~$&])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^(\d*)(>|[-+.)#]+ )", r"\1\\\2", text)
