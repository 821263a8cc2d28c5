"""The figure of a run's training curves, from the rows of `metrics.jsonl`."""

import math
import pathlib

import numpy as np

from rpg_jax.lab.reporting.logged import ALL, SCORE, finite
from rpg_jax.lab.reporting.style import COLORS, INK, frame, smoothed

NOISY = 30  # values from which on a curve is smoothed
RATE = "tokens a second"
LAYOUT = [["accuracy", "accuracy", "a", "b", "c"], ["accuracy", "accuracy", "d", "e", "f"]]
# Fixed: Matplotlib would measure all text for a layout that fits, which takes longer than drawing.
SPACING = dict(left=0.045, right=0.99, bottom=0.09, top=0.94, wspace=0.42, hspace=0.42)
# Small panel -> (title, label of the y axis, {key of a row: name in the legend}).
PANELS = {
    "a": ("Training reward", "mean of a response", {"train/reward": "reward"}),
    "b": ("Entropy", "nats a token", {"train/entropy": "entropy", "train/surprisal": "of the drawn tokens"}),
    "c": ("Response length", "tokens", {"train/response_length": "length"}),
    "d": ("KL to the behavior policy", "k3, nats a token", {"train/kl_behavior_k3": "KL"}),
    "e": ("Clip fraction", "share of tokens", {"train/clip_fraction": "clipped"}),
    "f": ("Throughput", RATE, {f"throughput/{name}_tokens_per_second": name for name in ("rollout", "update")}),
}


def training_figure(rows: list[dict], path) -> None:
    """Draws held-out accuracy with its interval, and the panels above, into `path` (png, pdf or svg by its suffix).

    `rows` are those of `metrics.jsonl`, each with `step`. A value that is missing, null or not finite is left out.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    steps = [row["step"] for row in rows] or [0]
    first, last = min(steps), max(steps)
    margin = 0.03 * (last - first) or 0.5
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(15, 5.6), dpi=120)
        axes = figure.subplot_mosaic(LAYOUT, gridspec_kw=SPACING)
        _draw_accuracy(axes["accuracy"], rows)
        for name, (title, unit, labels) in PANELS.items():
            curves = {label: _curve(rows, key) for key, label in labels.items()}
            _draw(axes[name], title, unit, {label: curve for label, curve in curves.items() if len(curve)})
        for axis in axes.values():
            axis.set_xlim(first - margin, last + margin)
            axis.xaxis.get_major_locator().set_params(min_n_ticks=1)  # of a single step
            if not axis.lines:
                axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center", va="center", color="#999999")
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def _curve(rows: list[dict], *keys: str) -> np.ndarray:
    """[n, 1 + keys] float64: the step and the values of the rows in which all of `keys` are finite numbers."""
    points = [(row["step"], *(finite(row.get(key)) for key in keys)) for row in rows]
    return np.array([point for point in points if not any(map(math.isnan, point))]).reshape(-1, 1 + len(keys))


def _draw(axis, title: str, unit: str, curves: dict[str, np.ndarray]) -> None:
    """Draws a small panel: the values and, in runs long enough to be noisy, their running mean in bold."""
    from matplotlib.ticker import EngFormatter

    frame(axis, title, "RL step", unit)
    if unit == RATE:
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
    for color, (label, curve) in zip(COLORS[1:], curves.items(), strict=False):
        steps, values = curve.T
        if len(values) >= NOISY:
            axis.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
            values = smoothed(values)
        marker = "o" if len(values) < 3 else None  # a line through one point cannot be seen
        axis.plot(steps, values, color=color, linewidth=1.6, label=label, marker=marker)
    if len(curves) > 1:
        axis.legend(frameon=False)


def _draw_accuracy(axis, rows: list[dict]) -> None:
    """Draws the held-out mean@k of every task and, in bold and with its interval, of all problems together."""
    from matplotlib.ticker import PercentFormatter

    matches = {key: match for row in rows for key in row if (match := SCORE.fullmatch(key))}
    scores = {key: match.groups() for key, match in matches.items() if len(_curve(rows, key))}  # key -> (task, k)
    measures = sorted({f"mean@{k}" for _, k in scores.values()})
    frame(axis, "Held-out accuracy", "RL step", ", ".join(measures) or "mean@k")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_ylim(-0.02, 1.02)
    ordered = sorted(scores.items(), key=lambda item: item[1][0] == ALL)  # the curve of all problems is drawn on top
    for number, (key, (task, k)) in enumerate(ordered):
        steps, accuracy = _curve(rows, key).T
        label = ("all problems" if task == ALL else task) + (f", mean@{k}" if len(measures) > 1 else "")
        if task != ALL:
            color = COLORS[1:][number % len(COLORS[1:])]
            axis.plot(steps, accuracy, color=color, linewidth=1.3, marker="o", markersize=3, label=label)
            continue
        _, _, low, high = _curve(rows, key, f"{key}_low", f"{key}_high").T
        if len(low) == len(steps):
            axis.fill_between(steps, low, high, color=INK, alpha=0.12, linewidth=0)
        axis.plot(steps, accuracy, color=INK, linewidth=2.4, marker="o", markersize=4, label=label)
        ends = dict.fromkeys(accuracy[[0, -1]])
        axis.set_title(" \N{RIGHTWARDS ARROW} ".join(map("{:.1%}".format, ends)), loc="right", fontweight="bold")
    if scores:
        axis.legend(loc="lower right", frameon=False)
