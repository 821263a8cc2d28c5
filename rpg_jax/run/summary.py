"""The summary of a finished run: `summary.json` and `figures/training.png`, both made from `metrics.jsonl`."""

import importlib.metadata
import pathlib
import platform
import re
from collections.abc import Callable

import jax

from rpg_jax import InputError
from rpg_jax.storage.logs import read_jsonl, write_json_atomic
from rpg_jax.training.evaluation import ALL

PACKAGES = ("jax", "jaxlib", "optax", "orbax-checkpoint", "grain", "numpy")


def accuracies(row: dict) -> dict[str, tuple[float, float, float]]:
    """task -> (mean@k, low, high) of a row of `metrics.jsonl`; empty if its step was not evaluated."""
    means = {match[1]: key for key in row if (match := re.fullmatch(r"eval/(.+)/mean@\d+", key))}
    return {task: tuple(row[f"{key}{end}"] for end in ("", "_low", "_high")) for task, key in means.items()}


def write_summary(path: pathlib.Path, totals: dict, draw: Callable[[list[dict], pathlib.Path], None]) -> dict:
    """Writes both files into the run's folder and returns the summary.

    `totals` are those of `training.loop`; `draw(rows, file)` draws the figure. Raises ValueError when the log has lost
    every evaluation.
    """
    rows, _ = read_jsonl(path / "metrics.jsonl")
    evaluated = [tasks for row in rows if ALL in (tasks := accuracies(row))]
    if not evaluated:
        raise InputError(f"{path}/metrics.jsonl has no evaluation any more; put its rows back, or train anew elsewhere")
    before, after = evaluated[0], evaluated[-1]
    summary = {
        "steps": rows[-1]["step"],
        "accuracy_before": before[ALL][0],
        "accuracy_before_interval": before[ALL][1:],
        "accuracy_after": after[ALL][0],
        "accuracy_after_interval": after[ALL][1:],
        "best_accuracy": max(tasks[ALL][0] for tasks in evaluated),
        "tasks": {task: {"before": before.get(task), "after": after[task]} for task in after if task != ALL},
        "wall_seconds": totals["seconds"],
        "generated_tokens": totals["tokens"],
        "compilations_after_warmup": totals["compilations_after_warmup"],
        "skipped_updates": next((row[name] for row in reversed(rows) if (name := "train/skipped_updates") in row), 0),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in PACKAGES},
    }
    draw(rows, path / "figures" / "training.png")
    write_json_atomic(path / "summary.json", summary)
    return summary
