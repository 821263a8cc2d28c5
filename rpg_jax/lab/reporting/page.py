"""A report's Markdown: text and names as they are, tables, and figures in files beside it."""

import re
from collections import namedtuple

# A cell of a table whose mark is best, second or nothing; other cells are strings.
Cell = namedtuple("Cell", "text mark", defaults=[""])
# A block of a report that is drawn: `name` is that of its file. Other blocks are Markdown.
Figure = namedtuple("Figure", "name svg caption")
MARKS = {"best": "**{}**", "second": "<ins>{}</ins>"}  # GitHub takes no <u>


def table(header: list[str], rows: list[list]) -> str:
    """Markdown of a table of strings and Cells; all columns but the first are numbers."""
    lines = [[plain(name) for name in header], ["---", *["---:"] * (len(header) - 1)]]
    lines += [[_cell(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(cell: str | Cell) -> str:
    text, mark = (cell, "") if isinstance(cell, str) else cell
    return MARKS.get(mark, "{}").format(plain(text))


def plain(text: str) -> str:
    """Text that Markdown shows as it is: no marks, no formulas, and at its start no list, heading or quote."""
    text = re.sub(r"([\\`*_\[\]<|~$&])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^(\d*)(>|[-+.)#]+ )", r"\1\\\2", text)
