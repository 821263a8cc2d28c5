"""What studies share that choose learning rates first and go on where they were stopped."""

import itertools
import pathlib
from collections.abc import Callable, Sequence

import pandas as pd

from rpg_jax.storage.logs import replacing


def save(kept: pd.DataFrame, file: pathlib.Path) -> None:
    """Writes rows, whole or not at all."""
    with replacing(file) as draft:
        kept.to_parquet(draft, compression="zstd")


def best(tried: pd.DataFrame, most: int) -> float:
    """The rate of the largest mean area, of those of which at most `most` runs fell; if there is none, of those
    of which the fewest fell.

    Args:
      tried: a row for each run, with its `rate`, its score `area` and whether it `fell`.
    """
    table = tried.groupby("rate").agg(area=("area", "mean"), fell=("fell", "sum"))
    return float(table[table.fell <= max(most, table.fell.min())].area.idxmax())


def wanted(
    kept: pd.DataFrame, cell: dict, middle: int, rate: Callable[[int], float],
    outcomes: Callable[[pd.DataFrame], pd.DataFrame], tuning: Sequence[int], seeds: Sequence[int], most: int,
) -> list[tuple]:  # fmt: skip
    """The runs of a cell that are to be made next, (*cell, rate, seed) each; none once all are there.

    Three rates around the middle are tried on all tuning seeds; where the best is at an end of those that were tried,
    the next one of the grid is, too. Then the best one runs on the seeds that are compared.

    Args:
      kept: rows of runs, with the cell's columns, `rate` and `seed`.
      cell: {column: value} of what is compared.
      middle: number of a rate of the grid; rate: the rate of a number, which grows with it.
      outcomes: gives rows `area` and `fell`; most: as of `best`.
    """
    of = kept[(kept[list(cell)] == list(cell.values())).all(axis=1)]
    done = set(of[["rate", "seed"]].itertuples(index=False, name=None))
    numbers = [middle - 1, middle, middle + 1]
    while True:
        rates = [rate(number) for number in numbers]
        if missing := [run for run in itertools.product(rates, tuning) if run not in done]:
            break
        chosen = best(outcomes(of[of.rate.isin(rates) & of.seed.isin(tuning)]), most)
        if chosen == rates[0]:
            numbers.insert(0, numbers[0] - 1)
        elif chosen == rates[-1]:
            numbers.append(numbers[-1] + 1)
        else:
            missing = [(chosen, seed) for seed in seeds if (chosen, seed) not in done]
            break
    return [(*cell.values(), *run) for run in missing]
