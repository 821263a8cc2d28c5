"""The figure of a run's training curves, from the rows of `metrics.jsonl`."""

import pathlib
import re

import numpy as np

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinct for color-blind readers, too
_INK, _GRID = "#333333", "#e3e3e3"
_EVALUATED = re.compile(r"eval/(.+)/(mean@\d+)")
_ALL = "all"  # every problem of every task
_RATE = "tokens a second"
_LAYOUT = [["accuracy", "accuracy", "a", "b", "c"], ["accuracy", "accuracy", "d", "e", "f"]]

# Small panel -> (title, label of the y axis, {key of a row: name in the legend}).
_PANELS = {
    "a": ("Training reward", "mean of a response", {"train/reward": "reward"}),
    "b": ("Entropy", "nats a token", {"train/entropy": "entropy"}),
    "c": ("Response length", "tokens", {"train/response_length": "length"}),
    "d": ("KL to the behavior policy", "k3, nats a token", {"train/kl_behavior_k3": "KL"}),
    "e": ("Clip fraction", "share of tokens", {"train/clip_fraction": "clipped"}),
    "f": (
        "Throughput",
        _RATE,
        {"throughput/rollout_tokens_per_second": "rollout", "throughput/update_tokens_per_second": "update"},
    ),
}


def training_figure(rows: list[dict], path) -> None:
    """Draws held-out accuracy with its interval, and the panels above, into `path` (png, pdf or svg by its suffix).

    `rows` are those of `metrics.jsonl`, each with `step`. A value that is missing, null or not finite is left out.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    style = {"font.size": 9, "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK}
    with rc_context(style):
        figure = Figure(figsize=(15, 5.6), dpi=120, layout="constrained")
        axes = figure.subplot_mosaic(_LAYOUT)
        steps = [row["step"] for row in rows] or [0]
        _draw_accuracy(axes["accuracy"], rows)
        for name, (title, unit, keys) in _PANELS.items():
            curves = {label: _series(rows, key) for key, label in keys.items()}
            _draw(axes[name], title, unit, {label: curve for label, curve in curves.items() if curve[0].size})
        for axis in axes.values():
            margin = 0.03 * (max(steps) - min(steps)) or 0.5
            axis.set_xlim(min(steps) - margin, max(steps) + margin)
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _series(rows: list[dict], key: str) -> np.ndarray:
    """The steps and the values f64[2, N] of a key, where the value is a finite number."""
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    points = np.array(points, np.float64).reshape(-1, 2)
    return points[np.isfinite(points).all(axis=1)].T


def _draw(axis, title, unit, curves):
    """Draws a small panel: the values and, in runs long enough to be noisy, their running mean in bold."""
    _frame(axis, title, unit)
    for color, (label, (steps, values)) in zip(_COLORS, curves.items(), strict=False):
        smooth = _running_mean(values)
        if smooth is not values:
            axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
        marker = "o" if len(values) < 3 else None  # a line through one point cannot be seen
        axis.plot(steps, smooth, color=color, linewidth=1.6, label=label, marker=marker)
    if len(curves) > 1:
        axis.legend(frameon=False)
    if not curves:
        _mark_as_not_logged(axis)


def _draw_accuracy(axis, rows):
    """Draws the held-out mean@k of every task and, in bold and with its interval, of all problems together."""
    from matplotlib.ticker import PercentFormatter

    keys = dict.fromkeys(key for row in rows for key in row if _EVALUATED.fullmatch(key))
    curves = {key: _series(rows, key) for key in keys}
    tasks = {key: _EVALUATED.fullmatch(key) for key, (steps, _) in curves.items() if steps.size}
    measures = sorted({task[2] for task in tasks.values()})
    _frame(axis, "Held-out accuracy", ", ".join(measures) or "mean@k")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_ylim(-0.02, 1.02)
    others = [key for key, task in tasks.items() if task[1] != _ALL]
    for number, key in enumerate(others):
        color, label = _COLORS[number % len(_COLORS)], _label(tasks[key], measures)
        axis.plot(*curves[key], color=color, linewidth=1.3, marker="o", markersize=3, label=label)
    for key in tasks.keys() - set(others):
        steps, values = curves[key]
        (low_steps, low), (high_steps, high) = _series(rows, f"{key}_low"), _series(rows, f"{key}_high")
        if np.array_equal(low_steps, steps) and np.array_equal(high_steps, steps):
            axis.fill_between(steps, low, high, color=_INK, alpha=0.12, linewidth=0)
        label = _label(tasks[key], measures)
        axis.plot(steps, values, color=_INK, linewidth=2.4, marker="o", markersize=4, label=label)
        change = " \N{RIGHTWARDS ARROW} ".join(f"{value:.1%}" for value in dict.fromkeys(values[[0, -1]].tolist()))
        axis.set_title(change, loc="right", fontweight="bold")
    if tasks:
        axis.legend(loc="lower right", frameon=False)
    else:
        _mark_as_not_logged(axis)


def _label(task, measures):
    name = "all problems" if task[1] == _ALL else task[1]
    return name if len(measures) == 1 else f"{name}, {task[2]}"


def _frame(axis, title, unit):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel(unit)
    axis.set_xlabel("step")
    axis.grid(color=_GRID, linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_GRID)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    if unit == _RATE:
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)


def _mark_as_not_logged(axis):
    axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color="#999999")


def _running_mean(values, shortest=30):
    """The centered mean over a tenth of the run, or the values themselves if they are few."""
    if len(values) < shortest:
        return values
    half = len(values) // 20
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (total[high] - total[low]) / (high - low)
