"""The table of a sweep's results: held-out accuracy of each variant, averaged over the seeds that are done."""

import pathlib
from collections.abc import Container

import pandas as pd

from rpg_jax.lab.reporting.logged import read_json
from rpg_jax.lab.sweeping.variants import Sweep
from rpg_jax.run.target import width

ACCURACIES = {"accuracy_before": "before", "accuracy_after": "last", "best_accuracy": "best"}  # summary's key -> column
MINUTES = "minutes, with warm start"


def table(out: pathlib.Path, sweep: Sweep, failed: Container[str]) -> str:
    """Lines of text; `failed` has the names of the runs that failed."""
    summaries = [read_json(out / run.name / "summary.json") for run in sweep.runs]
    columns = ACCURACIES | {"wall_seconds": MINUTES}
    runs = pd.DataFrame([summary or {} for summary in summaries]).reindex(columns=list(columns)).rename(columns=columns)
    runs = runs.astype(float).assign(done=[summary is not None for summary in summaries])
    runs["failed"] = [run.name in failed for run in sweep.runs]
    runs[MINUTES] /= 60
    variants = runs.groupby([run.variant for run in sweep.runs], sort=False)
    counts = variants[["done", "failed"]].sum()
    counts["done"] = counts["done"].astype(str) + "/" + variants.size().astype(str)
    formats = dict.fromkeys(ACCURACIES.values(), "{:.1%}".format) | {MINUTES: "{:.1f}".format}
    lines = counts.join(variants[list(formats)].mean()).to_string(formatters=formats, na_rep="-", line_width=width())
    return f"{sweep.file}, held-out mean@k over the seeds that are done\n{lines}"
