"""A report's figures as SVG that stands in a page: told apart by panel, line style and marker, not by color alone."""

import io
import itertools
import math
import re
import textwrap
import warnings

import numpy as np

from rpg_jax.lab.reporting.estimates import interquartile_mean, iqm_estimate

INK, CONTEXT, BAND = "#111111", "#b0b0b0", "#d9d9d9"
COLORS = ("#111111", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8a6d00")
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^Dvx"
COLUMNS = 4
MOST_BANDS = 4  # in one panel
FAR = 20  # times as much needs a logarithm
MOST_LETTERS = 30  # over a panel, or beside it
DYNAMICS = {
    "train/reward": "Training reward",
    "train/entropy": "Entropy, nats a token",
    "train/response_length": "Response length, tokens",
    "train/kl_behavior_k3": "KL to the behavior policy (k3)",
    "train/kl_reference_weighted": "KL to the reference (w k3)",
    "train/clip_fraction": "Clip fraction",
    "train/grad_norm": "Gradient norm",
}


def curves(comparison) -> str:
    """A panel a variant: its interquartile mean and 95 % band, the other variants in gray behind it.

    Dashed where not all of its runs were evaluated; a vertical line at the step of comparison.
    """
    found = {variant.name: comparison.curve(variant) for variant in comparison.evaluated}
    return _figure("curves", len(found), lambda axes: _draw_curves(axes, comparison, found), height=2.5)


def _draw_curves(axes, comparison, found):
    from matplotlib.ticker import MaxNLocator

    every = [point for curve in found.values() for _, point in curve.values()]
    low, high = np.nanmin(every), np.nanmax(every)
    margin = 0.05 * (high - low) or 0.02
    span = low - margin, high + margin
    last = max(step for curve in found.values() for step in curve)
    for axis, (name, curve) in zip(axes, found.items(), strict=True):
        for other, behind in found.items():
            if other != name:
                axis.plot(list(behind), [point.value for _, point in behind.values()], color=CONTEXT, linewidth=0.8)
        steps, most = list(curve), max(count for count, _ in curve.values())
        values, low, high = np.array([point for _, point in curve.values()]).T
        axis.fill_between(steps, low, high, color=BAND, edgecolor=INK, linewidth=0.6)
        for (a, b), (u, v) in zip(itertools.pairwise(steps), itertools.pairwise(values), strict=True):
            full = curve[a][0] == curve[b][0] == most
            axis.plot([a, b], [u, v], color=INK, linewidth=1.8, linestyle="-" if full else "--")
        axis.plot(steps, values, color=INK, marker="o", markersize=3.5, linestyle="none")
        title = textwrap.fill(f"{name} ({most} run{'s' * (most > 1)})", MOST_LETTERS)
        axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
        axis.set_ylim(span)
        axis.set_xlim(-0.03 * last - 0.1, 1.03 * last + 0.1)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        if comparison.step < last:
            axis.axvline(comparison.step, color=INK, linewidth=0.8, linestyle=":")
        _frame(axis, "RL step", "IQM of held-out mean@k" if axis.get_subplotspec().is_first_col() else "")


def intervals(estimates: dict) -> str:
    """A dot and its 95 % interval for each {name: Estimate}, the best at the top."""
    ordered = sorted(estimates.items(), key=lambda item: item[1].value)

    def draw(axes):
        (axis,) = axes
        for row, (_, one) in enumerate(ordered):
            axis.plot([one.low, one.high], [row, row], color=INK, linewidth=1.4, marker="|", markersize=8)
            axis.plot([one.value], [row], color=INK, marker="o", markersize=5)
        axis.set_yticks(range(len(ordered)), [_short(name) for name, _ in ordered])
        axis.set_ylim(-0.7, len(ordered) - 0.3)
        _frame(axis, "IQM of held-out mean@k, 95 % interval", "")

    return _figure("intervals", 1, draw, height=0.8 + 0.27 * len(ordered), width=21.0)


def _short(name) -> str:
    """Its start and its end, where it would not leave room for a figure; tables have all of it."""
    half = MOST_LETTERS // 2
    return name if len(name) <= 2 * half + 1 else f"{name[:half]}…{name[-half:]}"


def dynamics(variants) -> str | None:
    """The interquartile mean over runs of what training logs, a panel each; None where nothing is logged."""
    logged = {key: title for key, title in DYNAMICS.items() if any(run.series(key) for v in variants for run in v.runs)}
    if not logged:
        return None

    def draw(axes):
        for axis, (key, title) in zip(axes, logged.items(), strict=True):
            for number, variant in enumerate(variants):
                _draw_series(axis, number, variant, key, len(variants) <= MOST_BANDS)
            axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
            _frame(axis, "RL step", "")
            heights = np.concatenate([line.get_ydata() for line in axis.lines])
            if 0 < heights.min() < heights.max() / FAR:
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.yaxis.set_minor_formatter("")
        # Given by hand: Matplotlib's own choice leaves out names that begin with an underscore.
        lines = {line.get_label(): line for axis in axes for line in axis.lines}
        columns = min(4, len(lines), max(1, 120 // max(map(len, lines))))
        axes[0].figure.legend(
            lines.values(), lines, loc="outside lower center", ncols=columns, frameon=False, handlelength=5
        )

    return _figure("dynamics", len(logged), draw, height=2.8 + 0.1 * len(variants), columns=3)


def _draw_series(axis, number, variant, key, bands):
    series = [_smooth(found) for run in variant.runs if (found := run.series(key))]
    steps = sorted({step for one in series for step in one})
    if not steps:
        return
    scores = [[[one[step]] for one in series if step in one] for step in steps]
    values = [float(interquartile_mean(there)) for there in scores]
    style = dict(color=COLORS[number % len(COLORS)], linestyle=DASHES[number % len(DASHES)])
    if bands and len(series) > 1:
        _, low, high = np.array([iqm_estimate(there) for there in scores]).T
        axis.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.plot(
        steps, values, **style, linewidth=1.3, label=variant.name,
        marker=MARKERS[(number + number // 12) % len(MARKERS)],  # after twelve, colors and dashes come again
        markersize=4, markevery=(number % max(len(steps) // 5, 1), max(len(steps) // 5, 1)),
    )  # fmt: skip


def _smooth(series: dict) -> dict:
    """The centered mean over a tenth of a run; of a short one, its own values."""
    steps, values = np.array(list(series)), np.array(list(series.values()))
    half = len(values) // 20
    total = np.concatenate([[0.0], np.cumsum(values)])
    low, high = np.maximum(np.arange(len(values)) - half, 0), np.minimum(np.arange(len(values)) + half + 1, len(values))
    return dict(zip(steps.tolist(), ((total[high] - total[low]) / (high - low)).tolist(), strict=True))


def _frame(axis, x, y):
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _figure(name, panels, draw, height, width=12.0, columns=COLUMNS) -> str:
    """An <svg> with as many panels as `draw(axes)` fills; its ids are its own, its text is text."""
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
    text = file.getvalue()
    return _compact(text[text.index("<svg") :], name)


def _compact(svg, name) -> str:
    """Without what is not drawn, coordinates to a hundredth of a point, and ids that no other figure has."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: sans-serif", svg)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", _hundredth, tag[0]), svg).strip()


def _hundredth(number) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
