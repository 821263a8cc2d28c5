"""A run's settings as one flat dict {"section.key": value}: which of them matter, and how two runs' differ."""

import json

FREE = ("mesh", "log")  # sections that say where and how loudly a run runs, not what it computes


def flatten(settings: dict, prefix="") -> dict:
    """Nested settings as {"section.key": value}."""
    flat = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def of_config(config, prefix="") -> dict:
    """Those of a ConfigDict, with the values that its `config.json` has."""
    return flatten(json.loads(config.to_json_best_effort()), prefix)


def matters(key: str) -> bool:
    """Whether a flat key belongs to what a run computes."""
    return key.split(".")[0] not in FREE


def changes(old: dict, new: dict) -> list[str]:
    """What differs between flat settings and matters, a text a key: "rollout.samples: 4 -> 8"."""
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and matters(key)
    ]
