"""Figures of a grid's trade-off: lines told apart by style and marker as well as by color, so that print will do."""

import pathlib

import numpy as np
import pandas as pd

from rpg_jax.lab.tradeoff import tables
from rpg_jax.lab.tradeoff.measure import Tradeoff
from rpg_jax.lab.tradeoff.moments import DIRECTIONS

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


def draw(result: Tradeoff, frames: dict[str, pd.DataFrame], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws every figure that the grid has data for into an existing folder; the paths of the files.

    Args:
      frames: of `tables.all_tables`.
    """
    folder = pathlib.Path(folder)
    medians, made = frames["tradeoff"], []
    for level in ("token", "sequence"):
        if len(table := tables.shown(result.table, (level,))):
            made.append(_errors(result, table, folder / f"error_{level}.png"))
    if "best_epsilon" in frames:
        made.append(_moments(medians, folder / "bias_variance.png"))
        made.append(_best(medians, frames["best_epsilon"], folder / "best_epsilon.png"))
    if "levels" in frames:
        made.append(_levels(frames["levels"], folder / "levels.png"))
    return made


def _panels(rows: int, columns: int, title: str, width=3.3, height=2.7):
    """A figure with its title and axes [rows, columns]."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(width * columns + 1.8, height * rows + 1.0), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11, color=_INK)
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col", sharey="row")
    for axis in axes.flat:
        axis.grid(color=_GRID, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return figure, axes


def _line(axis, number: int, x, y, label: str, every=1, band=None):
    color, style, marker = _STYLES[number % len(_STYLES)]
    label = label.replace("$", r"\$")  # a name, not a formula
    axis.plot(
        x, y, color=color, linestyle=style, marker=marker, markevery=every, markersize=4, linewidth=1.5, label=label
    )
    if band is not None:
        axis.fill_between(x, *band, color=color, alpha=0.12, linewidth=0)


def _finish(figure, axes, path: pathlib.Path) -> pathlib.Path:
    # Handles are given explicitly, because Matplotlib's own choice leaves out names that begin with an underscore.
    lines = {line.get_label(): line for line in axes[0, 0].lines if not line.get_label().startswith("_child")}
    figure.legend(lines.values(), lines, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
    return path


def _errors(result: Tradeoff, table: pd.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """Error against N: a row for each direction, a column for each distance."""
    distances = result.grid.distances
    counts = np.geomspace(1, max(1000, 10 * max(result.grid.samples)), 41)
    table = table.merge(pd.DataFrame({"samples": counts}), how="cross")
    table["mse"] = tables.error(table, table.samples)
    curves = tables.median_interval(table, [*tables.FORM, *tables.WHERE, "samples"], ["mse"]).reset_index()
    level, beta = table.level.iloc[0], table.beta.iloc[0]
    title = f"Mean squared error of N samples' mean gradient, over |∇J|²: {level} level, beta {beta:g}; median, 95 %"
    figure, axes = _panels(len(DIRECTIONS), len(distances), title)
    for number, (_, of_form) in enumerate(tables.grouped(curves, tables.FORM)):
        label = tables.spelled(of_form.iloc[0])
        for (direction, distance), curve in tables.grouped(of_form, tables.WHERE):
            axis = axes[DIRECTIONS.index(direction), distances.index(distance)]
            _line(axis, number, curve.samples, curve.mse, label, (number, 8), (curve.mse_low, curve.mse_high))
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.axhline(1, color=_INK, linewidth=0.8, linestyle=(0, (1, 3)))  # estimating zero
    for column, distance in enumerate(distances):
        axes[0, column].set_title(f"KL(old‖new) = {distance:g}", fontsize=9)
        axes[-1, column].set_xlabel("N, samples", fontsize=9)
    for row, direction in enumerate(DIRECTIONS):
        axes[row, 0].set_ylabel(f"{direction}\nrelative error", fontsize=9)
    return _finish(figure, axes, path)


def _swept(medians: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """clip -> medians uphill at token level, the first beta, c and divergence: a row for each bounds and distance.

    The widest bounds come last, then no clip. `bounds` is their name.
    """
    at = tables.like_first(medians, ["divergence", "level", "beta", "direction", "samples"])
    clipped = at[at.clip_low.notna()].drop_duplicates(["clip", *tables.BOUNDS, "kl"])  # keeps the first c
    clipped = clipped.sort_values(["clip_high", "clip_low"], kind="stable")
    unclipped = at[at["clip"] == "none"].drop_duplicates("kl")
    swept = {clip: pd.concat([rows, unclipped]) for (clip,), rows in tables.grouped(clipped, ["clip"])}
    return {
        clip: rows.assign(bounds=list(map(tables.bounds, rows.clip_low, rows.clip_high)))
        for clip, rows in swept.items()
    }


def _moments(medians: pd.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """Squared bias and variance against the bounds of each clip, one line a distance; uphill, token level."""
    swept = _swept(medians)
    title = f"Squared bias and variance of one sample, over |∇J|²: token level, uphill, beta {medians.beta.iloc[0]:g}"
    figure, axes = _panels(2, len(swept), title)
    for column, (clip, of_clip) in enumerate(swept.items()):
        for row, name in enumerate(("bias_squared", "variance")):
            for number, (distance, line) in enumerate(of_clip.groupby("kl", sort=False)):
                line = line[[name, f"{name}_low", f"{name}_high"]]
                median, low, high = line.where(line > tables.TINY).to_numpy().T
                _line(axes[row, column], number, np.arange(len(line)), median, f"KL {distance:g}", band=(low, high))
        names = of_clip.bounds.unique()
        axes[0, column].set_title(f"clip {clip}", fontsize=9)
        axes[1, column].set_xlabel("epsilon (low/high)", fontsize=9)
        axes[1, column].set_xticks(np.arange(len(names)), names, rotation=60)
    for row in axes:
        if any(np.isfinite(line.get_ydata()).any() for axis in row for line in axis.lines):
            row[0].set_yscale("log")  # of the whole row
    axes[0, 0].set_ylabel("squared bias (none where exact)", fontsize=9)
    axes[1, 0].set_ylabel("variance", fontsize=9)
    return _finish(figure, axes, path)


def _best(medians: pd.DataFrame, best: pd.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """The bounds of least error against N, one line a distance: a row for each level, a column a direction."""
    best = tables.like_first(best, ["objective", "divergence", "clip", "beta", "clip_c"])
    order = list(next(iter(_swept(medians).values())).bounds.unique())
    best["height"] = [
        order.index(tables.bounds(*pair)) for pair in zip(best.epsilon_low, best.epsilon_high, strict=True)
    ]
    first, distances = best.iloc[0], list(best.kl.unique())
    title = f"Epsilon of least error: clip {first['clip']}, beta {first.beta:g}, c {first.clip_c:g}"
    figure, axes = _panels(2, len(DIRECTIONS), title)
    for row, level in enumerate(("token", "sequence")):
        for column, direction in enumerate(DIRECTIONS):
            axis = axes[row, column]
            at = best[(best.level == level) & (best.direction == direction)]
            for number, (distance, line) in enumerate(at.groupby("kl", sort=False)):
                nudge = 0.12 * (number - (len(distances) - 1) / 2)  # equal choices stay visible
                _line(axis, number, line.samples, line.height + nudge, f"KL {distance:g}")
            axis.set_xscale("log")
            axis.set_yticks(np.arange(len(order)), order)
            axis.set_title(f"{level} level, {direction}", fontsize=9)
            axis.set_xlabel("N, samples", fontsize=9)
        axes[row, 0].set_ylabel("epsilon (low/high)", fontsize=9)
    return _finish(figure, axes, path)


def _levels(levels: pd.DataFrame, path: pathlib.Path) -> pathlib.Path:
    """Unclipped token-level and sequence-level weighting against the distance, at a few N; a column a direction."""
    levels = tables.unclipped_levels(levels)
    samples, distances = list(levels.samples.unique()), levels.kl.unique()
    title = f"Unclipped weights of tokens and of sequences: error against the sequence-level J, beta {levels.beta.iloc[0]:g}"
    figure, axes = _panels(1, len(DIRECTIONS), title, height=3.4)
    for axis, direction in zip(axes[0], DIRECTIONS, strict=True):
        number = 0
        for count in sorted({samples[0], samples[len(samples) // 2], samples[-1]}):
            line = levels[(levels.direction == direction) & (levels.samples == count)]
            for level in ("token", "sequence"):
                _line(axis, number, line.kl, line[f"{level}_mse"], f"{level} level, N = {count:,}")
                number += 1
        axis.set_xscale("symlog", linthresh=min(distances[distances > 0], default=1))
        axis.set_yscale("log")
        axis.set_title(direction, fontsize=9)
        axis.set_xlabel("KL(old‖new), nats", fontsize=9)
    axes[0, 0].set_ylabel("relative error", fontsize=9)
    return _finish(figure, axes, path)
