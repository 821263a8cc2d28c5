"""Figures of a grid's trade-off: lines told apart by style and marker as well as by color, so that print will do."""

import pathlib

import numpy as np
import pandas as pd

from rpg_jax.lab.tradeoff import tables
from rpg_jax.lab.tradeoff.measure import Tradeoff

# color (of different lightness), line style, marker
_STYLES = (
    ("#000000", "-", "o"),
    ("#0072b2", "--", "s"),
    ("#d55e00", "-.", "^"),
    ("#56a0c0", ":", "D"),
    ("#b05a90", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#7a7a7a", (0, (1, 2)), "x"),
)
_INK, _GRID = "#222222", "#dddddd"
_LINEAR, _LOG = {"value": "linear"}, {"value": "log"}


def draw(result: Tradeoff, frames: dict[str, pd.DataFrame], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws every figure that the grid has data for into an existing folder; the paths of the files.

    Args:
      frames: of `tables.all_tables`.
    """
    figures = {}
    for level in ("token", "sequence"):
        if len(table := tables.shown(result.table, (level,))):
            figures[f"error_{level}"] = _errors(result, table)
    if "best_epsilon" in frames:
        swept = _swept(frames["tradeoff"])
        figures["bias_variance"] = _moments(swept)
        figures["best_epsilon"] = _best(swept, frames["best_epsilon"])
    if "levels" in frames:
        figures["levels"] = _levels(frames["levels"])
    for name, figure in figures.items():
        figure.savefig(pathlib.Path(folder) / f"{name}.png")
    return [pathlib.Path(folder) / f"{name}.png" for name in figures]


def _facets(table: pd.DataFrame, title: str, xlabel: str, x: dict, y: dict, height: float = 2.7):
    """A figure and its axes [rows, columns]; x and y are the scales of the axes, as `Axes.set_xscale` takes them.

    Of the table, the columns `row` and `column` name a panel and `label` a line in it, through the points `x`, `y`, in
    a band from `low` to `high` where the table has them.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    rows, columns, labels = (list(table[name].unique()) for name in ("row", "column", "label"))
    figure = Figure(figsize=(3.3 * len(columns) + 1.8, height * len(rows) + 1.0), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11, color=_INK)
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharex="col", sharey="row")
    for axis in axes.flat:  # before anything is drawn: margins depend on the scale
        axis.set_xscale(**x)
        axis.set_yscale(**y)
    for (row, column, label), line in tables.grouped(table, ["row", "column", "label"]):
        axis, number = axes[rows.index(row), columns.index(column)], labels.index(label)
        color, style, marker = _STYLES[number % len(_STYLES)]
        look = {"color": color, "linestyle": style, "linewidth": 1.5, "marker": marker, "markersize": 4}
        axis.plot(line.x, line.y, **look, markevery=(number, 8) if len(line) > 20 else 1)
        if "low" in line:
            axis.fill_between(line.x, line.low, line.high, color=color, alpha=0.12, linewidth=0)
    # Handles are given explicitly, because Matplotlib's own choice leaves out names that begin with an underscore.
    names = [label.replace("$", r"\$") for label in labels]  # a name, not a formula
    figure.legend(axes[0, 0].lines, names, loc="outside right upper", frameon=False, fontsize=8)
    for axis in axes.flat:
        axis.grid(color=_GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for axis, column in zip(axes[0], columns, strict=True):
        axis.set_title(column, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel(xlabel, fontsize=9)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(row, fontsize=9)
    return figure, axes


def _named(distances: pd.Series, name: str = "KL {:g}") -> pd.Series:
    return distances.map(name.format)


def _errors(result: Tradeoff, table: pd.DataFrame):
    """Error against N: a row for each direction, a column for each distance."""
    counts = np.geomspace(1, max(1000, 10 * max(result.grid.samples)), 41)
    points = table.merge(pd.DataFrame({"x": counts}), how="cross")
    points["y"] = tables.error(points, points.x)
    curves = tables.summary(points[["label", *tables.WHERE, "x", "y"]], ["label", *tables.WHERE, "x"])
    curves["row"] = curves.direction.astype(str) + "\nrelative error"
    curves["column"] = _named(curves.kl, "KL(old‖new) = {:g}")
    where = f"{table.level.iloc[0]} level, beta {table.beta.iloc[0]:g}"
    title = f"Mean squared error of N samples' mean gradient, over |∇J|²: {where}; median, 95 %"
    curves = curves.rename(columns={"y_low": "low", "y_high": "high"})
    figure, axes = _facets(curves, title, "N, samples", _LOG, _LOG)
    for axis in axes.flat:
        axis.axhline(1, color=_INK, linewidth=0.8, linestyle=(0, (1, 3)))  # estimating zero
    return figure


def _swept(medians: pd.DataFrame) -> pd.DataFrame:
    """Medians uphill at token level, the first beta, c and divergence: a row for each clip, bounds and distance.

    `column` names the clip, `bounds` its bounds. The widest come last, then no clip, at every clip's end.
    """
    at = tables.like_first(medians, ["divergence", "level", "beta", "direction", "samples"])
    clipped = at[at.clip_low.notna()].drop_duplicates(["clip", *tables.BOUNDS, "kl"])  # keeps the first c
    clipped = clipped.sort_values(["clip_high", "clip_low"], kind="stable")
    unclipped = at[at["clip"] == "none"].drop_duplicates("kl")
    clips = clipped["clip"].unique()
    swept = [pd.concat([clipped[clipped["clip"] == c], unclipped]).assign(column=f"clip {c}") for c in clips]
    swept = pd.concat(swept, ignore_index=True)
    return swept.assign(bounds=list(map(tables.bounds, swept.clip_low, swept.clip_high)))


def _moments(swept: pd.DataFrame):
    """Squared bias and variance against the bounds of each clip, one line a distance; uphill, token level."""
    position, bounds = pd.factorize(swept.bounds)
    ends = {"y": "", "low": "_low", "high": "_high"}
    points = pd.concat(
        swept[["column"]].assign(
            **{to: swept[name + end].where(swept[name + end] > tables.TINY) for to, end in ends.items()},
            x=position,
            row=text,
            label=_named(swept.kl),
        )
        for name, text in (("bias_squared", "squared bias (none where exact)"), ("variance", "variance"))
    )
    title = f"Squared bias and variance of one sample, over |∇J|²: token level, uphill, beta {swept.beta.iloc[0]:g}"
    figure, axes = _facets(points, title, "epsilon (low/high)", _LINEAR, _LINEAR)
    for axis in axes[1]:
        axis.set_xticks(np.arange(len(bounds)), bounds, rotation=60)
    for row, (_, of_row) in zip(axes, tables.grouped(points, ["row"]), strict=True):
        if of_row.y.notna().any():  # nothing else has a logarithm
            row[0].set_yscale("log")
    return figure


def _best(swept: pd.DataFrame, best: pd.DataFrame):
    """The bounds of least error against N, one line a distance: a row for each level, a column a direction."""
    order = list(swept.bounds.unique())
    best = tables.first_clip(best)
    first, number = best.iloc[0], pd.factorize(best.kl)[0]
    height = [order.index(name) for name in map(tables.bounds, best.epsilon_low, best.epsilon_high)]
    points = best.assign(
        x=best.samples,
        y=height + 0.12 * (number - number.max() / 2),  # equal choices stay visible
        row=best.level.astype(str) + " level\nepsilon (low/high)",
        column=best.direction,
        label=_named(best.kl),
    )
    title = f"Epsilon of least error: clip {first['clip']}, beta {first.beta:g}, c {first.clip_c:g}"
    figure, axes = _facets(points, title, "N, samples", _LOG, _LINEAR)
    for axis in axes.flat:
        axis.set_yticks(np.arange(len(order)), order)
    return figure


def _levels(levels: pd.DataFrame):
    """Unclipped token-level and sequence-level weighting against the distance, at a few N; a column a direction."""
    levels = tables.unclipped_levels(levels)
    samples, distances = list(levels.samples.unique()), levels.kl.unique()
    few = sorted({samples[0], samples[len(samples) // 2], samples[-1]})
    points = pd.concat(
        at.assign(x=at.kl, y=at[f"{level}_mse"], label=f"{level} level, N = {count:,}")
        for count in few
        for at in [levels[levels.samples == count]]
        for level in ("token", "sequence")
    )
    points = points.assign(row="relative error", column=points.direction)
    beta = levels.beta.iloc[0]
    title = f"Unclipped weights of tokens and of sequences: error against the sequence-level J, beta {beta:g}"
    scale = {"value": "symlog", "linthresh": min(distances[distances > 0], default=1)}
    return _facets(points, title, "KL(old‖new), nats", scale, _LOG, height=3.4)[0]
