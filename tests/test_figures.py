"""Figures: that of a training draws what was logged, whatever is missing, and those of the paper its formulas."""

import math

import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest

from rpg_jax.lab.reporting.training_curves import training_figure

TITLES = {
    "Held-out accuracy", "Training reward", "Entropy", "Response length", "KL to the behavior policy", "Clip fraction",
    "Throughput",
}  # fmt: skip


def make_rows(steps, k=8):
    """What a run of some steps logs, evaluated every other step."""
    rows = []
    for step in range(steps + 1):
        row = {"step": step}
        if step:
            row |= {"train/reward": step / steps, "train/entropy": 1.0 / step, "train/response_length": 20.0 + step}
            row |= {"train/kl_behavior_k3": 1e-3 * step, "train/clip_fraction": 0.01}
            row |= {f"throughput/{name}_tokens_per_second": 14000.0 + step for name in ("rollout", "update")}
        if step % 2 == 0:
            for task, accuracy in (("arithmetic", 0.3), ("all", 0.4)):
                key, value = f"eval/{task}/mean@{k}", accuracy + step / 100
                row |= {key: value, f"{key}_low": value - 0.05, f"{key}_high": value + 0.05}
                row[f"eval/{task}/pass@{k}"] = 0.9
        rows.append(row)
    return rows


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """`draw(rows)` -> {panel title: axes}, after checking that the file is an image with something on it."""
    drawn = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda self, path: (drawn.append(self), save(self, path)))

    def draw(rows):
        path = tmp_path / "figures" / "training.png"
        training_figure(rows, path)
        image = matplotlib.image.imread(path)
        assert image.shape[1] >= 1200 and image[..., :3].std() > 0.01
        return {axis.get_title(loc="left"): axis for axis in drawn[-1].axes}

    return draw


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines if not line.get_label().startswith("_")}


def test_every_panel_shows_what_was_logged_without_what_is_no_number(draw):
    rows = make_rows(20)
    rows[2] |= {"train/reward": None, "eval/all/mean@8": math.nan}
    rows[3] |= {"train/reward": math.inf}
    panels = draw(rows)
    assert panels.keys() == TITLES
    [reward], [clipped] = (lines(panels[title]).values() for title in ("Training reward", "Clip fraction"))
    np.testing.assert_array_equal(clipped, [(step, 0.01) for step in range(1, 21)])
    np.testing.assert_array_equal(reward, [(step, step / 20) for step in (1, *range(4, 21))])
    assert list(lines(panels["Throughput"])) == ["rollout", "update"]
    accuracy = lines(panels["Held-out accuracy"])
    assert list(accuracy) == ["arithmetic", "all problems"]
    np.testing.assert_allclose(accuracy["all problems"], [(step, 0.4 + step / 100) for step in (0, *range(4, 21, 2))])
    assert panels["Held-out accuracy"].get_title(loc="right") == "40.0% \N{RIGHTWARDS ARROW} 60.0%"
    assert panels["Held-out accuracy"].get_ylabel() == "mean@8"


@pytest.mark.parametrize("rows", [[], make_rows(2)[:1], make_rows(1)[1:]])
def test_short_and_empty_runs_are_drawn(draw, rows):
    assert draw(rows).keys() == TITLES
