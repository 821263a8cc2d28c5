"""Answers to problems of reasoning-gym, scored by their family; called in a worker process only.

The item is drawn again from what the problem's answer records, because families score with data that JSON cannot hold.
"""

import contextlib
import functools
import hashlib
import json
import random

import numpy as np

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(f"reasoning-gym cannot be imported ({error}); pip install reasoning-gym") from None

_CHUNK = 500  # items of a dataset, as when the problem was drawn


def gym(prompt: str, response: str, answer: str, task: str) -> bool:
    """Whether the family gives an extracted answer full credit."""
    return np.float32(credit(prompt, response, answer, task)) == 1.0


def credit(prompt: str, response: str, answer: str, task: str) -> float:
    """The family's `score_answer`, 0..1, of what was extracted from a response. Raises what that raises."""
    record = json.loads(answer)
    dataset, entry = _item(record["family"], json.dumps(record["parameters"]), record["seed"], record["index"])
    digest = hashlib.blake2b(f"{record['family']}\n{entry['question']}".encode(), digest_size=8).hexdigest()
    if digest != record["digest"]:
        raise RuntimeError("this version of reasoning-gym draws another question here; prepare the set again")
    with _seeded(record["seed"] + record["index"]):
        return dataset.score_answer(response, entry)


@functools.lru_cache(maxsize=256)
def _dataset(family, parameters, seed):
    with _seeded(seed):
        return reasoning_gym.create_dataset(family, seed=seed, size=_CHUNK, **json.loads(parameters))


@functools.lru_cache(maxsize=4096)
def _item(family, parameters, seed, index):
    dataset = _dataset(family, parameters, seed)
    with _seeded(seed + index):
        return dataset, dataset[index]


@contextlib.contextmanager
def _seeded(number):
    """As in `data.gym_worker`, which drew the item: seeds the global random numbers for a while."""
    states = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
