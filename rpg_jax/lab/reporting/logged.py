"""What the numbers of a run's log are called, and which of them are numbers."""

import math
import re
import sys

SCORE = re.compile(r"eval/(.+)/mean@(\d+)")
ALL = "all"  # every problem of every task, counted once


def finite(value) -> float:
    """A finite number as float; NaN for anything else that a log may hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if is_number else math.nan
