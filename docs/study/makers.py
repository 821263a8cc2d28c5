"""Stale gradients at policies that a clip has made: docs/study/oracle for two makers and ten trajectories of each.

    python docs/study/makers.py [FOLDER]

Measures what FOLDER/makers.parquet lacks (the folder of this file, if none is given), then prints N* and cosines and
draws makers.svg.
"""

import argparse
import pathlib
import sys

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # rpg_jax
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # oracle, resumable

from oracle import measure, tables
from resumable import save

from rpg_jax.lab.reporting.figures import svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame, logarithmic

HERE = pathlib.Path(__file__).parent
MAKERS = {"no clip": "token", "Algorithm 2": "token, RPG-Style Clip"}
CLIP, NONE = MAKERS["Algorithm 2"], MAKERS["no clip"]
KEPT = [NONE, CLIP, "token, truncated", "token, IcePop", "no ratio"]
SETTINGS = measure.Sampled(lengths=(64,), ages=(4, 16, 64), groups=(8,), fresh=4096, parallel=1)
WITH_4 = 4  # trajectories measured after 4 updates, too: no token is out of bounds then, and the makers are one
TRAJECTORIES, APART = 10, 1000  # seeds of two trajectories differ by more than a trajectory adds to its own
LEAST, MOST = 1.0, 1e6  # N* beyond these is counted as these
IDLE = 1e-4  # share of tokens out of bounds below which the clip does nothing, so that N* is rounding


def measured(file: pathlib.Path) -> pd.DataFrame:
    """The moments of all trajectories, from the file and measured anew."""
    kept = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=["maker", "trajectory", *measure.KEYS])
    for trajectory in range(TRAJECTORIES):
        for maker, name in MAKERS.items():
            own = kept[(kept.maker == maker) & (kept.trajectory == trajectory)]
            done = set(zip(own.length, own.updates, strict=True))
            settings = SETTINGS._replace(seed=APART * trajectory, maker=name)
            settings = settings if trajectory < WITH_4 else settings._replace(ages=(16, 64))
            for rows in measure.measured(settings, done, lambda text, of=(maker, trajectory): print(*of, text)):
                rows = rows[rows.estimator.isin(KEPT)].assign(maker=maker, trajectory=trajectory)
                kept = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
                save(kept, file)
    return kept


def estimates(kept: pd.DataFrame) -> pd.DataFrame:
    """`tables.estimates` of each trajectory."""
    each = kept.groupby(["maker", "trajectory"])
    return pd.concat([tables.estimates(of).assign(maker=a, trajectory=b) for (a, b), of in each], ignore_index=True)


def interval(values) -> tuple[float, float]:
    """Mean and half of the 95 % interval, Student's t, of one number for each trajectory."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(np.mean(values)), float(half)


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each maker and age: N* of the clip and the cosines from 128 responses, with 95 % intervals."""
    rows = []
    for (maker, updates), at in table.groupby(["maker", "updates"], sort=False):
        of = at.pivot(index="trajectory", columns="estimator")
        mean, half = interval(np.log(of["n_star"][CLIP].clip(LEAST, MOST)))
        mean = np.nan if at.outside.max() < IDLE else mean
        cosines = {name: interval(of["cosine"][name]) for name in KEPT}
        lead = interval(of["cosine"][CLIP] - of["cosine"][NONE])
        facts = at.groupby("trajectory").first()[["kl", "outside", "reference_error"]]
        rows.append(dict(
            maker=maker, updates=updates, **facts.mean(), n_star=np.exp(mean), low=np.exp(mean - half),
            high=np.exp(mean + half), **{f"cosine, {name}": value for name, (value, _) in cosines.items()},
            lead=lead[0], lead_half=lead[1],
        ))  # fmt: skip
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame) -> str:
    """N* of the clip against the age of the responses: every trajectory, and the mean of the logarithms."""

    def panels(axes):
        for number, maker in enumerate(MAKERS):
            at = table[(table.maker == maker) & (table.estimator == CLIP) & (table.outside > IDLE)]
            values = at.pivot(index="trajectory", columns="updates", values="n_star").clip(LEAST, MOST)
            style = dict(color=COLORS[number], label=f"made by: {maker}")
            axes[0].plot(values.columns, np.exp(np.log(values).mean()), marker="o", **style)
            axes[0].plot(values.columns, values.T, color=COLORS[number], alpha=0.25, linewidth=0.8)
            for name, line in ((NONE, "-"), (CLIP, "--")):
                of = table[(table.maker == maker) & (table.estimator == name)].groupby("updates").cosine.mean()
                axes[1].plot(of.index, of, line, color=COLORS[number], label=f"{name}, made by: {maker}")
        frame(axes[0], "responses below which Algorithm 2 errs less", "updates ago", "N*")
        frame(axes[1], "direction from 128 responses", "updates ago", "cosine to the gradient")
        for axis in axes:
            logarithmic(axis, y=False)
            axis.set_xticks(SETTINGS.ages, SETTINGS.ages)
            axis.legend(fontsize=7, frameon=False)

    return svg_figure("makers", 2, panels, height=3.2, columns=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=HERE, help="of runs, table and figure")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    table = estimates(measured(folder / "makers.parquet"))
    print(summary(table).to_string(index=False, float_format="{:.3g}".format))
    (folder / "makers.svg").write_text(draw(table) + "\n")
