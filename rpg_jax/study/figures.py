"""Draws the paper's Figures 2 and 3: the loss of one sample against its importance ratio.

    python -m rpg_jax.study figures --out=FOLDER

Under the dual clip and under RPG-Style Clip, computed from the losses of `rpg_jax.objectives` and their gradients.
"""

from absl import flags

flags.DEFINE_string("out", "runs/figures", "folder of the figures")


def main(options):
    from rpg_jax.lab import clip_figures

    return clip_figures.main(options)
