"""Figures of a grid's trade-off: the error against the number of samples, and of both levels against the distance."""

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting.figures import DASHES, MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, INK, frame, logarithmic
from rpg_jax.lab.tradeoff import tables
from rpg_jax.lab.tradeoff.measure import Tradeoff


def draw(result: Tradeoff, frames: dict[str, pd.DataFrame]) -> dict[str, str]:
    """{name: SVG} of what the grid has data for.

    Args:
      frames: of `tables.all_tables`.
    """
    figures = {}
    for level in ("token", "sequence"):
        if len(table := tables.shown(result.table, (level,))):
            figures[f"error_{level}"] = _errors(result, table, f"error_{level}")
    if "levels" in frames and (frames["levels"].kl > 0).any():
        figures["levels"] = _levels(frames["levels"])
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


def _errors(result: Tradeoff, table: pd.DataFrame, name: str) -> str:
    """Mean squared error of N samples' mean gradient: medians with their intervals, a row for each direction."""
    counts = np.geomspace(1, max(1000, 10 * max(result.grid.samples)), 41)
    points = table.merge(pd.DataFrame({"x": counts}), how="cross")
    points["y"] = tables.error(points, points.x)
    curves = tables.summary(points[["label", *tables.WHERE, "x", "y"]], ["label", *tables.WHERE, "x"])
    curves["panel"] = curves.direction.astype(str) + curves.kl.map(", KL(old‖new) = {:g}".format)
    return _panels(name, curves.rename(columns={"y_low": "low", "y_high": "high"}), "N, samples", curves.kl.nunique())


def _levels(levels: pd.DataFrame) -> str:
    """Unclipped token-level and sequence-level weights against the distance, at a few N; a panel a direction."""
    levels = tables.unclipped_levels(levels)
    samples = list(levels.samples.unique())
    points = pd.concat(
        at.assign(x=at.kl, y=at[f"{level}_mse"], label=f"{level} level, N = {count:,}", panel=at.direction)
        for count in sorted({samples[0], samples[len(samples) // 2], samples[-1]})
        for at in [levels[(levels.samples == count) & (levels.kl > 0)]]
        for level in ("token", "sequence")
    )
    return _panels("levels", points, "KL(old‖new), nats", points.panel.nunique())
