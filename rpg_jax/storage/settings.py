"""A run's settings as one flat dict {"section.key": value}: which of them matter, and how two runs' differ."""

import hashlib
import json
import pathlib

FREE = ("mesh", "log")  # sections that say where and how loudly a run runs, not what it computes
OWN = {"objective": "name", "reward": "function"}  # keys, by section, that may be FILE.py:NAME
CODE = "code"  # the section of `config.json` that has digests of such files


def flatten(settings: dict, prefix="") -> dict:
    """Nested settings as {"section.key": value}."""
    flat = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def as_json(config) -> dict:
    """A ConfigDict as its `config.json` has it: with digests of the files of one's own that it names."""
    settings = json.loads(config.to_json_best_effort())
    named = {section: settings.get(section, {}).get(key) or "" for section, key in OWN.items()}
    files = {section: pathlib.Path(name.rpartition(":")[0]) for section, name in named.items()}
    code = {name: file_digest(file) for name, file in files.items() if file.is_file()}
    return settings | ({CODE: code} if code else {})


def file_digest(file: pathlib.Path) -> str:
    """Twelve characters that tell a file's contents from others."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def of_config(config, prefix="") -> dict:
    """Those of a ConfigDict, with the values that its `config.json` has."""
    return flatten(as_json(config), prefix)


def matters(key: str) -> bool:
    """Whether a flat key belongs to what a run computes."""
    return key.split(".")[0] not in FREE


def changes(old: dict, new: dict) -> list[str]:
    """What differs between flat settings and matters, a text a key: "rollout.samples: 4 -> 8"."""
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and matters(key) and not key.startswith(f"{CODE}.")
    ]


def edited(old: dict, new: dict) -> list[str]:
    """The files of one's own that flat settings both name, and that were not the same; a text each."""
    digests = {f"{section}.{key}": f"{CODE}.{section}" for section, key in OWN.items()}
    known = {name: digest for name, digest in digests.items() if digest in old and digest in new}
    return [
        f"{new[name]} has been edited"
        for name, digest in known.items()
        if old[name] == new[name] and old[digest] != new[digest]
    ]
