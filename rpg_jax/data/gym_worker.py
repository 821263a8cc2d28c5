"""A process that draws problems of reasoning-gym: one line of JSON in, a line of JSON for each problem out.

Run as a script by `gym_problems`. It is a process of its own because families load heavy packages, and because the
items of some depend on Python's hash seed, which is fixed for a process. It imports nothing of this project.

A family's item i of seed s is item 0 of seed s + i, so seeds near each other draw the same items. Problems are split by
a hash of their question, whatever their seed: no question is in both splits. Seeds lie `_STRIDE` apart.
"""

import contextlib
import dataclasses
import hashlib
import json
import random
import sys
import warnings

import numpy as np

_HELDOUT_SHARE = 8  # one question in eight is held out
_CHUNK = 500  # items of one dataset of reasoning-gym; it draws more from the next seed
_STRIDE = 1 << 20  # items of one seed
_PATIENCE = 2000  # items in a row without a new question, after which a family has no more
_OURS = ("seed", "size")


def main():
    warnings.simplefilter("ignore", SyntaxWarning)  # of the code of packages that families load
    request = json.loads(sys.stdin.readline())
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            for reply in families() if request is None else problems(**request):
                print(json.dumps(reply), file=out, flush=True)
        except Exception as error:
            print(json.dumps({"error": " ".join(str(error).split()) or type(error).__name__}), file=out, flush=True)


def families():
    """One reply: {family: {parameter: the text of its default}}."""
    yield {
        name: {
            field.name: "" if (value := _default(field)) is dataclasses.MISSING else f"{value!r:.60}"
            for field in dataclasses.fields(config)
            if field.name not in _OURS
        }
        for name, (_, config) in sorted(_known().items())
    }


def problems(parts, split):
    """{"question", "answer"} of `size` distinct problems of each part, which has family, parameters, seed and size.

    The answer is JSON: what it takes to draw the item again, a digest of its question, and the family's own answer.
    """
    seen = set()
    for part in parts:
        family, parameters, size = part["family"], part["parameters"], part["size"]
        missed = made = 0
        for number in range(_STRIDE):
            chunk, index = divmod(number, _CHUNK)
            seed = part["seed"] * _STRIDE + chunk * _CHUNK
            if index == 0:
                dataset = _dataset(family, parameters, seed)
            try:
                with _seeded(seed + index):  # as `rewards.gym_rule` does when it draws the item again
                    item = dataset[index]
            except Exception as error:
                raise ValueError(
                    f"{family} fails to draw item {index} of seed {seed}: {error or type(error).__name__}"
                ) from None
            question = item["question"]
            digest = hashlib.blake2b(f"{family}\n{question}".encode(), digest_size=8).hexdigest()
            if (family, question) in seen or (int(digest, 16) % _HELDOUT_SHARE == 0) != (split == "heldout"):
                missed += 1
                if missed > _PATIENCE:
                    break
                continue
            missed = 0
            seen.add((family, question))
            record = dict(answer=item["answer"], family=family, parameters=parameters, seed=seed, index=index)
            yield {"question": question, "answer": json.dumps(record | {"digest": digest}, default=str)}
            made += 1
            if made == size:
                break
        if made < size:
            raise ValueError(
                f"{family} has only about {made} {split} problems with these parameters, and size={size} asks for "
                f"more: ask for fewer, or raise its difficulty"
            )


def _dataset(family, parameters, seed):
    """A family's dataset; raises ValueError for a family, a parameter or a value that it does not have."""
    import reasoning_gym

    known = _known()
    if family not in known:
        raise ValueError(f"there is no family {family!r}; python -m rpg_jax.prepare --list_gym shows them")
    names = [field.name for field in dataclasses.fields(known[family][1]) if field.name not in _OURS]
    for name in parameters:
        if name not in names:
            raise ValueError(f"{family} has no parameter {name!r}; there are: {', '.join(names) or 'none'}")
    try:
        with _seeded(seed):
            return reasoning_gym.create_dataset(family, seed=seed, size=_CHUNK, **parameters)
    except Exception as error:
        raise ValueError(f"{family} refuses {parameters}: {error or type(error).__name__}") from None


@contextlib.contextmanager
def _seeded(number):
    """Seeds the global random numbers, which some families draw from, and puts back what was there."""
    states = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _known():
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(f"the package reasoning-gym is needed ({error}); pip install reasoning-gym") from None
    return {name: entry for name, entry in DATASETS.items() if name != "composite"}  # our + does what that one does


def _default(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


if __name__ == "__main__":
    main()
