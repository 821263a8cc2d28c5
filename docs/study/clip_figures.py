"""Draws Figures 2 and 3 of the paper: the loss of one sample against its importance ratio, from the losses themselves.

    python docs/study/clip_figures.py FOLDER

Where a segment has a gradient is measured, and not drawn from the bounds: solid where dL/dlogp is not 0.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from rpg_jax.lab.reporting.style import COLORS, frame
from rpg_jax.objectives import Objective, make

BOUNDS = dict(clip_low=0.2, clip_high=0.28, clip_c=2.0)  # c is small enough to be in the picture, as in the paper
RATIOS = np.linspace(0.4, 2.6, 441)
FIGURES = {  # name of the file -> clip, title; without a divergence A' = A
    "figure2": ("dual", "Dual clip (Algorithm 1): the loss term, differentiated through w"),
    "figure3": ("rpg", "RPG-Style Clip (Algorithm 2): the loss, differentiated through −log policy = 1"),
}


def objective(name: str) -> Objective:
    return make("rpg", clip=FIGURES[name][0], beta=0.0, reduction="constant", **BOUNDS)


def curve(objective: Objective, advantage: float) -> tuple[np.ndarray, np.ndarray]:
    """Loss and dL/dlogp at RATIOS of one token with log policy −1, whose behavior policy makes the ratio."""

    def loss(logp, ratio):
        one = jnp.ones((1, 1))
        return objective(logp * one, (-1.0 - jnp.log(ratio)) * one, advantage * one, one, denominator=1.0)[0]

    with jax.enable_x64():
        values, slopes = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))(-1.0, RATIOS)
    return np.asarray(values), np.asarray(slopes)


def draw(name: str, path: pathlib.Path) -> None:
    """Two panels, for A' = 1 and A' = −1."""
    figure = Figure(figsize=(8, 3.4), dpi=120, layout="constrained")
    figure.suptitle(FIGURES[name][1], fontsize=10)
    for axis, advantage in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        values, slope = curve(objective(name), advantage)
        axis.plot(RATIOS, np.where(slope != 0, values, np.nan), color=COLORS[2], label="gradient")
        axis.plot(RATIOS, np.where(slope != 0, np.nan, values), ":", color=COLORS[4], linewidth=2, label="no gradient")
        named = {"1 − ε₁": 1 - BOUNDS["clip_low"], "1 + ε₂": 1 + BOUNDS["clip_high"], "c": BOUNDS["clip_c"]}
        for word, bound in named.items():
            axis.axvline(bound, color="#bbbbbb", linewidth=0.8, zorder=0)
            axis.annotate(word, (bound, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
        frame(axis, "", "importance ratio w = policy / behavior", "loss of one sample")
        axis.set_title(f"A' = {advantage:+g}", fontsize=9, pad=14)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="where figure2.png and figure3.png go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in FIGURES:
        draw(name, folder / f"{name}.png")
