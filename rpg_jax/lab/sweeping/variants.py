"""A sweep's file, read and checked: variants x seeds over a base config.

The file is a Python module with

    CONFIG = "configs/sweeps/small.py"      the base config, FILE.py or FILE.py:VARIANT
    SEEDS = (0, 1, 2)
    VARIANTS = {"grpo": {"objective.name": "grpo", "objective.beta": 1e-3}, ...}

VARIANTS names what each variant changes of the base config, as the flags --config.KEY=VALUE of training would.
"""

import copy
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rpg_jax import InputError
from rpg_jax.run import build, cli
from rpg_jax.storage.logs import read_json
from rpg_jax.storage.settings import changes, completed, edited, flatten, matters, of_config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
# What a warm start depends on: sections, and keys with a point at their end.
OF_WARM_START = (
    "data.", "warm_start.", "rollout.max_prompt.", "rollout.max_new.", "seed.", "model.", "optimizer.name.",
    "optimizer.beta2.", "optimizer.clip_norm.", "learner.logprob_chunk.", "code.train.", "code.template.",
)  # fmt: skip


class Run(NamedTuple):
    """One variant with one seed."""

    variant: str
    seed: int
    flags: tuple  # of rpg_jax.train: --config, and what it changes
    config: ConfigDict  # of the variant, with the base config's seed

    @property
    def settings(self) -> dict:
        """The run's settings, flat."""
        return of_config(self.config) | {"seed": self.seed}

    @property
    def name(self) -> str:
        """The folder of its workdir within the sweep's."""
        return f"{self.variant}/seed{self.seed}"


class Sweep(NamedTuple):
    file: str
    runs: list[Run]  # seed by seed, so that every variant has a run early


def read(spec: str, seeds: Sequence[int] | None = None) -> Sweep:
    """Reads FILE.py, or FILE.py:VARIANT to take that variant of its base config; `seeds` take the place of the file's.

    Raises InputError: the file lacks a definition or one has the wrong type; variants share a name or all settings; a
    key does not exist in the base config; training refuses the settings; variants differ in their warm start.
    """
    file, _, variant = spec.partition(":")
    names = cli.names_of(file, f"sweep {spec}")
    if missing := [name for name in ("CONFIG", "SEEDS", "VARIANTS") if name not in names]:
        raise InputError(f"{file} lacks {' and '.join(missing)}; a sweep has CONFIG, SEEDS, VARIANTS")
    base = names["CONFIG"]
    if not isinstance(base, str):
        raise InputError(f"CONFIG of {file} is {base!r}; expected FILE.py or FILE.py:VARIANT")
    if variant and ":" in base:
        raise InputError(f"CONFIG of {file} is {base!r}, which names a variant already; drop :{variant}")
    base = f"{base}:{variant}" if variant else base
    config = cli.read_config(base, f"CONFIG of {file}, {base}").lock()
    seeds = _seeds(names["SEEDS"] if seeds is None else seeds, file)
    changes_of = _named(names["VARIANTS"], file)
    configs = {name: _config(f"variant {name!r} of {file}", base, config, of) for name, of in changes_of.items()}
    _check_together(file, {name: of_config(variant_config) for name, variant_config in configs.items()})
    flags = {name: [f"--config.{key}={value}" for key, value in of.items()] for name, of in changes_of.items()}
    return Sweep(file, [
        Run(name, seed, (f"--config={base}", f"--config.seed={seed}", *flags[name]), config)
        for seed in seeds for name, config in configs.items()
    ])  # fmt: skip


def is_done(out: pathlib.Path, run: Run) -> bool:
    """Whether a run in the folder `out` has come to its end."""
    return (out / run.name / "summary.json").exists()


def check_begun(out: pathlib.Path, runs: Sequence[Run]) -> dict[str, list[str]]:
    """Raises InputError if a run in `out` was begun with other settings than the sweep now has.

    So is an edited file of one's own (an objective, a reward), but of a run that is done it is only reported: the
    result maps what was edited to the names of those runs.
    """
    outdated = {}
    for run in runs:
        begun = read_json(out / run.name / "config.json")
        old = run.settings if begun is None else flatten(completed(begun))
        changed, files = changes(old, run.settings), edited(old, run.settings)
        for file in files if is_done(out, run) else []:
            outdated.setdefault(file, []).append(run.name)
        if not is_done(out, run):
            changed += files
        if changed:
            raise InputError(
                f"{out / run.name} was begun with other settings ({'; '.join(changed)}); give another --out, or delete "
                f"that folder"
            )
    return outdated


def _seeds(seeds: Any, file: str) -> list[int]:
    seeds = list(seeds) if isinstance(seeds, (list, tuple, range)) else [seeds]
    if not seeds or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):  # PRNG keys are of 32 bits
        raise InputError(f"SEEDS of {file}, or --seeds: {seeds}; expected whole numbers in 0..2**32 - 1, such as 0,1,2")
    if len({*seeds}) < len(seeds):
        raise InputError(f"SEEDS of {file}, or --seeds: {seeds} has a seed more than once, for the same run")
    return seeds


def _named(variants: Any, file: str) -> dict[str, dict]:
    """VARIANTS, whose names are valid folders and differ even where case does not count."""
    if not isinstance(variants, dict) or not variants or not all(isinstance(of, dict) for of in variants.values()):
        raise InputError(f"VARIANTS of {file} is no {{name: {{key: value}}}} of at least one variant")
    by_folder = {}
    for name in variants:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InputError(
                f"variant {name!r} of {file}: expected a name of letters, digits and . _ + - for its folder"
            )
        other = by_folder.setdefault(name.casefold(), name)
        if other != name:
            raise InputError(f"variants {other!r} and {name!r} of {file} collide in name, and so in folder; rename one")
    return variants


def _config(where: str, base_name: str, base: ConfigDict, settings: Mapping[str, Any]) -> ConfigDict:
    """The config of a variant. What is cheap to build of it is built, so that mistakes show before any run starts."""
    config, known_keys = copy.deepcopy(base).unlock(), flatten(base.to_dict())  # unset keys keep their types
    objective = settings.get("objective.name", known_keys.get("objective.name"))
    for key, value in settings.items():
        if key == "seed":
            raise InputError(f"{where} sets seed, which SEEDS does for every variant; drop it there")
        if key not in known_keys and not cli.is_open(key.rpartition(".")[0], objective):
            raise InputError(f"{where}: its CONFIG, {base_name}, has no key {key!r}")
        if not matters(key):
            raise InputError(f"{where} sets {key}, which changes nothing of what is computed; drop it")
        if value is None:
            raise InputError(f"{where} sets {key} to None, which a flag cannot; '' unsets it")
        if value == "":
            cli.unset(config, key)
            continue
        try:
            config.update_from_flattened_dict({key: value})
        except TypeError as error:
            raise InputError(f"{where}: {key}={value!r} does not fit: {error}") from None
    try:
        build.build_settings(config)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return config


def warm_start_settings(settings: Mapping[str, Any]) -> dict:
    """The flat settings on which a warm start depends, its seed among them; empty where there is none."""
    if not settings.get("warm_start.steps"):
        return {}
    return {key: value for key, value in sorted(settings.items()) if f"{key}.".startswith(OF_WARM_START)}


def _check_together(file: str, settings_by_name: Mapping[str, dict]) -> None:
    """Raises InputError for two variants of the same settings, or of another warm start than the first one's."""
    first, expected = next(iter(settings_by_name.items()))
    with_same: dict[str, str] = {}
    for name, found in settings_by_name.items():
        same = with_same.setdefault(json.dumps(found, sort_keys=True), name)
        if same != name:
            raise InputError(f"variants {same!r} and {name!r} of {file} have the same settings; drop one")
        keys = [key for key in found if f"{key}.".startswith(OF_WARM_START) and found[key] != expected.get(key)]
        if keys and (found.get("warm_start.steps") or expected.get("warm_start.steps")):
            raise InputError(
                f"variants {first!r} and {name!r} of {file} cannot share a warm start, for they differ in {keys[0]}; "
                f"give both the same, or make a sweep of each"
            )
