"""Figures of the kept moments: error and direction against the number of responses, and N* against the KL."""

import numpy as np
import pandas as pd

from oracle import tables
from rpg_jax.lab.reporting.figures import line_panels, svg_figure
from rpg_jax.lab.reporting.style import COLORS, INK, frame, logarithmic

COUNTS = np.geomspace(16, 65536, 49)  # responses
LINES = {  # the estimators that are drawn, each with its line
    "token": dict(color=INK, linestyle="-"),
    "token, RPG-Style Clip": dict(color=COLORS[1], linestyle="-"),
    "token, truncated": dict(color=COLORS[2], linestyle="--"),
    "token, IcePop": dict(color=COLORS[4], linestyle="-."),
    "no ratio": dict(color="#8a8a8a", linestyle=":"),
    "sequence": dict(color=COLORS[3], linestyle="-"),
    "sequence, RPG-Style Clip": dict(color=COLORS[3], linestyle="--"),
    "GSPO": dict(color=COLORS[5], linestyle="-."),
}


def draw(table: pd.DataFrame, group: int) -> dict[str, str]:
    """{name: SVG} of the estimates of `tables.estimates`; those of errors and angles at one group size."""
    far = tables.shown(table[table.updates > 0])
    if far.empty:
        return {}
    known = far.estimator.isin(list(LINES)) & (far.direction_error < tables.LARGEST_ERROR)
    figures, at = {}, far[(far.group == group) & known]
    if len(at):
        figures["error"] = _against_responses(at, "error", "relative root mean squared error", _error)
        figures["direction"] = _against_responses(at, "direction", "1 − cosine to the gradient", _angle)
    return figures | {"clip": _clip(far)}


def _error(row) -> np.ndarray:
    return np.sqrt(max(row.bias, 0) + row.variance * row.group / COUNTS)


def _angle(row) -> np.ndarray:
    noise = row.variance * row.group / COUNTS
    return 1 - row.direction / np.sqrt(1 + noise / row.mean_squared)


def _against_responses(at: pd.DataFrame, name: str, label: str, curve) -> str:
    """A panel for each length and age, in that order."""
    rows = at.sort_values(["length", "updates"], kind="stable").itertuples()
    lines = [
        pd.DataFrame(dict(
            panel=f"{row.length} tokens, {row.updates} updates, KL {row.kl:.3g}", label=row.estimator, x=COUNTS,
            y=curve(row),
        ))
        for row in rows
    ]  # fmt: skip
    return line_panels(f"oracle-{name}", pd.concat(lines), "responses N", label, at.updates.nunique(), LINES)


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
