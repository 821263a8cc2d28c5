"""Figures 2 and 3 of the paper: the loss of one sample against its importance ratio, from the losses themselves.

Where a segment has a gradient is measured, and not drawn from the bounds: solid where dL/dlogp is not 0.
"""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.lab.reporting.style import COLORS, INK, frame
from rpg_jax.objectives import Objective, make
from rpg_jax.run.target import writable

BOUNDS = dict(clip_low=0.2, clip_high=0.28, clip_c=2.0)  # c is small enough to be in the picture, as in the paper
RATIOS = np.linspace(0.4, 2.6, 441)


class Curve(NamedTuple):
    """A loss against the importance ratio, for one advantage; arrays of the shape of RATIOS."""

    loss: np.ndarray
    slope: np.ndarray  # dL / dlog policy


def curve(objective: Objective, advantage: float) -> Curve:
    """Loss and gradient of one token with log policy −1, whose behavior policy makes the ratio; beta = 0."""

    def loss(logp, ratio):
        behavior = -1.0 - jnp.log(ratio)
        one = jnp.ones((1, 1))
        return objective(logp * one, behavior * one, advantage * one, one, denominator=1.0)[0]

    with jax.enable_x64():
        values, slopes = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))(-1.0, RATIOS)
    return Curve(np.asarray(values), np.asarray(slopes))


def figures() -> dict[str, tuple[str, Objective]]:
    """By file name, the title and the objective of each figure; without a divergence A' = A."""
    dual = make("rpg", clip="dual", beta=0.0, reduction="constant", **BOUNDS)
    algorithm_2 = make("rpg", clip="rpg", beta=0.0, reduction="constant", **BOUNDS)
    return {
        "figure2": ("Dual clip (Algorithm 1): the loss term, differentiated through w", dual),
        "figure3": ("RPG-Style Clip (Algorithm 2): the loss, differentiated through −log policy = 1", algorithm_2),
    }


def main(options) -> int:
    """Draws both into --out."""
    jax.config.update("jax_platforms", "cpu")
    folder = writable("out", options.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (title, objective) in figures().items():
        draw(title, objective, folder / f"{name}.png")
    print(f"In {folder}: {', '.join(f'{name}.png' for name in figures())}")
    return 0


def draw(title: str, objective: Objective, path: pathlib.Path) -> None:
    """Two panels, for A' = 1 and A' = −1."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(8, 3.4), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10, color=INK)
    for axis, advantage in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        values, slope = curve(objective, advantage)
        alive = slope != 0
        axis.plot(RATIOS, np.where(alive, values, np.nan), color=COLORS[2], label="gradient")
        axis.plot(RATIOS, np.where(alive, np.nan, values), ":", color=COLORS[4], linewidth=2, label="no gradient")
        named = {"1 − ε₁": 1 - BOUNDS["clip_low"], "1 + ε₂": 1 + BOUNDS["clip_high"], "c": BOUNDS["clip_c"]}
        for word, bound in named.items():
            axis.axvline(bound, color="#bbbbbb", linewidth=0.8, zorder=0)
            axis.annotate(word, (bound, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
        frame(axis, "", "importance ratio w = policy / behavior", "loss of one sample")
        axis.set_title(f"A' = {advantage:+g}", fontsize=9, pad=14)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path)
