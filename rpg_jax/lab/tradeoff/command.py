"""The work of `python -m rpg_jax.verify --tradeoff`: from its flags to a grid, tables, CSV files and figures."""

import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pandas as pd

from rpg_jax import InputError
from rpg_jax.exact import contract_faults
from rpg_jax.exact.verification import Case
from rpg_jax.lab import verification
from rpg_jax.lab.tradeoff import figures, measure, tables, words
from rpg_jax.lab.tradeoff.measure import Tradeoff
from rpg_jax.lab.tradeoff.settings import LISTS, WHOLE, Grid
from rpg_jax.run.target import json_file, writable
from rpg_jax.storage.logs import jsonable

_OF_FORMS = ("epsilons", "ceilings", "betas", "divergences", "group")  # what an objective of one's own settles


def asked(options: SimpleNamespace) -> bool:
    """Whether --tradeoff was given; `InputError` for a flag of its own without it."""
    if options.figures and options.tradeoff:
        raise InputError("--figures and --tradeoff exclude each other; give one")
    own = (*WHOLE, *LISTS) if options.figures else (*WHOLE, *LISTS, "out")
    given = [name for name in own if name in options.given]
    if given and not options.tradeoff:
        raise InputError(f"--{given[0]} goes with --tradeoff")
    return options.tradeoff


def grid(options: SimpleNamespace) -> Grid:
    """The grid that the flags describe; `InputError` for a value that is not a number."""
    numbers = {
        name: tuple(_number(name, kind, word) for word in getattr(options, name))
        for name, kind in (("distances", float), ("samples", int), ("ceilings", float), ("betas", float))
    }
    return Grid(
        **{name: getattr(options, name) for name in WHOLE},
        **numbers,
        epsilons=tuple(_bounds(word) for word in options.epsilons),
        divergences=tuple(options.divergences),
    )


def _number(flag: str, kind: Callable, word: str):
    try:
        value = kind(word)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise InputError(f"--{flag}: {word!r} is not {'a whole number' if kind is int else 'a number'}")
    return value


def _bounds(word: str) -> tuple[float, float]:
    """EPSILON, which bounds the ratio below too as far as it can (1 − EPSILON >= 0), or LOW:HIGH."""
    low, colon, high = word.partition(":")
    if colon:
        return _number("epsilons", float, low), _number("epsilons", float, high)
    return min(_number("epsilons", float, low), 1.0), _number("epsilons", float, low)


def main(options: SimpleNamespace) -> None:
    """--tradeoff, of the built-in forms or of --objective."""
    started, output = time.monotonic(), json_file(options.json)
    case, faults = verification.chosen_case(options), []
    if case is None:
        result = measured(options)
    else:
        result, faults = measured(options, case), contract_faults(case.members[0][0])
    report(options, result, output)
    for fault in faults:
        print(f"contract: {fault}")
    print(f"Forms: {len(result.forms)}, in {time.monotonic() - started:.0f} s.")


def measured(options: SimpleNamespace, case: Case | None = None) -> Tradeoff:
    """The trade-off of the built-in forms, or of an objective of the user's; `InputError` for flags without sense."""
    what = grid(options)
    writable("out", options.out)
    if case is None:
        return measure.measure(what)
    for name in _OF_FORMS:
        if name in options.given:
            raise InputError(f"--{name} cannot matter: an objective of your own is measured as it is")
    measure.check(what, 2)
    result = measure.measure_objective(what, case.name, *case.members[0])
    gradients = result.table[result.table.objective == case.name]
    if broken := (~np.isfinite(gradients.variance + gradients.bias_squared)).sum():
        raise InputError(f"the gradient of {case.name} is not finite in {broken} of {len(gradients)} situations")
    return result


def report(options: SimpleNamespace, result: Tradeoff, output: pathlib.Path | None = None) -> None:
    """Prints tables and sentences; writes CSV files and figures into --out, and all of it into `output` as JSON."""
    frames, folder = tables.all_tables(result), pathlib.Path(options.out)
    print("Bias (of |∇J|), variance of one sample (of |∇J|²), and N*: with fewer samples the clip lowers the error.")
    verification.print_rows(*words.clips(frames["tradeoff"]))
    if "best_epsilon" in frames:
        print("\nEpsilon (low/high) of least mean squared error:")
        verification.print_rows(*words.best(frames["best_epsilon"]))
    if "levels" in frames:
        print("\nToken-level against sequence-level weights, unclipped, held against the sequence-level objective:")
        verification.print_rows(*words.levels(frames["levels"]))
    if "groups" in frames:
        where = f"uphill, KL {max(result.grid.distances):g}, beta {max(result.grid.betas):g}"
        print(f"\nAdvantages from a batch of one group of {result.grid.group}; {where}, token level, unclipped:")
        verification.print_rows(*words.groups(frames["groups"]))
    sentences = words.finding(frames)
    print("\nWhat it says (medians over problems):", *sentences, sep="\n* ")
    names = _write(folder, result, frames)
    if output:
        rows = {name: frame.to_dict("records") for name, frame in frames.items()}
        output.write_text(json.dumps(jsonable({"grid": result.grid._asdict(), **rows, "finding": sentences})))
    print(f"\nIn {folder}: {', '.join(names)}")


def _write(folder: pathlib.Path, result: Tradeoff, frames: dict[str, pd.DataFrame]) -> list[str]:
    """Writes CSV files and figures, each whole or not at all; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = [pathlib.Path(scratch) / f"{name}.csv" for name in frames]
        for path, frame in zip(made, frames.values(), strict=True):
            frame.to_csv(path, index=False, float_format="%.8g")
        made += figures.draw(result, frames, pathlib.Path(scratch))
        for path in made:
            os.replace(path, folder / path.name)
    return [path.name for path in made]
