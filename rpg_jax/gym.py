"""Problems of reasoning-gym, as sources that are written `gym:chain_sum(max_terms=2, size=300) + gcd(size=60)`.

Parameters are those of the families' configs; `python -m rpg_jax.prepare --list_gym` shows them. `size` is the number
of distinct problems (500 unless it is given), `seed` chooses which (0). A family's item i of seed s is item 0 of seed
s + i, so seeds near each other draw the same items: those of a title lie `_STRIDE` apart. Problems are split by a hash
of their question, whatever their seed: no question is in both splits.

Problems are drawn and scored in processes of their own, because families load heavy packages, and because the items of
some depend on Python's hash seed, which is fixed for a process. This module, run as one, draws: a line of JSON in, a
line for each problem out. `credit` and `gym` score in the workers of `rpg_jax.rewards`, where the item is drawn again
from what the problem's answer records, because families score with data that JSON cannot hold.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rpg_jax import InputError

PREFIX = "gym:"
_SIZE, _MOST_SEED = 500, 2047
_HELDOUT_SHARE = 8  # one question in eight is held out
_CHUNK = 500  # items of one dataset of reasoning-gym; it draws more from the next seed
_STRIDE = 1 << 20  # items of one seed
_PATIENCE = 2000  # items in a row without a new question, after which a family has no more
_OURS = ("seed", "size")


class Part(NamedTuple):
    """The problems of one family."""

    family: str
    parameters: dict[str, Any]
    seed: int
    size: int


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


def _part(title: str, form: str, node: ast.expr) -> Part:
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


def drawn(parts: list[Part], split: str, title: str) -> Iterator[dict]:
    """The problems of all parts, one part after the other, as `problems` makes them, in a process of their own.

    Args:
      split: "train" or "heldout"; title: of errors.

    Raises:
      ValueError: for an unknown family or parameter, a value that the family refuses, and a family with fewer problems.
    """
    return _replies({"parts": [part._asdict() for part in parts], "split": split}, title)


def own_answer(answer: str) -> str:
    """The family's own answer in the record that `problems` writes as a problem's answer; "" if it gives none."""
    own = json.loads(answer)["answer"]
    return "" if own is None else str(own)


def line_about(problems: list) -> str | None:
    """A line about the families among `Problem`s whose items have no answer of their own; None if there are none."""
    ours = [problem for problem in problems if problem.task.startswith(PREFIX)]
    bare = {problem.task for problem in ours if json.loads(problem.answer)["answer"] is None}
    return f"{', '.join(sorted(bare))}: has no answers of its own; its rule alone judges" if bare else None


def families() -> dict[str, dict[str, str]]:
    """{family: {parameter: the text of its default}}. Raises ValueError if reasoning-gym is not installed."""
    return next(_replies(None, "reasoning-gym"))


def _replies(request: dict | None, title: str) -> Iterator[dict]:
    """The replies of this module as a process; raises ValueError with what it says instead."""
    path = [str(pathlib.Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rpg_jax.gym"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path)},
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


# What follows runs in a process for reasoning-gym alone.


def gym(prompt: str, response: str, answer: str, task: str) -> bool:
    """Whether the family gives what was extracted from a response full credit."""
    return np.float32(credit(prompt, response, answer, task)) == 1.0


def credit(prompt: str, response: str, answer: str, task: str) -> float:
    """The family's `score_answer`, 0..1, of what was extracted from a response. Raises what that raises."""
    record = json.loads(answer)
    dataset, entry = _item(record["family"], json.dumps(record["parameters"]), record["seed"], record["index"])
    if _digest(record["family"], entry["question"]) != record["digest"]:
        raise InputError("this version of reasoning-gym draws another question here; prepare the set again")
    with _seeded(record["seed"] + record["index"]):
        return dataset.score_answer(response, entry)


def problems(parts: list[dict], split: str) -> Iterator[dict[str, str]]:
    """{"question", "answer"} of `size` distinct problems of each part, which has the fields of `Part`.

    The answer is JSON: what it takes to draw the item again, a digest of its question, and the family's own answer.
    """
    seen = set()
    for part in parts:
        family, parameters, size = part["family"], part["parameters"], part["size"]
        missed = made = 0
        for number in range(_STRIDE):
            chunk, index = divmod(number, _CHUNK)
            seed = part["seed"] * _STRIDE + chunk * _CHUNK
            try:
                item = _item(family, json.dumps(parameters), seed, index)[1]
                question, own = item["question"], _own(item)
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"{family} fails to draw item {index} of seed {seed}: {error or type(error).__name__}"
                ) from None
            digest = _digest(family, question)
            if (family, question) in seen or (int(digest, 16) % _HELDOUT_SHARE == 0) != (split == "heldout"):
                missed += 1
                if missed > _PATIENCE:
                    break
                continue
            missed = 0
            seen.add((family, question))
            record = dict(answer=own, family=family, parameters=parameters, seed=seed, index=index, digest=digest)
            yield {"question": question, "answer": json.dumps(record, default=str)}
            made += 1
            if made == size:
                break
        if made < size:
            raise InputError(
                f"{family} has only about {made} {split} problems with these parameters, and size={size} asks for "
                f"more: ask for fewer, or raise its difficulty"
            )


def _own(item: dict) -> Any:
    """An item's answer; where many are right, the family's example of one, as text, or None if it has none."""
    examples = [value for key, value in item.get("metadata", {}).items() if key.endswith("_answer")]
    if item["answer"] is not None or not examples:
        return item["answer"]
    return examples[0] if isinstance(examples[0], str) else json.dumps(examples[0])


def _digest(family: str, question: str) -> str:
    return hashlib.blake2b(f"{family}\n{question}".encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=4096)
def _item(family: str, parameters: str, seed: int, index: int) -> tuple[Any, dict]:
    """(A family's dataset, its item)."""
    dataset = _dataset(family, parameters, seed)
    with _seeded(seed + index):
        return dataset, dataset[index]


@functools.lru_cache(maxsize=256)
def _dataset(family: str, parameters: str, seed: int) -> Any:
    """A family's dataset; raises ValueError for a family, a parameter or a value that it does not have."""
    known, given = _known(), json.loads(parameters)
    if family not in known:
        raise InputError(f"there is no family {family!r}; python -m rpg_jax.prepare --list_gym shows them")
    names = [field.name for field in dataclasses.fields(known[family][1]) if field.name not in _OURS]
    for name in given:
        if name not in names:
            raise InputError(f"{family} has no parameter {name!r}; there are: {', '.join(names) or 'none'}")
    import reasoning_gym

    try:
        with _seeded(seed):
            return reasoning_gym.create_dataset(family, seed=seed, size=_CHUNK, **given)
    except Exception as error:
        raise InputError(f"{family} refuses {given}: {error or type(error).__name__}") from None


@contextlib.contextmanager
def _seeded(number: int) -> Iterator[None]:
    """Seeds the global random numbers, which some families draw from, and puts back what was there."""
    states = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _known() -> dict[str, tuple]:
    """{family: (its dataset, its config)}; without `composite`: our + does what that one does."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(f"reasoning-gym cannot be imported ({error}); pip install reasoning-gym") from None
    return {name: entry for name, entry in DATASETS.items() if name != "composite"}


def _listed() -> Iterator[dict[str, dict[str, str]]]:
    """One reply, that of `families`."""

    def shown(field):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        return "" if value is dataclasses.MISSING else f"{value!r:.60}"

    yield {
        name: {field.name: shown(field) for field in dataclasses.fields(config) if field.name not in _OURS}
        for name, (_, config) in sorted(_known().items())
    }


def _main():
    warnings.simplefilter("ignore", SyntaxWarning)  # of the code of packages that families load
    request, out = json.loads(sys.stdin.readline()), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for reply in _listed() if request is None else problems(**request):
                print(json.dumps(reply), file=out, flush=True)
        except Exception as error:
            print(json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}), file=out, flush=True)


if __name__ == "__main__":
    _main()
