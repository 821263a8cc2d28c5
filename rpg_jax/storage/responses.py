"""The responses of an evaluation on disk: written as they are sampled, read back when the evaluation is resumed."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np

from rpg_jax import InputError
from rpg_jax.data.problems import Problem
from rpg_jax.storage.logs import read_json, read_jsonl, write_json_atomic, write_text_atomic
from rpg_jax.storage.settings import changes
from rpg_jax.training.evaluation import Answered


class ResponseLog:
    """`responses.jsonl`, one object per response, and `settings.json`, the settings they were sampled with.

    Opening it reads what an interrupted evaluation left and deletes the responses of incompletely answered problems.
    The folder is made with the first response. `settings`, JSON values with `k` among them, must be equal for all
    responses of a file: others raise ValueError, as a broken line does.
    """

    def __init__(self, folder, settings: dict, problems: Sequence[Problem]):
        self._file, self._problems = pathlib.Path(folder) / "responses.jsonl", problems
        self._k, self._done = settings["k"], {}
        self._record, self._settings = self._file.with_name("settings.json"), json.loads(json.dumps(settings))
        if self._file.exists():
            _refuse_other(self._record, self._settings)
            rows, dropped = read_jsonl(self._file, _NEEDS)
            self._done = from_rows(rows, problems, self._k)
            if dropped or len(rows) > self._k * len(self._done):
                kept = [row for answered in self._done.values() for row in to_rows(answered)]
                write_text_atomic(self._file, "".join(json.dumps(row) + "\n" for row in kept))

    def missing(self) -> list[int]:
        """The places, in their order, of the problems without responses."""
        return [place for place, problem in enumerate(self._problems) if _name(problem) not in self._done]

    def answered(self) -> list[Answered]:
        """The answered problems, in the order of the problems."""
        return [self._done[_name(problem)] for problem in self._problems if _name(problem) in self._done]

    def write(self, answered: Answered) -> None:
        """Appends a problem's responses and closes the file."""
        if not self._done:  # an evaluation that fails before its first response leaves no folder
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self._record, self._settings)
        self._done[_name(answered.problem)] = answered
        with self._file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in to_rows(answered))


def to_rows(answered: Answered) -> list[dict]:
    """One JSON object per response."""
    problem = answered.problem
    shared = dict(problem=problem.id, task=problem.task, prompt=problem.prompt, answer=problem.answer)
    columns = zip(answered.texts, answered.correct, answered.lengths, answered.finished, answered.turns, strict=True)
    return [
        shared
        | dict(sample=sample, response=text, correct=float(right), tokens=int(length), finished=bool(finished))
        | ({} if turns is None else dict(turns=turns))
        for sample, (text, right, length, finished, turns) in enumerate(columns)
    ]


def from_rows(rows: list[dict], problems: Sequence[Problem], k: int) -> dict[tuple[str, int], Answered]:
    """{(task, id): Answered} of the problems that have all k responses among `rows`."""
    groups, done = {}, {}
    for row in rows:
        groups.setdefault((row["task"], row["problem"]), {})[row["sample"]] = row
    for problem in problems:
        group = groups.get(_name(problem), {})
        if sorted(group) == list(range(k)):
            texts, *columns = ([group[i][name] for i in range(k)] for name in ("response", *_DTYPES))
            arrays = (np.array(column, dtype) for column, dtype in zip(columns, _DTYPES.values(), strict=True))
            turns = [group[i].get("turns") for i in range(k)]
            done[_name(problem)] = Answered(problem, texts, *arrays, failures=[], turns=turns)
    return done


_NEEDS = dict(task=str, problem=int, sample=int, response=str, correct=(int, float), tokens=int, finished=bool)
_DTYPES = dict(correct=np.float32, tokens=np.int32, finished=bool)


def _name(problem):
    return problem.task, problem.id


def _refuse_other(file: pathlib.Path, settings: dict):
    """Raises InputError unless a file has these settings."""
    old, mend = read_json(file), f"give another --out or remove {file.parent}"
    if old is None:
        raise InputError(f"{file} is not a JSON object; {mend}")
    if changed := changes(old, settings):
        raise InputError(f"{file.parent} holds responses made with other settings ({'; '.join(changed)}); {mend}")
