"""Problems, generated, and on disk as TFDS ArrayRecord datasets with the splits `train` and `heldout`."""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from rpg_jax import InputError
from rpg_jax.data.tasks import SPLITS, draw

MEND = "prepare them again, after removing that folder; a run makes its generated problems itself"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem, generated or of a real set."""

    id: int  # unique in a dataset, 31 bits; part of the random key of the problem's responses
    task: str  # family of generated problems, or name of the real set
    prompt: str  # the model's input; on disk, JSON of the chat messages of a real set's problem
    solution: str  # worked, ends with the line `Answer: ...`; of a real set unchanged, perhaps empty
    answer: str  # for the verifier: JSON of a generated problem, ground truth of a real one
    # For reward functions: the columns of a real problem's row, JSON values; those of repeated rows are the first's.
    columns: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)


def generate(tasks: dict[str, dict], train_size: int, heldout_size: int, seed: int) -> dict[str, list[Problem]]:
    """Splits of `train_size` and `heldout_size` distinct problems *of each task*, tasks interleaved.

    Ids count from 0 through both splits. A task's problems depend only on its name, its difficulty and the seed.
    """
    if not tasks:
        raise InputError("no tasks given")
    splits, next_id = {}, 0
    for index, (split, size) in enumerate(zip(SPLITS, (train_size, heldout_size), strict=True)):
        drawn = {
            name: draw(name, split, size, np.random.default_rng([seed, index, *name.encode()]), **difficulty)
            for name, difficulty in tasks.items()
        }
        rows = [(name, *drawn[name][i]) for i in range(size) for name in tasks]
        splits[split] = [Problem(next_id + i, *row) for i, row in enumerate(rows)]
        next_id += len(rows)
    return splits


class Problems(tfds.core.GeneratorBasedBuilder):
    """The TFDS builder of problems."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos = None  # no downloads: TFDS 4.9.10 would look for checksums with a package it does not require

    def __init__(self, splits: dict[str, list[Problem]], **kwargs):
        self._splits = splits
        super().__init__(**kwargs)

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            description="Problems with checkable answers, some with worked solutions.",
            features=tfds.features.FeaturesDict(
                {"id": np.int32, **dict.fromkeys(("task", "prompt", "solution", "answer", "columns"), text)}
            ),
            disable_shuffling=True,  # Grain shuffles; the order on disk is that of the input
        )

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(problems) for name, problems in self._splits.items()}

    def _generate_examples(self, problems):
        for index, problem in enumerate(problems):  # TFDS sorts by this key
            yield index, dataclasses.asdict(problem) | {"columns": json.dumps(problem.columns)}


def publish(splits: dict[str, list[Problem]], files: dict[str, bytes], path) -> None:
    """Makes the folder `path` of a dataset and other files, completely or not at all; it may exist if it is empty."""
    with staged(path) as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        tfds.display_progress_bar(False)
        stack.callback(tfds.display_progress_bar, True)
        Problems(splits, data_dir=str(folder), file_format="array_record").download_and_prepare()
        shutil.rmtree(folder / "downloads", ignore_errors=True)  # TFDS makes it, empty
        for name, content in files.items():
            (folder / name).write_bytes(content)


@contextlib.contextmanager
def staged(path) -> Iterator[pathlib.Path]:
    """A new folder beside `path`, renamed to it at the end. If something fails before, the folder is removed."""
    path = pathlib.Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        folder.mkdir()
        yield folder
        folder.rename(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Records(Sequence):
    """The records of one split, read when they are indexed; see `to_problem`.

    Raises ValueError, which names the folder, for whatever TFDS and ArrayRecord raise.
    """

    def __init__(self, directory, split: str):
        self._directory, path = directory, f"{directory}/problems/{Problems.VERSION}"
        self._source = self._read(lambda: tfds.builder_from_directory(path).as_data_source(split=split))

    def __len__(self):
        return self._read(lambda: len(self._source))

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)  # the data source gives nothing there; a loop over a sequence ends by this
        return self._read(lambda: self._source[index])

    def _read(self, call):
        try:
            result, reason = call(), "a record is not there"
        except Exception as error:
            result, reason = None, " ".join(f"{type(error).__name__}: {error}".split())
        if result is None:
            raise InputError(f"{self._directory}: the prepared problems cannot be read ({reason}); {MEND}")
        return result


def to_problem(record: dict) -> Problem:
    """A TFDS record as a `Problem`; folders of earlier versions have no columns."""
    texts = {key: record[key].decode() for key in ("task", "prompt", "solution", "answer")}
    columns = json.loads(record["columns"]) if "columns" in record else {}
    return Problem(id=int(record["id"]), **texts, columns=columns)
