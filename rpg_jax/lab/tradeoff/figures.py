"""Figures of a grid's trade-off: the error against the number of samples, and of both levels against the distance."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting.figures import DASHES, MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, INK, frame, logarithmic
from rpg_jax.lab.tradeoff import tables


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


def _panels(name: str, points: pd.DataFrame, xlabel: str, columns: int) -> str:
    """A panel for each value of `panel`, and in it a line for each `label`, through the points `x`, `y`.

    In a band from `low` to `high` where the table has them.
    """
    panels = list(tables.grouped(points, ["panel"]))

    def panel(axes):
        for axis, ((title,), rows) in zip(axes, panels, strict=True):
            lines = {}
            for number, ((label,), line) in enumerate(tables.grouped(rows, ["label"])):
                look = dict(color=COLORS[number % len(COLORS)], linestyle=DASHES[number % len(DASHES)])
                look |= dict(marker=MARKERS[number % len(MARKERS)], markersize=3, linewidth=1.3)
                (lines[label],) = axis.plot(line.x, line.y, **look, markevery=(number, 8) if len(line) > 20 else 1)
                if "low" in line:
                    axis.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.12, linewidth=0)
            axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")  # estimating zero
            frame(axis, title, xlabel, "error, over |∇J|²")
            logarithmic(axis)
        # Handles are given explicitly, because Matplotlib's own choice leaves out names that begin with an underscore.
        axes[0].legend(lines.values(), lines, fontsize=6, frameon=False)

    return svg_figure(name, len(panels), panel, height=2.8, columns=columns)


def _errors(table: pd.DataFrame, samples: Sequence[int], name: str) -> str:
    """Mean squared error of N samples' mean gradient: medians with their intervals, a row for each direction."""
    counts = np.geomspace(1, max(1000, 10 * max(samples)), 41)
    points = table.merge(pd.DataFrame({"x": counts}), how="cross")
    points["y"] = tables.error(points, points.x)
    curves = tables.summary(points[["label", *tables.WHERE, "x", "y"]], ["label", *tables.WHERE, "x"])
    curves["panel"] = curves.direction.astype(str) + curves.kl.map(", KL(old‖new) = {:g}".format)
    return _panels(name, curves.rename(columns={"y_low": "low", "y_high": "high"}), "N, samples", curves.kl.nunique())


def _levels(unclipped: pd.DataFrame) -> str:
    """Token-level and sequence-level weights against the distance, at a few N; a panel a direction.

    Both errors are against the sequence-level J.
    """
    samples = list(unclipped.samples.unique())
    chosen = unclipped[unclipped.samples.isin([samples[0], samples[len(samples) // 2], samples[-1]])]
    label = chosen.level.astype(str) + chosen.samples.map(" level, N = {:,}".format)
    points = chosen.assign(x=chosen.kl, y=chosen.sequence_mse, label=label, panel=chosen.direction)
    return _panels("levels", points, "KL(old‖new), nats", points.panel.nunique())
