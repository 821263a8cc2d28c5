"""Task families: procedurally generated problems with difficulty settings and worked solutions.

A family is a module here with two functions. `generate(rng, **difficulty)` gives three strings, prompt, solution and
answer: the solution is worked step by step and ends with the line `Answer: ...`, the answer is JSON for the verifier.
Difficulty is keyword-only, with defaults. `canonical(prompt)` is equal text for two prompts exactly when they pose the
same problem. To add a family, list it in `TASKS` and add a verifier of its name to `rpg_jax/rewards/verifiers.py`.
"""

import difflib
import hashlib
import inspect
from types import ModuleType

from rpg_jax import InputError
from rpg_jax.data.tasks import arithmetic, countdown, guess, sorting

SPLITS = ("train", "heldout")
LARGEST = 10**9  # number in a problem, which NumPy draws as int64
MOST = dict.fromkeys(("steps", "numbers", "used", "attempts"), 1000)  # lengths: they take time
HELDOUT_SHARE = 8  # one problem in eight is held out
TASKS = {"arithmetic": arithmetic, "countdown": countdown, "guess": guess, "sorting": sorting}


def defaults(name: str) -> dict:
    """The difficulty keys of a family and their default values."""
    parameters = inspect.signature(_task(name).generate).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_difficulty(name: str, difficulty: dict) -> dict:
    """The full difficulty of a family, `difficulty` over its defaults; raises ValueError that names an invalid key."""
    full = defaults(name)
    if not isinstance(difficulty, dict):
        raise InputError(f"task {name!r} is {difficulty!r:.60}; it must be a section, whose keys are {', '.join(full)}")
    for key, value in difficulty.items():
        if key not in full:
            near = difflib.get_close_matches(key, full, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(full)}"
            raise InputError(f"task {name!r} has no difficulty key {key!r}; {hint}")
        if type(value) is not type(full[key]):
            raise InputError(f"task {name!r}: {key}={value!r} must be of type {type(full[key]).__name__}")
        if isinstance(value, int) and value < 0:
            raise InputError(f"task {name!r}: {key}={value} must not be negative")
        if isinstance(value, int) and value > MOST.get(key, LARGEST):
            raise InputError(f"task {name!r}: {key}={value} must be at most {MOST.get(key, LARGEST)}")
    return full | difficulty


def split_of(name: str, prompt: str) -> str:
    """The split of a problem, by a hash of its canonical form, so that no problem can be in both splits."""
    digest = hashlib.blake2b(f"{name}\n{_task(name).canonical(prompt)}".encode(), digest_size=8).digest()
    return SPLITS[int.from_bytes(digest, "big") % HELDOUT_SHARE == 0]


def draw(name: str, split: str, count: int, rng, **difficulty) -> list[tuple[str, str, str]]:
    """`count` distinct problems of one split, as (prompt, solution, answer).

    Raises ValueError for an unknown task or difficulty key, and a family that has fewer problems.
    """
    task, difficulty = _task(name), check_difficulty(name, difficulty)
    drawn, missed, patience = {}, 0, 2000 * HELDOUT_SHARE
    while len(drawn) < count:
        problem = task.generate(rng, **difficulty)
        key = task.canonical(problem[0])
        if key in drawn or split_of(name, problem[0]) != split:
            missed += 1
            if missed > patience:
                settings = ", ".join(f"{k}={v!r}" for k, v in difficulty.items())
                raise InputError(
                    f"task {name!r} has only about {len(drawn)} {split} problems with {settings}, and "
                    f"{split}_size asks for {count}: ask for fewer or raise the difficulty"
                )
        else:
            drawn[key], missed = problem, 0
    return list(drawn.values())


def _task(name: str) -> ModuleType:
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return TASKS[name]
