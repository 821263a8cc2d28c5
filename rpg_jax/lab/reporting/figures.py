"""A report's figures as SVG: told apart by panel, line style and marker, not by color alone."""

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting.estimates import over_runs
from rpg_jax.lab.reporting.style import COLORS, INK, frame, logarithmic, smoothed

CONTEXT, BAND = "#b0b0b0", "#d9d9d9"
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^Dvx"
COLUMNS = 4
MOST_BANDS = 4  # in one panel
FAR = 20  # a range of so many times the least value gets a logarithmic axis
MOST_LETTERS = 30  # of a name over a panel, or beside it
DYNAMICS = {
    "train/reward": "Training reward",
    "train/entropy": "Entropy, nats a token",
    "train/response_length": "Response length, tokens",
    "train/turns": "Turns of an episode",
    "train/kl_behavior_k3": "KL to the behavior policy (k3)",
    "train/kl_reference_weighted": "KL to the reference (w k3)",
    "train/clip_fraction": "Clip fraction",
    "train/grad_norm": "Gradient norm",
}


def curves(comparison) -> str:
    """A panel a variant: its mean over runs and 95 % band, with the other variants in gray behind it.

    Dashed where not all of its runs were evaluated; a dotted vertical line at the step of comparison. Axes reach as far
    as single runs; the band of two runs may go beyond.
    """
    step, scores = comparison.step, comparison.scores.mean(axis=1)
    names = [*comparison.variants, *comparison.behind]
    tables = {name: over_runs(scores.loc[name], "step").sort_index() for name in names}
    low, high, last = scores.min(), scores.max(), max(table.index[-1] for table in tables.values())
    margin = 0.05 * (high - low) or 0.02

    def draw(axes):
        for axis, (name, table) in zip(axes, tables.items(), strict=True):
            for other, behind in tables.items():
                if other != name:
                    axis.plot(behind.index, behind["value"], color=CONTEXT, linewidth=0.8)
            most = int(table["runs"].max())
            axis.fill_between(table.index, table["low"], table["high"], color=BAND, edgecolor=INK, linewidth=0.6)
            for start, end in itertools.pairwise(table.itertuples()):
                style = "-" if start.runs == end.runs == most else "--"
                segment = [start.Index, end.Index], [start.value, end.value]
                axis.plot(*segment, color=INK, linewidth=1.8, linestyle=style)
            axis.plot(table.index, table["value"], color=INK, marker="o", markersize=3.5, linestyle="none")
            axis.set_ylim(low - margin, high + margin)
            axis.set_xlim(-0.03 * last - 0.1, 1.03 * last + 0.1)
            if step < last:
                axis.axvline(step, color=INK, linewidth=0.8, linestyle=":")
            title = textwrap.fill(f"{name} ({most} run{'s' * (most > 1)})", MOST_LETTERS)
            frame(axis, title, "RL step", "held-out mean@k" if axis.get_subplotspec().is_first_col() else "")

    return svg_figure("curves", len(tables), draw, height=2.5)


def intervals(means: pd.DataFrame) -> str:
    """A dot and its 95 % interval for each variant, the best at the top; `means` as `Comparison.means`."""
    ordered = means.sort_values("value", kind="stable")

    def draw(axes):
        (axis,) = axes
        for row, mean in enumerate(ordered.itertuples()):
            axis.plot([mean.low, mean.high], [row, row], color=INK, linewidth=1.4, marker="|", markersize=8)
            axis.plot([mean.value], [row], color=INK, marker="o", markersize=5)
        axis.set_yticks(range(len(ordered)), map(_short, ordered.index))
        axis.set_ylim(-0.7, len(ordered) - 0.3)
        frame(axis, "", "mean over runs of held-out mean@k, 95 % interval", "")

    return svg_figure("intervals", 1, draw, height=0.8 + 0.27 * len(ordered), width=21.0)


def _short(name) -> str:
    """The start and the end of a name that would not leave room for the figure; tables have all of it."""
    half = MOST_LETTERS // 2
    return name if len(name) <= 2 * half + 1 else f"{name[:half]}…{name[-half:]}"


def dynamics(variants) -> str | None:
    """The mean over runs of what training logs, a panel a quantity; None where nothing is logged."""
    series = {key: [(variant.name, _series(variant.runs, key)) for variant in variants] for key in DYNAMICS}
    series = {key: tables for key, tables in series.items() if any(table is not None for _, table in tables)}
    if not series:
        return None

    def draw(axes):
        for axis, (key, tables) in zip(axes, series.items(), strict=True):
            for number, (name, table) in enumerate(tables):
                if table is not None:
                    _draw_series(axis, number, name, table, bands=len(variants) <= MOST_BANDS)
            frame(axis, DYNAMICS[key], "RL step", "")
            heights = np.concatenate([line.get_ydata() for line in axis.lines])
            if 0 < heights.min() < heights.max() / FAR:
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("")
        # The legend is put together by hand, because Matplotlib leaves out names that begin with an underscore.
        lines = {line.get_label(): line for axis in axes for line in axis.lines}
        if len(lines) > 1:
            columns = min(4, len(lines), max(1, 120 // max(map(len, lines))))
            axes[0].figure.legend(
                lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False, handlelength=5
            )

    return svg_figure("dynamics", len(series), draw, height=2.8 + 0.1 * len(variants), columns=3)


def _series(runs, key) -> pd.DataFrame | None:
    """The mean of a logged quantity at each step, each run smoothed by the centered mean over a tenth of its length."""
    logged = {str(run.path): run.metrics[key].dropna() for run in runs if key in run.metrics}
    smooth = {path: pd.Series(smoothed(values), values.index) for path, values in logged.items() if len(values)}
    return over_runs(pd.concat(smooth, names=["run"]), "step").sort_index() if smooth else None


def _draw_series(axis, number, name, table, bands):
    style = dict(color=COLORS[number % len(COLORS)], linestyle=DASHES[number % len(DASHES)])
    if bands and table["low"].notna().any():
        axis.fill_between(table.index, table["low"], table["high"], color=style["color"], alpha=0.15, linewidth=0)
    every = max(len(table) // 5, 1)
    marker = MARKERS[(number + number // 12) % len(MARKERS)]  # colors and dashes come again after twelve
    axis.plot(
        table.index, table["value"], **style, linewidth=1.3, label=name, marker=marker, markersize=4,
        markevery=(number % every, every),
    )  # fmt: skip


def line_panels(name, points: pd.DataFrame, x: str, y: str, columns: int, looks: dict[str, dict] | None = None) -> str:
    """A panel for each value of `panel` and in it a line for each `label`, on logarithmic axes labelled `x` and `y`.

    `points` has the columns panel, label, x, y, and low and high if the lines have bands, in the order of panels and
    lines; `looks` the style of each label's line. A dotted line at 1 is the error of estimating zero.
    """
    panels = list(points.groupby("panel", sort=False, observed=True))

    def draw(axes):
        lines = {}
        for axis, (title, rows) in zip(axes, panels, strict=True):
            for number, (label, line) in enumerate(rows.groupby("label", sort=False, observed=True)):
                look = dict(color=COLORS[number % len(COLORS)], linestyle=DASHES[number % len(DASHES)])
                look |= dict(marker=MARKERS[number % len(MARKERS)], markersize=3)
                look |= dict(markevery=(number, 8) if len(line) > 20 else 1)
                look = look if looks is None else looks[label]
                (lines[label],) = axis.plot(line.x, line.y, linewidth=1.3, **look)
                if "low" in line:
                    axis.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.12, linewidth=0)
            axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
            frame(axis, title, x, y)
            logarithmic(axis)
        # Handles are given explicitly, because Matplotlib's own choice leaves out names that begin with an underscore.
        axes[0].legend(lines.values(), lines, fontsize=6, frameon=False)

    return svg_figure(name, len(panels), draw, height=2.8, columns=columns)


def svg_figure(name, panels, draw: Callable, height, width=12.0, columns=COLUMNS) -> str:
    """An SVG with as many panels as `draw(axes)` fills; its text is text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    columns = min(columns, panels)
    rows = math.ceil(panels / columns)
    width *= min(panels, 3) / 3  # few panels do not fill the page
    with rc_context({"font.size": 9, "svg.hashsalt": name, "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(width, height * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes[panels:]:
            axis.remove()
        draw(axes[:panels])
        file = io.StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # what Matplotlib's font lacks, a browser's has
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL).strip()
