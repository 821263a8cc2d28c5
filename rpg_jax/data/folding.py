"""From records to problems: checks, prompt template, one problem for repeated rows, unique ids."""

import contextlib
import dataclasses
import datetime
import decimal
import functools
import hashlib
import json
import numbers
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rpg_jax import InputError
from rpg_jax.answer import BOX, box_at
from rpg_jax.data.problems import Problem
from rpg_jax.data.sources import Source, lacking, pick
from rpg_jax.data.templates import TEMPLATES
from rpg_jax.gym import PREFIX

_SHOWN = 40  # characters of an answer in an error
_MESSAGES = re.compile(r"\s*(?:array\()?\[?\s*\{(?=.*[\"'](?:role|from)[\"']\s*:)", re.DOTALL)
_MARKED = re.compile(r"(?:.*\s)?####(?!#)\s*(\S.*)")  # in the last line, as the next one
_ANSWER = re.compile(
    r"[\s*]*(?:(?:so|thus|hence|therefore),? +)?(?:the )?(?:final |correct )?"
    r"answer[\s*]*(?:\bis\b[\s*]*:?|:)[\s*]*(\S.*)",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"-?[$]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Folded:
    """The distinct problems of several sources, in the order of their first rows."""

    problems: list[Problem]  # prompt: JSON of the chat messages, [{"role": …, "content": …}, …]
    origins: list[str]  # the first row of each problem, "FILE, row 3"
    read: int  # number of rows
    contradicted: int  # problems left out because their rows disagree on the answer


def fold(
    sources: Iterable[Source],
    template: Callable[[str], str] = TEMPLATES["paper"].format,
    name: str | None = None,
    conflicts: str = "refuse",
    progress: Callable[[int], None] = lambda done: None,
) -> Folded:
    """Reads sources to their end. Rows with the same messages are one problem; memory grows with problems, not rows.

    Args:
      template: makes a user message of a problem that is text; chat messages are not changed.
      name: the problems' task; if None, the name of the source with a problem's first row.
      conflicts: "refuse" raises when the same messages come with different answers; "drop" leaves the problem out.
      progress: called with the number of rows read, every 4,096 rows.

    Raises ValueError with file, row and column of a value that is missing, null, empty or of a wrong type, or with both
    rows of contradicting answers; and where there is no row.
    """
    sources = list(sources)
    distinct, contradictions, read = {}, {}, 0  # {messages: (task, solution, answer, columns, first row)}
    for source in sources:
        task, is_gym = name or source.name, source.title.startswith(PREFIX)  # whose answers are JSON for its families
        if task.startswith(PREFIX) and not is_gym:
            raise InputError(f"{source.title}: {task!r} is for reasoning-gym; rpg_jax.prepare --name gives another")
        for number, record in source.records:
            read += 1
            if not read % 4096:
                progress(read)
            ends = pick(record, source.fields["problem"])[0] == "prompt"  # a column `messages` goes on with the reply
            read_chat = functools.partial(_messages, template=template, ends=ends)
            messages, reply = _column(source, number, record, "problem", read_chat)
            answer = _column(source, number, record, "answer", _text if is_gym else _answer, reply)
            earlier = distinct.get(messages)
            if earlier is None:
                solution = _column(source, number, record, "solution", _text, reply) or ""
                distinct[messages] = (task, solution, answer, columns_of(record), source.where(number))
            elif earlier[2] != answer:
                contradictions.setdefault(messages, (earlier[2], earlier[-1], answer, source.where(number)))
    progress(read)
    if not distinct:
        raise InputError(f"{', '.join(source.title for source in sources)}: holds no rows")
    if contradictions and conflicts == "refuse":
        first, origin, second, other = next(iter(contradictions.values()))
        raise InputError(
            f"{origin}, and {other}: the same problem with the answers {first[:_SHOWN]!r} and {second[:_SHOWN]!r} "
            f"({len(contradictions)} such problems); mend them, or leave them out by rpg_jax.prepare --conflicts=drop"
        )
    for messages in contradictions:
        del distinct[messages]
    if not distinct:
        raise InputError(f"{sources[0].title}: no problems are left, the answers of all contradict each other")
    prompts = [
        json.dumps([{"role": role, "content": content} for role, content in messages], ensure_ascii=False)
        for messages in distinct
    ]
    rows = zip(_ids(prompts), prompts, distinct.values(), strict=True)
    problems = [Problem(i, task, prompt, *rest) for i, prompt, (task, *rest, _) in rows]
    return Folded(problems, [origin for *_, origin in distinct.values()], read, len(contradictions))


def columns_of(record: dict) -> dict[str, Any]:
    """The columns of a row as JSON values; one that JSON cannot hold, such as an image, is left out."""
    columns = {}
    for name, value in record.items():
        with contextlib.suppress(TypeError, ValueError):
            text = json.dumps(value, default=_plain, ensure_ascii=False)
            text.encode()  # raises for half of a surrogate pair, which cannot be stored
            columns[str(name)] = json.loads(text)
    return columns


def _plain(value):
    """A value that JSON lacks as one that it has; raises TypeError or ValueError if there is none."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    raise TypeError(type(value).__name__)


def _column(source, number, record, kind, convert, reply=None):
    """The converted value of a record's column, or what its reply says; None for a missing solution."""
    path, value = pick(record, source.fields[kind])
    if path is None and reply is not None:
        path, value = source.fields["problem"][-1], reply
    if value is None and kind == "solution":
        return None
    if path is None:
        raise lacking(source.where(number), kind, source.fields[kind], record)
    try:
        if value is None:
            raise InputError("is null; give the row a value, or take it out")
        if kind == "answer" and isinstance(value, (dict, list)):
            key = next(iter(value), "KEY") if isinstance(value, dict) else 0
            raise InputError(
                f"is {type(value).__name__}; name what it holds with --answer_field={path}.{key} of rpg_jax.prepare"
            )
        return convert(value)
    except ValueError as error:
        raise InputError(f"{source.where(number)}, column {path}: {error}") from error


def _messages(value, template, ends):
    """((role, content), …) of a problem that is text, chat messages, or JSON of them, and the reply that follows."""
    if isinstance(value, (str, bytes)):
        text = _text(value)
        if not _MESSAGES.match(text):
            return (("user", template(_filled(text))),), None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise InputError("begins like chat messages and is not JSON; write them with json.dumps") from None
    if not isinstance(value, list):
        raise InputError(f"is {type(value).__name__}; expected text, or a list of messages with role and content")
    if not value:
        raise InputError("is empty; expected at least one message")
    messages, reply = [_message(i, message) for i, message in enumerate(value)], None
    if messages[-1][0] == "assistant" and len(messages) > 1 and not ends:
        _, reply = messages.pop()
    role, content = messages[-1]
    if role == "assistant":
        raise InputError("ends with the assistant's message; a prompt ends before the response")
    _filled(content)
    return tuple(messages), reply


def _message(i, message):
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise InputError(f"message {i} is no object with role and content")
    role, content = message["role"], _joined(i, message["content"])
    for key, value in (("role", role), ("content", content)):
        if not isinstance(value, (str, bytes)):
            kind = "null" if value is None else type(value).__name__
            raise InputError(f"the {key} of message {i} is {kind}; expected text")
    return _text(role), _text(content)


def _joined(i, content):
    """The content of a message, a list of parts {"type": "text", "text": …} as one text, as chat templates write it."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = str(part.get("type"))
            raise InputError(f"the content of message {i} has a part of type {kind!r:.{_SHOWN}}; only text is read")
    return "".join(part["text"] for part in content)


def _answer(value) -> str:
    return _filled(stated(_text(value)).strip())


def stated(text: str) -> str:
    r"""The answer that a worked solution states, or the text as it is.

    It stands after the last `####` (GSM8K), in the last \boxed{…} (MATH), between <answer> and </answer>, or after
    `Answer:` in the last line.
    """
    last = text.rstrip().rpartition("\n")[2]
    if found := _MARKED.match(last):
        return found[1].replace(",", "") if _THOUSANDS.fullmatch(found[1]) else found[1]
    if boxes := list(BOX.finditer(text)):
        inside, _ = box_at(text, boxes[-1].end())
        if inside is None:
            raise InputError(f"has a box that is never closed: {text[boxes[-1].end() :]!r:.{_SHOWN}}")
        return inside
    end = text.rfind("</answer>")
    if (start := text.rfind("<answer>", 0, max(end, 0))) >= 0:
        return text[start + len("<answer>") : end]
    if found := _ANSWER.match(last):
        return found[1].rstrip(" *.")
    return text


def _filled(text):
    if not text or text.isspace():
        raise InputError("is empty; give the row a value, or take it out")
    return text


def _text(value) -> str:
    """Text as it is; a number as its shortest decimal, 540.0 as "540"."""
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        value.encode()  # raises for half of a surrogate pair, which cannot be stored
        return value
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, decimal.Decimal)):
        raise InputError(f"is {type(value).__name__}; expected text or a number: write it as text")
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, float) and not value.is_integer() and float(np.float32(value)) == value:
        value = np.float32(value)  # a value of a 32-bit column: 0.1, not its 64-bit 0.10000000149011612
    exact = decimal.Decimal(str(value))
    if not exact.is_finite():
        raise InputError(f"is {value}; expected text or a finite number")
    digits = f"{exact or abs(exact):f}"  # -0.0 is 0
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _ids(prompts):
    """Stable 31-bit ids: a hash of each prompt, or the next free number if two collide."""
    taken = set()
    for prompt in prompts:
        number = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest()) >> 1
        while number in taken:
            number = (number + 1) % 2**31
        taken.add(number)
        yield number
