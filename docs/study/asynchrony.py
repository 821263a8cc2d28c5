"""Draws docs/study/asynchrony.svg from the runs of asynchrony*.parquet: a panel a delay, one of the rates."""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import pandas as pd

from rpg_jax.lab.reporting.figures import MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame, logarithmic

HERE = pathlib.Path(__file__).parent
EXPECTED = "eval/counting/mean@4"
ARMS = {"none": "no clip", "rpg": "RPG-Style Clip", "m2po": "m2po", "dppo": "dppo", "urkl": "urkl, no clip"}
DELAYS = (0, 4, 16, 64)


def read(file: str) -> list[tuple]:
    """(variant, seed, learning rate, scores by step) of each run."""
    runs = []
    for row in pd.read_parquet(HERE / file).itertuples():
        settings, columns = json.loads(row.settings), json.loads(row.metrics)
        scores = pd.Series(columns[EXPECTED], columns["step"], dtype=float).dropna()
        runs.append((row.path.split("/")[-2], settings["seed"], settings["trial.learning_rate"], scores))
    return runs


def curves(runs) -> pd.DataFrame:
    """Scores, a row for each (arm, delay, seed) and a column for each step that was evaluated."""
    rows = {(*arm.split("-"), seed): scores for arm, seed, _, scores in runs}
    return pd.DataFrame(rows).T.sort_index()


def rates(runs) -> pd.DataFrame:
    """Last scores at a delay of 64, mean over seeds: a row for each rate, a column for each arm."""
    rows = []
    for name, _, base, scores in runs:
        arm, delay, factor = name.replace("urkl-0.01", "urkl").rsplit("-", 2)
        if delay == "64" and arm in ARMS:
            rows.append((arm, float(factor) * base, scores.iloc[-1]))
    return pd.DataFrame(rows, columns=["arm", "rate", "score"]).pivot_table("score", "rate", "arm")


def draw(axes) -> None:
    scores = curves(read("asynchrony.parquet"))
    last = rates(read("asynchrony_rates.parquet"))
    for number, (arm, name) in enumerate(ARMS.items()):
        style = dict(color=COLORS[number], marker=MARKERS[number], markersize=4, linewidth=1.3, label=name)
        for axis, delay in zip(axes, DELAYS, strict=False):
            of = scores.loc[arm, str(delay)]
            axis.fill_between(of.columns, of.min(), of.max(), color=COLORS[number], alpha=0.15, linewidth=0)
            axis.plot(of.columns, of.mean(), **style)
        axes[-1].plot(last.index, last[arm], **style)
    for axis, delay in zip(axes, DELAYS, strict=False):
        frame(axis, f"{delay} updates ago", "RL step", "expected reward" if delay == 0 else "")
        axis.set_ylim(0.5, 1.01)
    frame(axes[-1], "64 updates ago, by learning rate", "learning rate", "last expected reward")
    logarithmic(axes[-1], y=False)
    axes[0].legend(fontsize=7, frameon=False, loc="lower right")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    (HERE / "asynchrony.svg").write_text(svg_figure("asynchrony", 5, draw, height=3.2, columns=3) + "\n")
