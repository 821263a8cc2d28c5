"""A run's settings as one flat dict {"section.key": value}: which keys change results, and how two runs differ."""

import hashlib
import json
import os
import pathlib
import re
from typing import Any

from ml_collections import ConfigDict

try:
    from configs.base import check as check_values
    from configs.base import completed
except ImportError:  # the package alone, without the repository, reads runs of its own version

    def check_values(config: ConfigDict) -> None:
        del config

    def completed(settings: dict) -> dict:
        return settings


FREE = ("mesh", "log", "digest")  # sections that do not change what a run computes; 0.2 wrote a digest of the rest
# {name: key} of the keys that may name the user's own files: FILE.py:NAME, or files and folders of problems.
OWN = {
    "objective": "objective.name", "advantage": "objective.advantage",
    "reward": "reward.function", "rewards": "reward.functions",
    "evaluation": "evaluation.function", "train": "data.train", "heldout": "data.heldout",
    "environment": "environment.name", "template": "data.template",
}  # fmt: skip
CODE = "code"  # the section of `config.json` with the digests of such files


def flatten(settings: dict, prefix: str = "") -> dict:
    """Nested settings as {"section.key": value}."""
    flat = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def as_json(config: ConfigDict) -> dict:
    """The contents of `config.json`: the config, with digests of the user's code and problems that it names."""
    settings = json.loads(config.to_json_best_effort())
    flat = flatten(settings)
    digests = {name: _digest_of(flat[key]) for name, key in OWN.items() if flat.get(key)}
    code = {name: digest for name, digest in digests.items() if digest}
    return settings | ({CODE: code} if code else {})


def _digest_of(names: str | list[str]) -> str | None:
    """The digest of the files that a key names; None if it names none, as where it names a prepared folder."""
    titles = names.split(",") if isinstance(names, str) else names
    code = re.compile(r"\s*(?:\w+\s*=)?\s*(.*\.py):\w+\s*")  # a reward may have a name before it
    matches = [(title, code.fullmatch(title)) for title in titles]
    places = [pathlib.Path(match[1] if match else title.strip()) for title, match in matches]
    digests = [file_digest(place) for place in places if os.path.isfile(place)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:12] if digests[1:] else next(iter(digests), None)


def file_digest(file: pathlib.Path) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of a file's contents."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def digest(value: Any) -> str:
    """As `file_digest`, of what a value is printed as."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def of_config(config: ConfigDict, prefix: str = "") -> dict:
    """The flat settings of a ConfigDict, with the values that its `config.json` has."""
    return flatten(as_json(config), prefix)


def matters(key: str) -> bool:
    """Whether a flat key can change what a run computes."""
    return key.split(".")[0] not in FREE


def changes(old: dict, new: dict) -> list[str]:
    """The differences that matter between flat settings, one text per key: "rollout.samples: 4 -> 8"."""
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and matters(key) and not key.startswith(f"{CODE}.")
    ]


def edited(old: dict, new: dict) -> list[str]:
    """The user's files that both flat settings name and whose contents differ, one text per file."""
    digests = {key: f"{CODE}.{name}" for name, key in OWN.items()}
    return [
        f"{new[name]} has been edited"
        for name, digest in digests.items()
        if digest in old and digest in new and old[name] == new[name] and old[digest] != new[digest]
    ]
