"""Reads what a run has written, as far as it is whole: the run may still be going on, or may have crashed."""

import json
import math
import pathlib
import re
import sys

SCORE = re.compile(r"eval/(.+)/mean@(\d+)")
ALL = "all"  # every problem of every task, counted once


def finite(value) -> float:
    """A finite number as float; NaN for anything else that a log may hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_number else math.nan


def read_json(path) -> dict | None:
    """The JSON object in a file; None when there is no file, or no object in it."""
    try:
        value = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_rows(path) -> tuple[dict, int]:
    """({step: row}, lines lost) of a `metrics.jsonl`, ordered by step; the later one of two rows of a step counts.

    A missing file has no rows. A line counts as lost when it is not a whole JSON object with an integer `step`.
    """
    try:
        lines = pathlib.Path(path).read_bytes().split(b"\n")
    except OSError:
        return {}, 0
    rows, lost = {}, 0
    for line in filter(bytes.strip, lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, or nested too deeply for its reader
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int and abs(row["step"]) < 2**53:
            rows[row["step"]] = row
        else:
            lost += 1
    return dict(sorted(rows.items())), lost
