"""The summary of a finished run: `summary.json` and `figures/training.png`, both made from `metrics.jsonl`."""

import importlib.metadata
import pathlib
import platform
import re
from collections.abc import Callable

import jax

from rpg_jax.storage.logs import read_jsonl, write_json_atomic
from rpg_jax.training.evaluation import ALL

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def accuracies(row: dict) -> dict[str, tuple[float, float, float]]:
    """task -> (mean@k, low, high) of a row of `metrics.jsonl`; empty if its step was not evaluated."""
    means = {key: re.fullmatch(r"eval/(.+)/mean@\d+", key) for key in row}
    return {match[1]: (row[key], row[f"{key}_low"], row[f"{key}_high"]) for key, match in means.items() if match}


def write_summary(path: pathlib.Path, totals: dict, draw: Callable[[list[dict], pathlib.Path], None]) -> dict:
    """Writes both files into the run's folder and returns the summary.

    `totals` are those of `training.loop`; `draw(rows, file)` draws the figure.
    """
    rows, _ = read_jsonl(path / "metrics.jsonl")
    evaluated = [row for row in rows if accuracies(row)]
    before, after = accuracies(evaluated[0]), accuracies(evaluated[-1])
    summary = {
        "steps": rows[-1]["step"],
        "accuracy_before": before[ALL][0],
        "accuracy_before_interval": before[ALL][1:],
        "accuracy_after": after[ALL][0],
        "accuracy_after_interval": after[ALL][1:],
        "best_accuracy": max(accuracies(row)[ALL][0] for row in evaluated),
        "tasks": {task: {"before": before[task], "after": after[task]} for task in after if task != ALL},
        "wall_seconds": totals["seconds"],
        "generated_tokens": totals["tokens"],
        "compilations_after_warmup": totals["compilations_after_warmup"],
        "skipped_updates": rows[-1].get("train/skipped_updates", 0),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
    }
    draw(rows, path / "figures" / "training.png")
    write_json_atomic(path / "summary.json", summary)
    return summary
