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
