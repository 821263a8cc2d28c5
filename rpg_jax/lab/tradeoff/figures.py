"""Figures of a grid's trade-off: lines told apart by style and marker as well as by color, so that print will do."""

import pathlib

import numpy as np

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


def draw(result: Tradeoff, folder) -> list[pathlib.Path]:
    """Draws every figure that the grid has data for into an existing folder; the paths of the files."""
    folder = pathlib.Path(folder)
    made = []
    for level in ("token", "sequence"):
        if chosen := tables.shown(result, (level,)):
            made.append(_errors(result, chosen, level, folder / f"error_{level}.png"))
    best, pairs = tables.best_epsilon(result), tables.levels(result)
    if best:
        made.append(_moments(result, folder / "bias_variance.png"))
        made.append(_best(result, best, folder / "best_epsilon.png"))
    if pairs:
        made.append(_levels(result, pairs, folder / "levels.png"))
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


def _line(axis, number, x, y, label, every=1, band=None):
    color, style, marker = _STYLES[number % len(_STYLES)]
    label = label.replace("$", r"\$")  # a name, not a formula
    axis.plot(
        x, y, color=color, linestyle=style, marker=marker, markevery=every, markersize=4, linewidth=1.5, label=label
    )
    if band is not None:
        axis.fill_between(x, *band, color=color, alpha=0.12, linewidth=0)


def _finish(figure, axes, path) -> pathlib.Path:
    # Given by hand: Matplotlib's own choice leaves out names that begin with an underscore.
    lines = {line.get_label(): line for line in axes[0, 0].lines if not line.get_label().startswith("_child")}
    figure.legend(lines.values(), lines, loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
    return path


def _errors(result: Tradeoff, chosen, level, path):
    """Error against N: a row for each direction, a column for each distance."""
    grid = result.grid
    counts = np.geomspace(1, max(1000, 10 * max(grid.samples)), 41)
    beta = result.forms[chosen[0]].beta
    title = f"Mean squared error of N samples' mean gradient, over |∇J|²: {level} level, beta {beta:g}; median, 95 %"
    figure, axes = _panels(len(DIRECTIONS), len(grid.distances), title)
    for number, index in enumerate(chosen):
        median, low, high = tables.median_interval(tables.error(result.moments[index], counts))
        for j in range(len(DIRECTIONS)):
            for i, distance in enumerate(grid.distances):
                axis, label = axes[j, i], tables.spelled(result.forms[index])
                band = low[:, i, j], high[:, i, j]
                _line(axis, number, counts, median[:, i, j], label, (number, 8), band)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axes[0, i].set_title(f"KL(old‖new) = {distance:g}", fontsize=9)
                axes[-1, i].set_xlabel("N, samples", fontsize=9)
    for j, direction in enumerate(DIRECTIONS):
        axes[j, 0].set_ylabel(f"{direction}\nrelative error", fontsize=9)
    for axis in axes.flat:
        axis.axhline(1, color=_INK, linewidth=0.8, linestyle=(0, (1, 3)))  # estimating zero
    return _finish(figure, axes, path)


def _swept(result: Tradeoff, level) -> dict:
    """clip -> its (bounds, moments) over every epsilon, the first beta, c and divergence; widest last, then none."""
    first, grid = result.forms[0], result.grid
    clips = {}
    for form, moments in zip(result.forms, result.moments, strict=True):
        same = (form.level, form.divergence, form.beta) == (level, first.divergence, grid.betas[0])
        if same and form.clip_low is not None and form.clip_c in (None, grid.ceilings[0]):
            clips.setdefault(form.clip, []).append((form, moments))
    for members in clips.values():
        members.sort(key=lambda member: (member[0].clip_high, member[0].clip_low))
        members.append((None, result.unclipped(members[0][0])))
    return clips


def _names(members) -> list[str]:
    return [tables.bounds(form and form.clip_low, form and form.clip_high) for form, _ in members]


def _moments(result: Tradeoff, path):
    """Squared bias and variance against the bounds of each clip, one line a distance; uphill, token level."""
    grid, clips = result.grid, _swept(result, "token")
    title = f"Squared bias and variance of one sample, over |∇J|²: token level, uphill, beta {grid.betas[0]:g}"
    figure, axes = _panels(2, len(clips), title)
    for row, name in enumerate(("bias", "variance")):
        for column, members in enumerate(clips.values()):
            values = np.stack([getattr(m, name) / m.size for _, m in members])
            median, low, high = (np.where(x > tables.TINY, x, np.nan) for x in tables.median_interval(values))
            for i, distance in enumerate(grid.distances):
                band = low[:, i, 0], high[:, i, 0]
                _line(axes[row, column], i, np.arange(len(members)), median[:, i, 0], f"KL {distance:g}", band=band)
        if any(np.isfinite(line.get_ydata()).any() for axis in axes[row] for line in axis.lines):
            axes[row, 0].set_yscale("log")  # of the whole row
    for column, (clip, members) in enumerate(clips.items()):
        axes[0, column].set_title(f"clip {clip}", fontsize=9)
        axes[1, column].set_xlabel("epsilon (low/high)", fontsize=9)
        axes[1, column].set_xticks(np.arange(len(members)), _names(members), rotation=60)
    axes[0, 0].set_ylabel("squared bias (none where exact)", fontsize=9)
    axes[1, 0].set_ylabel("variance", fontsize=9)
    return _finish(figure, axes, path)


def _best(result: Tradeoff, best, path):
    """The bounds of least error against N, one line a distance: a row for each level, a column a direction."""
    grid, first = result.grid, best[0]
    kept = [x for x in best if all(x[k] == first[k] for k in ("objective", "divergence", "clip", "beta", "clip_c"))]
    title = f"Epsilon of least error: clip {first['clip']}, beta {first['beta']:g}, c {first['clip_c'] or 0:g}"
    figure, axes = _panels(2, len(DIRECTIONS), title)
    order = _names(next(iter(_swept(result, "token").values())))
    for row, level in enumerate(("token", "sequence")):
        for column, direction in enumerate(DIRECTIONS):
            axis = axes[row, column]
            for i, distance in enumerate(grid.distances):
                lines = [x for x in kept if (x["level"], x["direction"], x["kl"]) == (level, direction, distance)]
                heights = [order.index(tables.bounds(x["epsilon_low"], x["epsilon_high"])) for x in lines]
                nudge = 0.12 * (i - (len(grid.distances) - 1) / 2)  # equal choices stay visible
                _line(axis, i, [x["samples"] for x in lines], np.array(heights) + nudge, f"KL {distance:g}")
            axis.set_xscale("log")
            axis.set_yticks(np.arange(len(order)), order)
            axis.set_title(f"{level} level, {direction}", fontsize=9)
            axis.set_xlabel("N, samples", fontsize=9)
        axes[row, 0].set_ylabel("epsilon (low/high)", fontsize=9)
    return _finish(figure, axes, path)


def _levels(result: Tradeoff, pairs, path):
    """Unclipped token-level and sequence-level weighting against the distance, at a few N; a column a direction."""
    grid = result.grid
    samples = sorted({grid.samples[0], grid.samples[len(grid.samples) // 2], grid.samples[-1]})
    kept = [x for x in pairs if x["clip"] == "none" and (x["estimator"], x["beta"]) == ("reinforce", grid.betas[0])]
    kept = [x for x in kept if x["divergence"] == grid.divergences[0]]
    title = f"Unclipped weights of tokens and of sequences: error against the sequence-level J, beta {grid.betas[0]:g}"
    figure, axes = _panels(1, len(DIRECTIONS), title, height=3.4)
    for column, direction in enumerate(DIRECTIONS):
        number = 0
        for count in samples:
            for level in ("token", "sequence"):
                lines = [x for x in kept if (x["direction"], x["samples"]) == (direction, count)]
                x, y = [x["kl"] for x in lines], [x[f"{level}_mse"] for x in lines]
                _line(axes[0, column], number, x, y, f"{level} level, N = {count:,}")
                number += 1
        axes[0, column].set_xscale("symlog", linthresh=min([d for d in grid.distances if d] or [1]))
        axes[0, column].set_yscale("log")
        axes[0, column].set_title(direction, fontsize=9)
        axes[0, column].set_xlabel("KL(old‖new), nats", fontsize=9)
    axes[0, 0].set_ylabel("relative error", fontsize=9)
    return _finish(figure, axes, path)
