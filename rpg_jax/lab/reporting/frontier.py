"""Score against KL to the reference, for variants that differ in the coefficient of the KL.

Equal coefficients are not equal KL: estimators of the KL are compared by what they score at the KL that they reach.
"""

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting.comparison import Comparison
from rpg_jax.lab.reporting.figures import svg_figure
from rpg_jax.lab.reporting.page import Figure, table
from rpg_jax.lab.reporting.runs import Variant
from rpg_jax.lab.reporting.style import COLORS, frame, logarithmic

BETA = "objective.beta"
# Of fresh samples, where it was evaluated; else of the last RL steps, whose samples are a few updates old.
KL = ("eval/kl_reference", "train/kl_reference_weighted")
STEPS = 5
CAPTION = (
    "Held-out mean@k at the step of comparison against the KL to the reference, nats a token: on fresh samples where "
    f"evaluations log it, else the mean of w·k3 over the samples of the last {STEPS} steps. Bars: the least and the "
    "largest of a variant's runs. Lines join the coefficients of one estimator."
)


def reached(comparison: Comparison, variants: list[Variant]) -> pd.DataFrame:
    """A row for each run: variant, family (its name without the coefficient), beta, kl, score at the comparison."""
    scores = comparison.last().mean(axis=1)
    rows = []
    for variant in variants:
        beta = variant.settings.get(BETA)
        for run in variant.runs:
            key = next((key for key in KL if key in run.metrics), None)
            if (variant.name, str(run.path)) in scores.index and key:
                kl = run.metrics[key].dropna().loc[: comparison.step].tail(1 if key == KL[0] else STEPS).mean()
                family = variant.name.rsplit("-", 1)[0]
                rows.append((variant.name, family, beta, kl, scores[variant.name, str(run.path)]))
    found = pd.DataFrame(rows, columns=["variant", "family", "beta", "kl", "score"])
    return found.sort_values(["family", "beta"], kind="stable")


def section(comparison: Comparison, variants: list[Variant]) -> list:
    """The blocks of a report about it; none unless some variants differ in the coefficient of the KL."""
    if len({variant.settings.get(BETA) for variant in variants} - {None}) < 3:
        return []
    runs = reached(comparison, variants)
    if not (runs.kl > 0).any():
        return []
    rows = [
        [name, f"{of.beta.iloc[0]:g}", str(len(of)), f"{of.kl.mean():.3g}", f"{of.kl.min():.3g} – {of.kl.max():.3g}"]
        + [f"{of.score.mean():.4f}", f"{of.score.min():.4f} – {of.score.max():.4f}"]
        for name, of in runs.groupby("variant", sort=False)
    ]
    header = ["variant", "coefficient", "runs", "KL, nats a token", "least – most", "score", "least – most"]
    figure = Figure("frontier", draw(runs[runs.kl > 0]), CAPTION)
    return ["## Score against KL", figure, table(header, rows)]


def draw(runs: pd.DataFrame) -> str:
    """One panel with a line for each family, through the means of its variants."""

    def panel(axes):
        (axis,) = axes
        for number, (family, of) in enumerate(runs.groupby("family", sort=False)):
            groups = of.groupby("beta")[["kl", "score"]]
            mean, low, high = groups.mean(), groups.min(), groups.max()
            color, marker = COLORS[number % len(COLORS)], "osD^vPX"[number % 7]
            bars = [np.abs(np.stack([mean[key] - low[key], high[key] - mean[key]])) for key in ("kl", "score")]
            axis.errorbar(
                mean.kl, mean.score, xerr=bars[0], yerr=bars[1], color=color, marker=marker, markersize=5,
                linewidth=1.2, elinewidth=0.6, label=family, linestyle="-" if number < len(COLORS) else "--",
            )  # fmt: skip
        frame(axis, "", "KL to the reference, nats a token", "held-out mean@k")
        logarithmic(axis, y=False)
        axis.legend(fontsize=7, frameon=False)

    return svg_figure("frontier", 1, panel, height=4.2, width=21.0, columns=1)
