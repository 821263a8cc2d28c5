"""Runs kept as one parquet file: their settings, every number that they logged and their summaries, without responses.

A row is a run. `report FILE.parquet` reads what `report FOLDERS --keep=FILE.parquet` has written.
"""

import json
import pathlib

import pandas as pd

from rpg_jax import InputError
from rpg_jax.lab.reporting.runs import Run
from rpg_jax.storage.settings import flatten, matters

COLUMNS = ("path", "settings", "metrics", "lost", "summary")
SUFFIX = ".parquet"


def keep(runs: list[Run], file: pathlib.Path) -> None:
    """Writes runs to a file, whole or not at all; numbers are rounded to 7 digits."""
    table = pd.DataFrame([_row(run) for run in runs], columns=list(COLUMNS))
    draft = file.with_name(f".{file.name}.draft")
    file.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(draft, compression="zstd")
    draft.replace(file)


def _row(run: Run) -> tuple:
    settings = run.settings and {key: value for key, value in run.settings.items() if key == "seed" or matters(key)}
    columns = {"step": run.metrics.index.tolist()}
    for key, values in run.metrics.items():
        columns[key] = [None if pd.isna(value) else float(f"{value:.7g}") for value in values]
    # The name of a run is its folder's, beneath that of its sweep.
    path = "/".join(run.path.parts[-3:])
    return path, json.dumps(settings), json.dumps(columns), run.lost, json.dumps(run.summary)


def read(file: pathlib.Path) -> list[Run]:
    """The runs of a file; ValueError where it holds something else."""
    try:
        table = pd.read_parquet(file)
    except (OSError, ValueError) as error:  # Arrow's errors are among these
        raise InputError(f"{file} cannot be read: {error}") from None
    if set(table) != set(COLUMNS):
        raise InputError(f"{file} holds {', '.join(map(str, table))}; expected the {', '.join(COLUMNS)} of kept runs")
    runs = []
    for row in table.itertuples():
        columns = json.loads(row.metrics)
        steps = pd.Index(columns.pop("step"), dtype="int64", name="step")
        metrics = pd.DataFrame(columns, index=steps, dtype="float64")
        settings, summary = (json.loads(text) for text in (row.settings, row.summary))
        settings = settings and flatten(settings)
        runs.append(Run(pathlib.Path(row.path), settings, metrics, int(row.lost), [], summary))
    return runs
