"""A run's folder: its config, and whether this config may go on where another left off."""

import json
import pathlib

from ml_collections import ConfigDict

from rpg_jax.cli import Mistake
from rpg_jax.training.logs import write_json_atomic

# Sections that say where and how loudly a run runs, not what it computes.
FREE = ("mesh", "log")


def flatten(settings: dict, prefix="") -> dict:
    """Nested settings as {"section.key": value}."""
    flat = {}
    for name, value in settings.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def open_workdir(path, config: ConfigDict, accept_change: bool) -> pathlib.Path:
    """Makes the folder and writes `config.json`; a run that another config began in it is a Mistake unless accepted."""
    path, settings = pathlib.Path(path), json.loads(config.to_json_best_effort())
    file = path / "config.json"
    begun = any(path.glob("warm_start/*")) or any(path.glob("checkpoints/*"))
    if file.exists() and begun and not accept_change:
        old, new = flatten(read_config(path).to_dict()), flatten(settings)
        changed = [
            f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key.split(".")[0] not in FREE
        ]
        if changed:
            raise Mistake(
                f"{path} holds a run of another config ({'; '.join(changed)}); give another --workdir, "
                f"or --accept_config_change to go on from its checkpoint with the new values"
            )
    path.mkdir(parents=True, exist_ok=True)
    write_json_atomic(file, settings)
    return path


def read_config(path) -> ConfigDict:
    """The config of the run in a folder; a Mistake when there is none."""
    file = pathlib.Path(path) / "config.json"
    try:
        return ConfigDict(json.loads(file.read_text()))
    except FileNotFoundError:
        raise Mistake(f"{file} does not exist: {path} holds no run; train one with --workdir={path}") from None
    except json.JSONDecodeError as error:
        raise Mistake(
            f"{file} is not JSON ({error}); restore it from the run's command, or train in another --workdir"
        ) from None
