"""Draws score against KL for the runs of docs/study/kl.md, which differ in the coefficient of the KL.

    python docs/study/unpack.py docs/study/betas.parquet runs/betas
    python docs/study/frontier.py runs/betas docs/study/betas-frontier.svg

Equal coefficients are not equal KL: estimators of the KL are compared by what they score at the KL that they reach.
Bars are the least and the largest of a variant's runs; lines join the coefficients of one estimator.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting import runs
from rpg_jax.lab.reporting.comparison import compare
from rpg_jax.lab.reporting.figures import DASHES, MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame, logarithmic

KL = "eval/kl_reference"  # of fresh samples, nats a token


def reached(folder: str) -> pd.DataFrame:
    """A row for each run: family (its variant's name without the coefficient), beta, kl and score at the comparison."""
    variants = runs.variants([runs.read(path) for path in runs.find([folder])])
    comparison = compare(variants)
    scores = comparison.last().mean(axis=1)
    rows = []
    for variant in variants:
        for run in variant.runs:
            kl = run.metrics[KL].dropna().loc[: comparison.step].iloc[-1]
            beta = variant.settings.get("objective.beta")
            rows.append((variant.name.rsplit("-", 1)[0], beta, kl, scores[variant.name, str(run.path)]))
    found = pd.DataFrame(rows, columns=["family", "beta", "kl", "score"])
    return found[found.kl > 0].sort_values(["family", "beta"], kind="stable")


def draw(found: pd.DataFrame) -> str:
    """One panel with a line for each family, through the means of its variants."""

    def panel(axes):
        (axis,) = axes
        for number, (family, of) in enumerate(found.groupby("family", sort=False)):
            groups = of.groupby("beta")[["kl", "score"]]
            mean, low, high = groups.mean(), groups.min(), groups.max()
            bars = [np.abs(np.stack([mean[key] - low[key], high[key] - mean[key]])) for key in ("kl", "score")]
            axis.errorbar(
                mean.kl, mean.score, xerr=bars[0], yerr=bars[1], color=COLORS[number % len(COLORS)],
                marker=MARKERS[number % len(MARKERS)], linestyle=DASHES[number // len(COLORS)], markersize=5,
                linewidth=1.2, elinewidth=0.6, label=family,
            )  # fmt: skip
        frame(axis, "", "KL to the reference, nats a token", "held-out mean@k")
        logarithmic(axis, y=False)
        axis.legend(fontsize=7, frameon=False)

    return svg_figure("frontier", 1, panel, height=4.2, width=21.0, columns=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", help="folder of runs")
    parser.add_argument("svg", type=pathlib.Path, help="the figure's file")
    options = parser.parse_args()
    options.svg.write_text(draw(reached(options.runs)) + "\n")
