"""The flags and the work of `python -m rpg_jax.verify --tradeoff`: bias, variance and error by enumeration."""

import csv
import json
import math
import os
import pathlib
import tempfile
import time

import numpy as np
from absl import flags

from rpg_jax.exact import contract_faults
from rpg_jax.lab.tradeoff import figures as tradeoff_figures
from rpg_jax.lab.tradeoff import measure as tradeoff
from rpg_jax.lab.tradeoff import tables as tradeoff_tables
from rpg_jax.lab.tradeoff import words as tradeoff_words
from rpg_jax.lab.tradeoff.measure import Grid
from rpg_jax.run import cli, verify
from rpg_jax.storage.logs import jsonable

_DEFAULT = Grid()


def _joined(values) -> str:
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


_PAIRS = [f"{high:g}" if low == high else f"{low:g}:{high:g}" for low, high in _DEFAULT.epsilons]

_TRADEOFF = flags.DEFINE_bool(
    "tradeoff", False, "bias, variance and mean squared error of the gradient instead: tables, CSV and figures"
)
_OUT = flags.DEFINE_string("out", "runs/tradeoff", "with --tradeoff: folder of its CSV files and figures")
_WHOLE = {
    name: flags.DEFINE_integer(name, getattr(_DEFAULT, name), f"with --tradeoff: {text}")
    for name, text in (
        ("vocab", "tokens to choose from"),
        ("length", "tokens of a sequence"),
        ("problems", "random ones, of which medians are taken"),
        ("group", "draws that share a baseline, in the table of group baselines"),
        ("seed", "of the problems"),
    )
}
_LISTS = {
    name: flags.DEFINE_list(name, default, f"with --tradeoff: {text}")
    for name, default, text in (
        ("distances", _joined(_DEFAULT.distances), "KL(behavior || policy), nats a sequence"),
        ("samples", _joined(_DEFAULT.samples), "N, sequences that a gradient is averaged over"),
        ("epsilons", ",".join(_PAIRS), "clip bounds, EPSILON or LOW:HIGH; the first is that of tables and figures"),
        ("ceilings", _joined(_DEFAULT.ceilings), "clip_c; the first is that of tables and figures"),
        ("betas", _joined(_DEFAULT.betas), "coefficients of the divergence; the first is that of tables and figures"),
        ("divergences", _joined(_DEFAULT.divergences), "divergences to the behavior policy"),
    )
}
_OF_FORMS = ("epsilons", "ceilings", "betas", "divergences", "group")  # what an objective of one's own settles


def asked() -> bool:
    """Whether --tradeoff was given; `cli.Mistake` for a flag of its own without it."""
    given = [name for name in (*_WHOLE, *_LISTS, "out") if flags.FLAGS[name].present]
    if given and not _TRADEOFF.value:
        raise cli.Mistake(f"--{given[0]} goes with --tradeoff")
    return _TRADEOFF.value


def grid() -> Grid:
    """The grid that the flags describe; `cli.Mistake` for a value that is not a number."""
    lists = {name: flag.value for name, flag in _LISTS.items()}
    return Grid(
        **{name: flag.value for name, flag in _WHOLE.items()},
        distances=_numbers("distances", float, lists),
        samples=_numbers("samples", int, lists),
        epsilons=tuple(_bounds(word) for word in lists["epsilons"]),
        ceilings=_numbers("ceilings", float, lists),
        betas=_numbers("betas", float, lists),
        divergences=tuple(lists["divergences"]),
    )


def _number(flag, kind, word):
    try:
        value = kind(word)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise cli.Mistake(f"--{flag}: {word!r} is not {'a whole number' if kind is int else 'a number'}")
    return value


def _numbers(name, kind, lists) -> tuple:
    return tuple(_number(name, kind, word) for word in lists[name])


def _bounds(word: str) -> tuple[float, float]:
    """EPSILON, which bounds the ratio below too as far as it can (1 − EPSILON >= 0), or LOW:HIGH."""
    low, colon, high = word.partition(":")
    if colon:
        return _number("epsilons", float, low), _number("epsilons", float, high)
    return min(_number("epsilons", float, low), 1.0), _number("epsilons", float, low)


def measure(case=None) -> tradeoff.Tradeoff:
    """Of an objective of the user's, a `verify.Case`, or of the built-in forms if None."""
    what, place = grid(), pathlib.Path(_OUT.value)
    nearest = next(path for path in (place, *place.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise cli.Mistake(f"--out={place}: {nearest} is not a folder")
    if case is None:
        with cli.door():
            return tradeoff.measure(what)
    for name in _OF_FORMS:
        if flags.FLAGS[name].present:
            raise cli.Mistake(f"--{name} cannot matter: an objective of your own is measured as it is")
    with cli.door():
        tradeoff.check(what, 2)
    result = tradeoff.measure_objective(what, case.name, *case.members[0])
    if broken := (~np.isfinite(result.moments[0].variance + result.moments[0].bias)).sum():
        raise cli.Mistake(f"the gradient of {case.name} is not finite in {broken} of {result.kl_back.size} situations")
    return result


def main(options) -> None:
    """--tradeoff, of the built-in forms or of --objective."""
    started, output, case, faults = time.monotonic(), verify.json_file(options), verify.chosen_case(options), []
    if case is None:
        result = measure()
    else:
        with verify.running(case.name):
            faults, result = contract_faults(case.members[0][0]), measure(case)
    report(verify.print_table, result, output)
    for fault in faults:
        print(f"contract: {fault}")
    print(f"Forms: {len(result.forms)}, in {time.monotonic() - started:.0f} s.")


def report(show, result: tradeoff.Tradeoff, output=None):
    """Prints, and writes into --out.

    Args:
      show: (header, rows of strings) -> None, prints a table.
      output: path of a JSON file to write everything to, or None.
    """
    files = {
        "tradeoff": tradeoff_tables.rows(result),
        "best_epsilon": tradeoff_tables.best_epsilon(result),
        "levels": tradeoff_tables.levels(result),
        "groups": tradeoff_tables.group_rows(result),
    }
    files = {name: rows for name, rows in files.items() if rows}
    sentences = _tell(show, result, files)
    folder = pathlib.Path(_OUT.value)
    with cli.door():
        written = _write(folder, result, files)
        if output:
            report = {"grid": result.grid._asdict(), **files, "finding": sentences}
            output.write_text(json.dumps(jsonable(report)))
    print(f"\nIn {folder}: {', '.join(written)}")


def _tell(show, result, files) -> list[str]:
    """Prints the tables and the finding; its sentences."""
    print("Bias (of |∇J|), variance of one sample (of |∇J|²), and N*: with fewer samples the clip lowers the error.")
    show(*tradeoff_words.clips(result))
    sentences = tradeoff_words.finding(result)
    if "best_epsilon" in files:
        print("\nEpsilon (low/high) of least mean squared error:")
        show(*tradeoff_words.best(result, files["best_epsilon"]))
        sentences += tradeoff_words.finding_of_bounds(files["best_epsilon"])
    if "levels" in files:
        print("\nToken-level against sequence-level weights, unclipped, held against the sequence-level objective:")
        show(*tradeoff_words.level(result, files["levels"]))
        sentences += tradeoff_words.finding_of_levels(files["levels"])
    if "groups" in files:
        grid = result.grid
        where = f"uphill, KL {max(grid.distances):g}, beta {max(grid.betas):g}"
        print(f"\nAdvantages from a batch of one group of {grid.group}; {where}, token level, unclipped:")
        show(*tradeoff_words.groups(files["groups"]))
        sentences.append(tradeoff_words.finding_of_groups(files["groups"]))
    print("\nWhat it says (medians over problems):")
    for sentence in sentences:
        print(f"* {sentence}")
    return sentences


def _write(folder, result, files) -> list[str]:
    """Writes CSV files and figures, each whole or not at all; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = []
        for name, rows in files.items():
            path = pathlib.Path(scratch) / f"{name}.csv"
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
            made.append(path)
        made += tradeoff_figures.draw(result, scratch)
        for path in made:
            os.replace(path, folder / path.name)
    return [path.name for path in made]


def _cell(value):
    return f"{value:.8g}" if isinstance(value, float) else value
