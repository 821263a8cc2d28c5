"""The work of `python -m rpg_jax.study tradeoff`: from its flags to a grid, tables, CSV files and figures."""

import json
import math
import pathlib
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd

from rpg_jax import InputError
from rpg_jax.exact.verification import Case
from rpg_jax.lab import verification
from rpg_jax.lab.settings import Grid, parsed
from rpg_jax.lab.tradeoff import figures, measure, tables
from rpg_jax.lab.tradeoff.measure import Tradeoff
from rpg_jax.run.target import json_file, writable
from rpg_jax.storage.logs import jsonable, write_text_atomic

_OF_FORMS = ("epsilons", "ceilings", "betas", "divergences", "group")  # what an objective of one's own settles


def main(options: SimpleNamespace) -> None:
    """Measures the built-in forms, or --objective."""
    started, output = time.monotonic(), json_file(options.json)
    result = measured(options, verification.chosen_case(options))
    report(options, result, output)
    print(f"Forms: {len(result.forms)}, in {time.monotonic() - started:.0f} s.")


def measured(options: SimpleNamespace, case: Case | None = None) -> Tradeoff:
    """The trade-off of the built-in forms, or of an objective of the user's; `InputError` for flags without sense."""
    what = parsed(Grid, options)
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
    """Prints the clips; writes CSV files and figures into --out, and all tables into `output` as JSON."""
    frames, folder = tables.all_tables(result), pathlib.Path(options.out)
    print("Bias (of |∇J|), variance of one sample (of |∇J|²), and N*: with fewer samples the clip lowers the error.")
    verification.print_rows(*clips(frames["tradeoff"]))
    names = _write(folder, result, frames)
    if output:
        rows = {name: frame.to_dict("records") for name, frame in frames.items()}
        output.write_text(json.dumps(jsonable({"grid": result.grid._asdict(), **rows})))
    print(f"\nIn {folder}: {', '.join(names)}")


def clips(medians: pd.DataFrame) -> tuple[tuple, list[tuple]]:
    """A table's header and rows: bias in percent of |∇J|, one sample's variance over |∇J|², and N*, by distance."""
    at = tables.like_first(tables.shown(medians), ["samples"])  # none of the three depends on N
    rows: dict[tuple, list[str]] = {}
    for row in at.itertuples():
        key = (row.level, row.label, row.direction)
        star = "" if row.clip == "none" else f", {_star(row.n_star)}"
        rows.setdefault(key, [*key]).append(f"{_root(row.bias_squared)}, {row.variance:.3g}{star}")
    header = ("level", "clip", "direction", *(f"KL {kl:g}: bias, variance, N*" for kl in at.kl.unique()))
    return header, [tuple(row) for row in rows.values()]


def _star(n: float) -> str:
    """An N*, in words at its ends."""
    if n == 0 or math.isinf(n):
        return "always" if n else "never"
    return f"{n:,.0f}" if n >= 10 or n % 1 == 0 else f"{n:.1f}"


def _root(square: float) -> str:
    """The root of a relative square in percent; 0 where that is exact up to rounding."""
    return f"{100 * math.sqrt(square):.3g} %" if square > tables.TINY else "0"


def _write(folder: pathlib.Path, result: Tradeoff, frames: dict[str, pd.DataFrame]) -> list[str]:
    """Writes CSV files and figures, each whole or not at all; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{name}.csv": frame.to_csv(index=False, float_format="%.8g") for name, frame in frames.items()}
    files |= {f"{name}.svg": svg + "\n" for name, svg in figures.draw(result, frames).items()}
    for name, text in files.items():
        write_text_atomic(folder / name, text)
    return list(files)
