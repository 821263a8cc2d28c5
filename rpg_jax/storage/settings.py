"""A run's settings as one flat dict {"section.key": value}: which keys change results, and how two runs differ."""

import hashlib
import json
import pathlib

from ml_collections import ConfigDict

FREE = ("mesh", "log")  # sections that do not change what a run computes
OWN = {"objective": "name", "reward": "function"}  # {section: key} of the keys that may be FILE.py:NAME
CODE = "code"  # the section of `config.json` with the digests of such files


def flatten(settings: dict, prefix: str = "") -> dict:
    """Nested settings as {"section.key": value}."""
    flat = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def as_json(config: ConfigDict) -> dict:
    """The contents of `config.json`: the config, with digests of the user's Python files that it names."""
    settings = json.loads(config.to_json_best_effort())
    named = {section: settings.get(section, {}).get(key) or "" for section, key in OWN.items()}
    files = {section: pathlib.Path(name.rpartition(":")[0]) for section, name in named.items()}
    code = {name: file_digest(file) for name, file in files.items() if file.is_file()}
    return settings | ({CODE: code} if code else {})


def file_digest(file: pathlib.Path) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of a file's contents."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


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
    """The user's Python files that both flat settings name and whose contents differ, one text per file."""
    digests = {f"{section}.{key}": f"{CODE}.{section}" for section, key in OWN.items()}
    return [
        f"{new[name]} has been edited"
        for name, digest in digests.items()
        if digest in old and digest in new and old[name] == new[name] and old[digest] != new[digest]
    ]
