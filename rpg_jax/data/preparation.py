"""Preparation: problems and tokenizer, made once and cached in a folder named by a hash of settings and source."""

import hashlib
import json
import pathlib
import time

import grain

from rpg_jax.data import problems
from rpg_jax.data.datasets import Sets
from rpg_jax.data.tasks import SPLITS, check_difficulty
from rpg_jax.data.tokenizer import SentencePieceTokenizer, train_tokenizer


def prepare(directory, tasks: dict[str, dict], train_size, heldout_size, seed, vocab_size, log=print) -> Sets:
    """Generates problems and trains the tokenizer, or opens the folder in which an earlier call stored both.

    Args:
      directory: the cache; the result lies in a subfolder named by a hash of the settings and of this package's source.
      tasks: {family: difficulty keys that differ from the family's defaults}.
      train_size, heldout_size: the number of problems of each task.
      log: called with one line when the folder was made.

    Raises ValueError for an unknown task or key, or settings under which a split cannot be filled.
    """
    tasks = {name: check_difficulty(name, keys) for name, keys in sorted(tasks.items()) if keys is not None}
    settings = dict(tasks=tasks, train_size=train_size, heldout_size=heldout_size, seed=seed, vocab_size=vocab_size)
    text = json.dumps(settings, sort_keys=True, indent=1)
    directory = pathlib.Path(directory)
    path = directory / hashlib.blake2b((text + _source()).encode(), digest_size=8).hexdigest()
    if path.exists():
        return _opened(path)

    start = time.monotonic()
    splits = problems.generate(tasks, train_size, heldout_size, seed)
    texts = (text for problem in splits["train"] for text in (problem.prompt, problem.solution))
    files = {"tokenizer.model": train_tokenizer(texts, vocab_size), "settings.json": f"{text}\n".encode()}
    try:
        problems.publish(splits, files, path)
    except OSError:
        if not path.exists():  # otherwise another process was first, with an equal result
            raise
    prepared = _opened(path)
    counts = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    vocabulary = prepared.tokenizer.vocab_size
    log(f"prepared {counts} problems, {vocabulary} tokens in {time.monotonic() - start:.1f} s: {path}")
    return prepared


def _opened(path: pathlib.Path) -> Sets:
    """A folder of `settings.json`, `tokenizer.model`, and the TFDS dataset `problems/`, read as it is indexed."""
    records = {split: grain.MapDataset.source(problems.Records(path, split)) for split in SPLITS}
    splits = {split: records.map(problems.to_problem) for split, records in records.items()}
    return Sets(SentencePieceTokenizer(path / "tokenizer.model"), splits)


def _source() -> str:
    """The text of every file of this package, so that a changed generator makes another folder."""
    folder = pathlib.Path(__file__).parent
    return "".join(file.read_text("utf-8") for file in sorted(folder.rglob("*.py")))
