"""A sweep's file, read and checked: variants x seeds over a base config.

The file is a Python module with

    CONFIG = "configs/sweeps/small.py"      the base config, FILE.py or FILE.py:VARIANT
    SEEDS = (0, 1, 2)
    VARIANTS = {"grpo": {"objective.name": "grpo", "objective.beta": 1e-3}, ...}

where VARIANTS, or a list of such (name, settings) pairs, names what each variant changes of the base config, as the
flags --config.KEY=VALUE of training would.
"""

import ast
import functools
import hashlib
import json
import pathlib
import re
import sys
import types
from collections import Counter
from typing import NamedTuple

from ml_collections import ConfigDict

from rpg_jax.lab.reporting.comparable import incomparable, warm_start_settings
from rpg_jax.lab.reporting.logged import read_json
from rpg_jax.run import build
from rpg_jax.storage.settings import changes, edited, flatten, matters, of_config

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
SETTINGS = ("CONFIG", "SEEDS", "VARIANTS")


class Run(NamedTuple):
    """One variant with one seed."""

    variant: str
    seed: int
    flags: tuple  # of training: --config and what it changes
    config: ConfigDict  # that of the variant, with the base config's seed

    @property
    def settings(self) -> dict:
        """All of the run's settings, flat."""
        return of_config(self.config) | {"seed": self.seed}

    @property
    def name(self) -> str:
        """The folder of its workdir within the sweep's."""
        return f"{self.variant}/seed{self.seed}"


class Sweep(NamedTuple):
    file: str
    runs: list[Run]  # seed by seed, so that every variant has some early

    @property
    def name(self) -> str:
        return pathlib.Path(self.file).stem


def read(named: str, seeds=None) -> Sweep:
    """Reads FILE.py, or FILE.py:VARIANT for a variant of its base config.

    Args:
      seeds: instead of the file's.

    Raises:
      ValueError: something in the file is missing or of another kind; variants of one name, or of the same settings; a
        key that the base config lacks; settings that training refuses; variants that differ in what makes them
        incomparable. SyntaxError, OSError: as Python says.
    """
    file, _, variant = named.partition(":")
    found = _load(file)
    missing = [name for name in SETTINGS if name not in found]
    if missing:
        raise ValueError(f"{file} lacks {' and '.join(missing)}; a sweep has {', '.join(SETTINGS)}")
    base = found["CONFIG"]
    if not isinstance(base, str) or (variant and ":" in base):
        raise ValueError(f"CONFIG of {file} is {base!r}; expected FILE.py{' alone, since' if variant else ' or'} "
                         f"FILE.py:VARIANT{' would name two variants' if variant else ''}")  # fmt: skip
    base = f"{base}:{variant}" if variant else base
    config = _base_config(base, file)
    seeds = _seeds(found["SEEDS"] if seeds is None else seeds, file)
    pairs = _pairs(found["VARIANTS"], file)
    configs = {name: _config(f"variant {name!r} of {file}", base, config, settings) for name, settings in pairs}
    flat = {name: of_config(one) for name, one in configs.items()}
    _refuse_equal(file, flat)
    unlike = incomparable(flat)
    if unlike:
        raise ValueError(
            f"variants of {file} cannot be compared, for they differ in {'; '.join(unlike)}; give all of them the "
            f"same, or make a sweep of each"
        )
    runs = [
        Run(name, seed, (f"--config={base}", f"--config.seed={seed}", *_flags(settings)), configs[name])
        for seed in seeds
        for name, settings in pairs
    ]
    return Sweep(file, runs)


def is_done(out, run: Run) -> bool:
    """Whether a run in `out` has come to its end."""
    return (out / run.name / "summary.json").exists()


def check_begun(out, runs) -> dict:
    """Raises ValueError for a run in `out` that was begun with other settings than the sweep now has.

    A file of one's own that was edited is such a change for a run that is not done; of those that are, returns
    {what was edited since: their names}.
    """
    outdated = {}
    for run in runs:
        begun = read_json(out / run.name / "config.json")
        if begun is None:
            continue
        changed, files = (compare(flatten(begun), run.settings) for compare in (changes, edited))
        if is_done(out, run):
            for text in files:
                outdated.setdefault(text, []).append(run.name)
        else:
            changed += files
        if changed:
            raise ValueError(
                f"{out / run.name} was begun with other settings ({'; '.join(changed)}); give another --out, or delete "
                f"that folder"
            )
    return outdated


def shared_warm_start(out, run: Run) -> pathlib.Path | None:
    """The folder of the warm start that `run` shares with all of the same settings; None if it has none."""
    settings = warm_start_settings(of_config(run.config))
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return out.parent / "warm_starts" / name if settings else None


def _load(file) -> dict:
    """The names that a Python file defines; refuses a dict in it that has a key twice, of which Python keeps one."""
    tree = ast.parse(pathlib.Path(file).read_bytes(), file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = Counter(key.value for key in node.keys if isinstance(key, ast.Constant))
            for key, count in keys.items():
                if count > 1:
                    raise ValueError(
                        f"{file}, line {node.lineno}: a dict has {key!r} {count} times; rename or drop one"
                    )
    module = sys.modules["sweep_file"] = types.ModuleType("sweep_file")  # dataclasses look there for their module
    names = vars(module)
    names.update({"__file__": file, _Distinct.NAME: functools.partial(_distinct, file)})
    try:
        exec(compile(ast.fix_missing_locations(_Distinct().visit(tree)), file, "exec"), names)
    except _Collision:
        raise
    except Exception as error:
        raise ValueError(f"{file} does not run: {type(error).__name__}: {error}") from error
    return names


class _Collision(ValueError):
    """A key that a dict would have twice."""


def _distinct(file, line, pairs) -> dict:
    found = {}
    for key, value in pairs:
        if key in found:
            raise _Collision(f"{file}, line {line}: a dict has {key!r} more than once, and would keep the last")
        found[key] = value
    return found


class _Distinct(ast.NodeTransformer):
    """Dict comprehensions, and VARIANTS = {**a, **b}, of whose equal keys Python keeps one, as calls of `_distinct`."""

    NAME = "_distinct_"

    def _call(self, node, pairs):
        called = ast.Call(ast.Name(self.NAME, ast.Load()), [ast.Constant(node.lineno), pairs], [])
        return ast.copy_location(called, node)

    def visit_DictComp(self, node):
        self.generic_visit(node)
        return self._call(node, ast.ListComp(ast.Tuple([node.key, node.value], ast.Load()), node.generators))

    def visit_Assign(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Dict) and any(getattr(to, "id", "") == "VARIANTS" for to in node.targets):
            parts = [ast.Dict([key], [value]) for key, value in zip(node.value.keys, node.value.values, strict=True)]
            items = [ast.Call(ast.Attribute(part, "items", ast.Load()), [], []) for part in parts]
            pairs = ast.List([ast.Starred(one, ast.Load()) for one in items], ast.Load())
            node.value = self._call(node.value, pairs)
        return node


def _base_config(base, file) -> ConfigDict:
    path, _, variant = base.partition(":")
    make = _load(path).get("get_config")
    if make is None:
        raise ValueError(f"{path}, the CONFIG of {file}, has no get_config; name the file of an experiment")
    return (make(variant) if variant else make()).lock()


def _seeds(seeds, file) -> list[int]:
    seeds = list(seeds) if isinstance(seeds, (list, tuple, range)) else [seeds]
    if not seeds or not all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds):  # noise has keys of 32 bits
        raise ValueError(f"the seeds of {file} are {seeds}; expected whole numbers in 0..2**32 - 1, such as 0,1,2")
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise ValueError(f"the seeds of {file} hold {twice[0]} more than once: those runs would be the same; drop one")
    return seeds


def _pairs(variants, file) -> list[tuple[str, dict]]:
    """(name, settings) of each variant, their names sound and different even where case is not."""
    pairs = list(variants.items()) if isinstance(variants, dict) else variants
    if (
        not isinstance(pairs, (list, tuple))
        or not pairs
        or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], dict) for pair in pairs)
    ):
        raise ValueError(f"VARIANTS of {file} is no {{name: {{key: value}}}} of at least one variant")
    seen = {}
    for name, _ in pairs:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                f"variant {name!r} of {file}: expected a name of letters, digits and . _ + - for its folder"
            )
        if name.casefold() in seen:
            raise ValueError(
                f"variants {seen[name.casefold()]!r} and {name!r} of {file} collide in name, and so in folder; "
                f"rename one"
            )
        seen[name.casefold()] = name
    return pairs


def _config(where, named, base, settings) -> ConfigDict:
    """The config of a variant, the cheap parts of which are built to see that they can be."""
    config, known = base.copy_and_resolve_references(), flatten(base.to_dict())
    for key, value in settings.items():
        if key == "seed":
            raise ValueError(f"{where} sets seed, which SEEDS does for every variant; drop it there")
        if key not in known:
            raise ValueError(f"{where}: its CONFIG, {named}, has no key {key!r}")
        if not matters(key):
            raise ValueError(f"{where} sets {key}, which changes nothing of what is computed; drop it")
        if value is None:
            raise ValueError(f"{where} sets {key} to None, which a flag cannot; leave it unset in the base config")
        kind = _type(base, key)
        value = float(value) if kind is float and type(value) is int else value
        if type(value) is not kind:
            raise ValueError(f"{where}: {key}={value!r} does not fit; expected a {kind.__name__}")
        config.update_from_flattened_dict({key: value})
    try:
        build.build_settings(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    return config


def _type(config, key) -> type:
    """What a key holds, also where it is unset."""
    *sections, last = key.split(".")
    return functools.reduce(lambda found, name: found[name], sections, config).get_type(last)


def _refuse_equal(file, flat):
    seen = {}
    for name, settings in flat.items():
        same = seen.setdefault(json.dumps(settings, sort_keys=True), name)
        if same != name:
            raise ValueError(f"variants {same!r} and {name!r} of {file} have the same settings; drop one")


def _flags(settings):
    return [f"--config.{key}={value}" for key, value in settings.items()]
