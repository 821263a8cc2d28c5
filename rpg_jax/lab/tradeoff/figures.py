"""Figures of a grid's trade-off: the error against the number of samples, and of both levels against the distance."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting.figures import line_panels
from rpg_jax.lab.tradeoff import tables

ERROR = "error, over |∇J|²"  # 1 is that of estimating zero


def draw(table: pd.DataFrame, medians: pd.DataFrame, samples: Sequence[int]) -> dict[str, str]:
    """{name: SVG} of what there is data for.

    Args:
      table: of `measure.measure`; medians: of `tables.tradeoff`.
    """
    figures = {}
    for level in ("token", "sequence"):
        if len(of_level := tables.shown(table, (level,))):
            figures[f"error_{level}"] = _errors(of_level, samples, f"error_{level}")
    unclipped = medians[(medians["clip"] == "none") & (medians.estimator == "reinforce") & (medians.kl > 0)]
    if unclipped.level.nunique() == 2:
        figures["levels"] = _levels(tables.like_first(unclipped, ["divergence", "beta"]))
    return figures


def _errors(table: pd.DataFrame, samples: Sequence[int], name: str) -> str:
    """Mean squared error of N samples' mean gradient: medians with their intervals, a row for each direction."""
    counts = np.geomspace(1, max(1000, 10 * max(samples)), 41)
    points = table.merge(pd.DataFrame({"x": counts}), how="cross")
    points["y"] = tables.error(points, points.x)
    curves = tables.summary(points[["label", *tables.WHERE, "x", "y"]], ["label", *tables.WHERE, "x"])
    curves["panel"] = curves.direction.astype(str) + curves.kl.map(", KL(old‖new) = {:g}".format)
    curves = curves.rename(columns={"y_low": "low", "y_high": "high"})
    return line_panels(name, curves, "N, samples", ERROR, curves.kl.nunique())


def _levels(unclipped: pd.DataFrame) -> str:
    """Token-level and sequence-level weights against the distance, at a few N; a panel a direction.

    Both errors are against the sequence-level J.
    """
    samples = list(unclipped.samples.unique())
    chosen = unclipped[unclipped.samples.isin([samples[0], samples[len(samples) // 2], samples[-1]])]
    label = chosen.level.astype(str) + chosen.samples.map(" level, N = {:,}".format)
    points = chosen.assign(x=chosen.kl, y=chosen.sequence_mse, label=label, panel=chosen.direction)
    return line_panels("levels", points, "KL(old‖new), nats", ERROR, points.panel.nunique())
