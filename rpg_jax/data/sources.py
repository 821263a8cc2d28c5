"""Files as streams of records: dicts with at least the requested columns.

Dotted paths name columns: `reward_model.ground_truth` is a key of a struct, `final_answer.0` the first item of a list.
"""

import codecs
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from rpg_jax import InputError, gym

# Field -> columns that may hold it, of which the first that exists is read: the paper's format, then common ones.
FIELDS = {
    "problem": ("prompt", "problem", "question", "messages"),  # chat messages, or the problem as text
    "answer": ("reward_model.ground_truth", "answer", "ground_truth"),
    "solution": ("solution", "extra_info.solution"),  # worked; may be absent
}
_SHOWN = 20  # columns in an error
_BATCH = 4096  # parquet rows decoded at once


@dataclasses.dataclass(frozen=True)
class Source:
    """One opened source, to be read once."""

    title: str  # as the user gave it
    name: str  # name of the set: the file's stem
    unit: str  # "row" or "item", counted from 0, or "line", counted from 1
    total: int  # number of units
    fields: dict[str, tuple[str, ...]]  # FIELDS or the user's choice
    records: Iterator[tuple[int, dict]]  # (row or line number, record)

    def where(self, number: int) -> str:
        return f"{self.title}, {self.unit} {number}"


def listed(text: str) -> list[str]:
    """The titles in a text with commas between them; those inside parentheses are part of a title."""
    titles, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            titles.append("")
        else:
            titles[-1] += character
    return [title.strip() for title in titles if title.strip()]


def open_source(title: str, fields: dict[str, tuple[str, ...]] = FIELDS) -> Source:
    """Opens FILE.parquet, FILE.jsonl, or FILE.json, which is one list of rows or has a row in each line.

    Raises ValueError: the source is of an unknown kind, is not there, cannot be read, or lacks a column; names source
    and column. Reading the records raises it too, with the row or line.
    """
    path = pathlib.Path(title)
    openers = {".parquet": _open_parquet, ".jsonl": _open_jsonl, ".json": _open_json}
    if path.suffix.lower() not in openers:
        raise InputError(f"{title!r} is no source; expected FILE.parquet, FILE.jsonl or FILE.json")
    if not os.path.isfile(title):
        raise InputError(f"{title}: there is no such file")
    return openers[path.suffix.lower()](path, title, fields)


def open_gym(titles: list[str], split: str) -> list[Source]:
    """One source for each family of reasoning-gym that is named, in order; to be read one after another.

    Raises ValueError for a title that is not of the form that `gym.parse` reads; reading the sources raises as
    `gym.drawn` does.
    """
    parts = [(title, part) for title in titles for part in gym.parse(title)]
    replies = gym.drawn([part for _, part in parts], split, ", ".join(titles))
    columns, sources = {"problem": ("question",), "answer": ("answer",), "solution": ()}, []
    for title, part in parts:
        records = enumerate(itertools.islice(replies, part.size))
        sources.append(Source(title, f"{gym.PREFIX}{part.family}", "item", part.size, columns, records))
    return sources


def pick(record: dict, paths: Sequence[str]) -> tuple[str | None, Any]:
    """(path, value) of the first of `paths` that the record has; (None, None) if it has none."""
    for path in paths:
        try:
            return path, _dig(record, path)
        except LookupError:
            pass
    return None, None


def lacking(where: str, kind: str, paths: Sequence[str], record: dict) -> InputError:
    """The error for a record, or a file of such records, without a required column."""
    names = list(_names(record))
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
    return InputError(
        f"{where}: no column {' or '.join(paths)} for the {kind}; there are {', '.join(shown) or 'none'}; "
        f"name one with --{kind}_field of rpg_jax.prepare"
    )


def _names(record):
    """The dotted paths of a record's leaves and lists."""
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{below}" for below in _names(value))
        else:
            yield str(key)


def _dig(value, path):
    """The value at a dotted path, also below a text that is JSON; None below a null.

    Raises LookupError if the path does not exist.
    """
    if isinstance(value, (str, bytes)):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise LookupError(path) from None
    if isinstance(value, dict) and path in value:
        return value[path]
    head, _, rest = path.partition(".")
    if isinstance(value, dict) and rest:
        value = value[head]
    elif isinstance(value, Sequence) and not isinstance(value, str) and head.isdecimal():
        value = value[int(head)]
    else:
        raise LookupError(path)
    return value if value is None or not rest else _dig(value, rest)


def _name(path):
    """The stem of a file's name as UTF-8, whatever the locale says that names are in."""
    return os.fsencode(path.stem).decode(errors="replace")


def _open_parquet(path, title, fields):
    import pyarrow as pa
    import pyarrow.parquet as pq

    broken = (pa.ArrowException, OSError, UnicodeDecodeError)
    try:
        # The default keeps all that was read in memory.
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except broken as error:
        raise InputError(f"{title}: not a whole parquet file ({error})") from error
    names = file.schema_arrow.names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{title}: has {names.count(twice)} columns named {twice!r}; rename or remove all but one")

    def records():
        number = 0
        try:
            for rows in map(pa.RecordBatch.to_pylist, file.iter_batches(_BATCH)):  # whatever the row groups
                yield from enumerate(rows, number)
                number += len(rows)
        except (*broken, ValueError, OverflowError) as error:  # of a time that Python has not
            raise InputError(f"{title}, from row {number} on: {error}") from error

    return Source(title, _name(path), "row", file.metadata.num_rows, fields, records())


def _open_jsonl(path, title, fields):
    with path.open("rb") as file:
        total = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))

    def records():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                try:
                    record = json.loads(line.decode())
                except (ValueError, RecursionError) as error:
                    raise InputError(f"{title}, line {number}: not JSON ({error})") from error
                yield number, _object(record, f"{title}, line {number}")

    return Source(title, _name(path), "line", total, fields, records())


def _open_json(path, title, fields):
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", None) == "Extra data":  # after the first line
            return _open_jsonl(path, title, fields)
        raise InputError(f"{title}: not JSON ({error})") from error
    keys = [key for key, value in rows.items() if isinstance(value, list)] if isinstance(rows, dict) else []
    if isinstance(rows, dict) and (not keys or isinstance(pick(rows, fields["answer"])[1], (str, int, float))):
        rows = [rows]  # of one line
    if not isinstance(rows, list):
        mend = f"; write what is under {keys[0]!r:.{_SHOWN}} alone" if len(keys) == 1 else ""
        raise InputError(f"{title}: holds {type(rows).__name__}; expected a list of rows, or a row in each line{mend}")
    records = ((i, _object(row, f"{title}, item {i}")) for i, row in enumerate(rows))
    return Source(title, _name(path), "item", len(rows), fields, records)


def _object(record, where):
    if not isinstance(record, dict):
        raise InputError(f"{where}: holds {type(record).__name__}; expected a JSON object")
    return record
