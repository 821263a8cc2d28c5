"""Figures of the kept moments: error and direction against the number of responses, and N* against the KL."""

import numpy as np
import pandas as pd

from rpg_jax.lab.oracle import tables
from rpg_jax.lab.reporting.figures import svg_figure
from rpg_jax.lab.reporting.style import COLORS, INK, frame, logarithmic

COUNTS = np.geomspace(16, 65536, 49)  # responses
LINES = {  # estimator -> color and style of its line
    "token": (INK, "-"),
    "token, RPG-Style Clip": (COLORS[1], "-"),
    "token, truncated": (COLORS[2], "--"),
    "token, IcePop": (COLORS[4], "-."),
    "no ratio": ("#8a8a8a", ":"),
    "sequence": (COLORS[3], "-"),
    "sequence, RPG-Style Clip": (COLORS[3], "--"),
    "GSPO": (COLORS[5], "-."),
}


def draw(table: pd.DataFrame, group: int) -> dict[str, str]:
    """{name: SVG} of the estimates of `tables.estimates`; those of errors and angles at one group size."""
    far = tables.shown(table[table.updates > 0])
    if far.empty:
        return {}
    at = far[far.group == group]
    return {
        "error": _against_responses(at, "error", "relative root mean squared error", _error),
        "direction": _against_responses(at, "direction", "1 − cosine to the gradient", _angle),
        "clip": _clip(far),
    }


def _error(row: pd.Series) -> np.ndarray:
    return np.sqrt(max(row.bias, 0) + row.variance * row.group / COUNTS)


def _angle(row: pd.Series) -> np.ndarray:
    noise = row.variance * row.group / COUNTS
    return 1 - row.direction / np.sqrt(1 + noise / row.mean_squared)


def _against_responses(at: pd.DataFrame, name: str, label: str, curve) -> str:
    """A panel for each length and age, in that order."""
    panels = list(at.groupby(["length", "updates"], sort=True))
    columns = max(at.updates.nunique(), 1)

    def panel(axes):
        for axis, ((length, updates), rows) in zip(axes, panels, strict=True):
            for _, row in rows.iterrows():
                if row.estimator in LINES and row.direction_error < tables.LARGEST_ERROR:
                    color, style = LINES[row.estimator]
                    axis.plot(COUNTS, curve(row), color=color, linestyle=style, linewidth=1.4, label=row.estimator)
            frame(axis, f"{length} tokens, {updates} updates, KL {rows.kl.iloc[0]:.3g}", "responses N", label)
            logarithmic(axis)
        axes[0].legend(fontsize=6, frameon=False)

    return svg_figure(f"oracle-{name}", len(panels), panel, height=2.6, columns=columns)


def _clip(far: pd.DataFrame) -> str:
    """N* of RPG-Style Clip against the KL, by length and group size, where it is finite."""
    rows = far[(far.estimator == "token, RPG-Style Clip") & (far.variance_saved > 1e-6)]
    lengths, sizes = sorted(far.length.unique()), sorted(far.group.unique())

    def panel(axes):
        (axis,) = axes
        for number, length in enumerate(lengths):
            for marker, size in zip("os^Dv", sizes, strict=False):
                at = rows[(rows.length == length) & (rows.group == size) & np.isfinite(rows.n_star_high)]
                bars = [at.n_star - at.n_star_low, at.n_star_high - at.n_star]
                look = dict(color=COLORS[number % len(COLORS)], marker=marker, markersize=4, linestyle="none")
                axis.errorbar(at.kl, at.n_star, bars, linewidth=0.8, label=f"{length} tokens, G = {size}", **look)
        frame(axis, "", "KL(behavior || policy) of a response, nats", "N* of RPG-Style Clip, responses")
        logarithmic(axis)
        axis.legend(fontsize=6, frameon=False)

    return svg_figure("oracle-clip", 1, panel, height=3.4, width=18.0, columns=1)
