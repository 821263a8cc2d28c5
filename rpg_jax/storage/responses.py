"""The responses of an evaluation on disk: written as they come, read back when it goes on."""

import json
import pathlib

import numpy as np

from rpg_jax.storage.logs import read_jsonl, write_json_atomic, write_text_atomic
from rpg_jax.training.evaluation import Answered


class ResponseLog:
    """`responses.jsonl`, one object a response, and `settings.json`, what they were made with.

    Opening it reads what an interrupted evaluation left and cuts it back to whole problems.

    Args:
      folder: made with the first response.
      settings: JSON values, with `k`; those under which responses of one file may stand together.
      problems: to be answered, in the order of `answered`.

    Raises:
      ValueError: the folder holds responses made with other settings, or a broken line.
    """

    def __init__(self, folder, settings: dict, problems):
        self._file, self._problems = pathlib.Path(folder) / "responses.jsonl", problems
        self._k, self._done = settings["k"], {}
        self._record, self._settings = self._file.with_name("settings.json"), json.loads(json.dumps(settings))
        if self._file.exists() and self._record.exists():
            _refuse_other(folder, json.loads(self._record.read_text()), self._settings)
            rows, dropped = read_jsonl(self._file)
            self._done = from_rows(rows, problems, self._k)
            if dropped or len(rows) > self._k * len(self._done):
                kept = [row for one in self._done.values() for row in to_rows(one)]
                write_text_atomic(self._file, "".join(json.dumps(row) + "\n" for row in kept))

    def missing(self) -> list:
        """The problems that have no responses yet."""
        return [problem for problem in self._problems if _name(problem) not in self._done]

    def answered(self) -> list[Answered]:
        """What there is, in the order of the problems."""
        return [self._done[_name(problem)] for problem in self._problems if _name(problem) in self._done]

    def write(self, one: Answered) -> None:
        """Appends a problem's responses; on disk when this returns."""
        if not self._done:  # nothing is left behind by an evaluation that never begins
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self._record, self._settings)
        self._done[_name(one.problem)] = one
        with self._file.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in to_rows(one))


def to_rows(one: Answered) -> list[dict]:
    """One JSON object a response."""
    shared = dict(problem=one.problem.id, task=one.problem.task, prompt=one.problem.prompt, answer=one.problem.answer)
    columns = zip(one.texts, one.correct, one.lengths, one.finished, strict=True)
    return [
        shared | dict(sample=sample, response=text, correct=float(right), tokens=int(length), finished=bool(finished))
        for sample, (text, right, length, finished) in enumerate(columns)
    ]


def from_rows(rows: list[dict], problems, k: int) -> dict:
    """(task, id) -> Answered, for those problems of which all k responses are among `rows`."""
    groups, done = {}, {}
    for row in rows:
        groups.setdefault((row["task"], row["problem"]), {})[row["sample"]] = row
    for problem in problems:
        group = groups.get(_name(problem), {})
        if sorted(group) == list(range(k)):
            texts, *columns = ([group[i][name] for i in range(k)] for name in ("response", *_DTYPES))
            arrays = (np.array(column, dtype) for column, dtype in zip(columns, _DTYPES.values(), strict=True))
            done[_name(problem)] = Answered(problem, texts, *arrays, failures=[])
    return done


_DTYPES = dict(correct=np.float32, tokens=np.int32, finished=bool)


def _name(problem):
    return problem.task, problem.id


def _refuse_other(folder, old: dict, new: dict):
    changed = [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in new | old if old.get(key) != new.get(key)]
    if changed:
        raise ValueError(
            f"{folder} holds responses made with other settings ({'; '.join(changed)}); give another --out or remove it"
        )
