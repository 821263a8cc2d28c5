"""The paper's Figures 2 and 3: the curves are the formulas of Algorithms 1 and 2, and the command draws them."""

import matplotlib.image
import numpy as np
import pytest

from rpg_jax.lab import clip_figures
from rpg_jax.lab.clip_figures import BOUNDS, RATIOS, curve, figures

LOW, HIGH, C = 1 - BOUNDS["clip_low"], 1 + BOUNDS["clip_high"], BOUNDS["clip_c"]


@pytest.mark.parametrize("name", ["figure2", "figure3"])
def test_curves_are_those_of_the_paper(name):
    """Where they are flat and how high; Algorithm 2 with −log policy = 1 has the values of the dual clip, mirrored."""
    sign = -1 if name == "figure2" else 1  # the loss term −w·A, and w·A times −log policy
    objective = figures()[name][1]
    up, down = curve(objective, 1.0), curve(objective, -1.0)
    inside = np.abs(RATIOS[:, None] - [LOW, HIGH, C]).min(1) > 1e-9
    np.testing.assert_allclose(up.loss[inside], sign * np.minimum(RATIOS, HIGH)[inside], rtol=1e-12)
    np.testing.assert_allclose(down.loss[inside], -sign * np.clip(RATIOS, LOW, C)[inside], rtol=1e-12)
    np.testing.assert_array_equal(up.slope[inside] != 0, (RATIOS < HIGH)[inside])
    np.testing.assert_array_equal(down.slope[inside] != 0, ((RATIOS > LOW) & (RATIOS < C))[inside])
    np.testing.assert_allclose(up.slope[up.slope != 0], -RATIOS[up.slope != 0], rtol=1e-12)


def test_the_command_draws_both(call_command, tmp_path):
    status, out, _ = call_command("study.figures", "--out=drawn")
    assert status == 0 and "figure2.png, figure3.png" in out
    for name in clip_figures.figures():
        image = matplotlib.image.imread(tmp_path / "drawn" / f"{name}.png")
        assert image.shape[0] > 300 and image.std() > 0.01
