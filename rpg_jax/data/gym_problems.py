"""Problems of reasoning-gym, as sources that are written `gym:chain_sum(max_terms=2, size=300) + gcd(size=60)`.

Parameters are those of the families' configs; `python -m rpg_jax.prepare --list_gym` shows them. `size` is the number
of distinct problems (500 unless it is given), `seed` chooses which (0).
"""

import ast
import itertools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from rpg_jax import InputError
from rpg_jax.data.sources import Source

PREFIX = "gym:"
_WORKER = pathlib.Path(__file__).with_name("gym_worker.py")
_SIZE, _MOST_SEED = 500, 2047
_COLUMNS = {"problem": ("question",), "answer": ("answer",), "solution": ()}


class Part(NamedTuple):
    """The problems of one family."""

    family: str
    parameters: dict[str, Any]
    seed: int
    size: int


def open_gym(titles: list[str], split: str) -> list[Source]:
    """One source for each family that is named, in order; to be read one after another.

    Args:
      split: "train" or "heldout". No question is in both, whatever their parameters and seeds.

    Raises:
      ValueError: a title is not of the form above. Reading the sources raises it for an unknown family or parameter, a
        value that the family refuses, and for a family with fewer problems.
    """
    parts = [(title, part) for title in titles for part in parse(title)]
    replies = _replies({"parts": [part._asdict() for _, part in parts], "split": split}, ", ".join(titles))
    return [
        Source(
            title,
            f"{PREFIX}{part.family}",
            "item",
            part.size,
            _COLUMNS,
            enumerate(itertools.islice(replies, part.size)),
        )
        for title, part in parts
    ]


def families() -> dict[str, dict[str, str]]:
    """{family: {parameter: the text of its default}}. Raises ValueError if reasoning-gym is not installed."""
    return next(_replies(None, "reasoning-gym"))


def parse(title: str) -> list[Part]:
    """The parts of a title; raises ValueError that quotes what is not of the form."""
    form = f"{title}: expected gym:FAMILY(PARAMETER=VALUE, ...) + ..., such as gym:chain_sum(max_terms=2, size=300)"
    try:
        node = ast.parse(title.replace(PREFIX, "").strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise InputError(f"{form} ({error})") from None
    nodes = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        nodes.append(node.right)
        node = node.left
    return [_part(title, form, node) for node in [node, *reversed(nodes)]]


def _part(title, form, node) -> Part:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args or not all(word.arg for word in call.keywords):
        raise InputError(form)
    try:
        values = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        json.dumps(values)
    except (ValueError, TypeError):
        raise InputError(
            f"{form}; the values of {call.func.id} must be numbers, strings, lists, True or False"
        ) from None
    part = Part(call.func.id, values, values.pop("seed", 0), values.pop("size", _SIZE))
    for name, least, most in (("seed", 0, _MOST_SEED), ("size", 1, 1 << 20)):
        value = getattr(part, name)
        if type(value) is not int or not least <= value <= most:
            raise InputError(f"{title}: {name} of {part.family} is {value!r}; expected a number in {least}..{most}")
    return part


def _replies(request, title: str) -> Iterator[dict]:
    """The worker's replies; raises ValueError with what it says instead."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    with process:
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.close()
            for line in process.stdout:
                reply = json.loads(line)
                if "error" in reply:
                    raise InputError(f"{title}: {reply['error']}")
                yield reply
            if status := process.wait():
                raise InputError(f"{title}: the process that draws its problems ended with status {status}")
        finally:
            process.kill()
