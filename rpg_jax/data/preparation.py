"""Preparation: problems and tokenizer made once for given settings and kept under a name that their content decides."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time

import grain

from rpg_jax.data import problems
from rpg_jax.data.tasks import check_difficulty
from rpg_jax.data.tokenizer import Tokenizer, train_tokenizer


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A prepared directory: `settings.json`, `tokenizer.model`, and the TFDS dataset `problems/`."""

    path: pathlib.Path

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path / "tokenizer.model")

    def problems(self, split: str) -> grain.MapDataset:
        """The `Problem`s of "train" or "heldout" in the order of their ids, read from disk as they are indexed."""
        return grain.MapDataset.source(problems.read(self.path, split)).map(problems.to_problem)


def prepare(directory, tasks: dict[str, dict], train_size, heldout_size, seed, vocab_size, log=print) -> Prepared:
    """Generates problems and trains the tokenizer, or finds both where an earlier call left them.

    Args:
      directory: the cache; the result lies in a subfolder named by a hash of the settings and of this package's source.
      tasks: family name -> difficulty keys that differ from the family's defaults.
      train_size, heldout_size: problems of each task.
      seed: of the problems, 0..2**32 - 1.
      vocab_size: the tokenizer's largest vocabulary; simple texts fill less of it.
      log: called with one line when something had to be made.

    Raises:
      ValueError: for an unknown task or key, or settings under which a split cannot be filled. Nothing is left then.
    """
    tasks = {name: check_difficulty(name, dict(difficulty)) for name, difficulty in sorted(tasks.items())}
    settings = dict(tasks=tasks, train_size=train_size, heldout_size=heldout_size, seed=seed, vocab_size=vocab_size)
    text = json.dumps(settings, sort_keys=True, indent=1)
    directory = pathlib.Path(directory)
    path = directory / hashlib.blake2b((text + _source()).encode(), digest_size=8).hexdigest()
    if path.exists():
        return Prepared(path)

    start = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    building = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=directory))
    try:
        splits = problems.generate(tasks, train_size, heldout_size, seed)
        problems.write(splits, building)
        shutil.rmtree(building / "downloads", ignore_errors=True)  # TFDS makes it, empty
        texts = (text for problem in splits["train"] for text in (problem.prompt, problem.solution))
        (building / "tokenizer.model").write_bytes(train_tokenizer(texts, vocab_size))
        (building / "settings.json").write_text(text + "\n")
        _publish(building, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    prepared = Prepared(path)
    counts = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    vocabulary = prepared.tokenizer.vocab_size
    log(f"prepared {counts} problems, {vocabulary} tokens in {time.monotonic() - start:.1f} s: {path}")
    return prepared


def _publish(building: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a finished folder into place; if another process was first, its equal result stays."""
    try:
        os.rename(building, path)
    except OSError:
        if not path.exists():
            raise


def _source() -> str:
    """The text of every file of this package: a change to a generator makes another dataset."""
    folder = pathlib.Path(__file__).parent
    return "".join(file.read_text() for file in sorted(folder.rglob("*.py")))
