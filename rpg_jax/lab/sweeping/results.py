"""The table of a sweep's results: held-out accuracy of each variant, averaged over the seeds that are done."""

import pathlib
from collections.abc import Container

import pandas as pd

from rpg_jax.lab.reporting.logged import read_json
from rpg_jax.lab.sweeping.variants import Sweep

ACCURACIES = {"before": "accuracy_before", "last": "accuracy_after", "best": "best_accuracy"}  # column -> summary's key
MINUTES = "minutes, with warm start"


def table(out: pathlib.Path, sweep: Sweep, failed: Container[str]) -> str:
    """Lines of text; `failed` has the names of the runs that failed."""
    rows = []
    for run in sweep.runs:
        summary = read_json(out / run.name / "summary.json")
        row = {"variant": run.variant, "done": summary is not None, "failed": run.name in failed}
        numbers = {column: summary[key] for column, key in ACCURACIES.items()} if summary else {}
        rows.append(row | numbers | ({MINUTES: summary["wall_seconds"] / 60} if summary else {}))
    runs = pd.DataFrame(rows, columns=["variant", "done", "failed", *ACCURACIES, MINUTES])
    variants = runs.groupby("variant", sort=False)
    counts = pd.DataFrame(
        {
            "done": variants["done"].sum().astype(str) + "/" + variants.size().astype(str),
            "failed": variants["failed"].sum(),
        }
    )
    means = variants[[*ACCURACIES, MINUTES]].mean()
    formats = dict.fromkeys(ACCURACIES, "{:.1%}".format) | {MINUTES: "{:.1f}".format}
    lines = counts.join(means).rename_axis(None).to_string(formatters=formats, na_rep="-")
    return f"{sweep.file}, held-out mean@k over the seeds that are done\n{lines}"
