"""What a run has written, read as far as it is whole: its folder may be of a run that goes on, or that crashed."""

import json
import pathlib


def read_json(path) -> dict | None:
    """The object in a file; None when there is no file, or no object in it."""
    try:
        found = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_rows(path) -> tuple[dict, int]:
    """({step: row}, lines that were lost) of a `metrics.jsonl`; of two rows of a step the later one holds.

    A line counts as lost when it is not a whole JSON object with a step; without a file there are none.
    """
    try:
        lines = pathlib.Path(path).read_bytes().split(b"\n")
    except OSError:
        return {}, 0
    rows, lost = {}, 0
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rows[_step(row)] = row
        except (ValueError, RecursionError):  # not JSON, or too deep for its reader
            lost += 1
    return dict(sorted(rows.items())), lost


def _step(row) -> int:
    step = row.get("step") if isinstance(row, dict) else None
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError("no row of a step")
    return step
