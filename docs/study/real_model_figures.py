"""The table and the figure of real_model.md, of the rows that real_model.py made."""

import pathlib

import numpy as np
import pandas as pd
from sign import paired

from rpg_jax.lab.reporting import estimates
from rpg_jax.lab.reporting.figures import MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame

AT = ["machine", "level", "regime"]
BESIDE = ("kl", "entropy", "clipped", "length")  # columns with a number for each step
REFERENCE = "rpg"  # what the other arms are compared with
MARGIN = 0.02  # of equality: two points


def compared(final: pd.DataFrame, arms: list[str]) -> pd.DataFrame:
    """A row for each arm of a regime: scores before, over the run (`area`) and last, what its area is above that of
    `rpg` over paired seeds, with Holm's correction for the arms, and the means of what was logged beside."""
    tables = []
    for at, of in final.groupby(AT, sort=False):
        area, rows = of.pivot(index="seed", columns="arm", values="area"), []
        for arm in (arm for arm in arms if arm in area):
            own = of[of.arm == arm]
            row = dict(zip(AT, at, strict=True)) | dict(arm=arm, rate=own.rate.iloc[0], seeds=len(own))
            row |= dict(before=own.scores.str[0].mean(), area=own.area.mean(), last=own.scores.str[-1].mean())
            row |= dict(fell=own.fell.sum())
            row |= {name: own[name].map(np.mean).mean() for name in BESIDE}
            gap = (area[arm] - area.get(REFERENCE, np.nan)).dropna()
            rows.append(row | (paired(gap, MARGIN) if arm != REFERENCE and len(gap) > 1 else {}))
        tables.append(pd.DataFrame(rows))
        for p in {"t", "flip", "equal"} & {*tables[-1]}:
            tested = tables[-1][p].dropna()
            tables[-1][f"{p}, Holm"] = pd.Series(estimates.holm(tested), tested.index)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def draw(final: pd.DataFrame, table: pd.DataFrame) -> str:
    """Two panels for each regime: the scores of all runs and the mean of each arm by evaluation, and what its outcome
    is above that of `rpg`, in points, of each seed and with 95 % intervals."""
    regimes = list(table.groupby(AT, sort=False))

    def panels(axes):
        for (curves, gaps), (at, of) in zip(zip(axes[::2], axes[1::2], strict=True), regimes, strict=True):
            runs = final[(final[AT] == list(at)).all(axis=1)]
            area = 100 * runs.pivot(index="seed", columns="arm", values="area")
            for row, (arm, mean, half) in enumerate(of[["arm", "mean", "half"]].itertuples(index=False)):
                scores = 100 * np.stack(list(runs.scores[runs.arm == arm]))
                steps = np.linspace(0, len(runs.kl.iloc[0]), scores.shape[1])
                curves.plot(steps, scores.T, color=COLORS[row], linewidth=0.5, alpha=0.5)
                curves.plot(steps, scores.mean(axis=0), color=COLORS[row], marker=MARKERS[row], linewidth=2, label=arm)
                if arm != REFERENCE:
                    seeds = area[arm] - area[REFERENCE]
                    gaps.plot(seeds, np.full(len(seeds), 0.25 - row), ".", color=COLORS[row], alpha=0.6)
                    gaps.errorbar(100 * mean, -row, xerr=100 * half, color=COLORS[row], marker=MARKERS[row], capsize=2)
            curves.legend(fontsize=7)
            gaps.axvline(0, color="black", linewidth=0.8)
            gaps.set_yticks(-np.arange(1, len(of)), of.arm[1:])
            gaps.set_ylim(0.7 - len(of), -0.3)
            frame(curves, "{2}, level {1}, {0}".format(*at), "RL step", "held-out score, %")
            frame(gaps, "outcome above rpg", "points", "")

    return svg_figure("real_model", 2 * len(regimes), panels, height=2.8, columns=2)


def show(final: pd.DataFrame, arms: list[str], folder: pathlib.Path) -> None:
    """Prints the table of rows with an `area`, and draws FOLDER/real_model.svg once arms can be compared."""
    table = compared(final, arms)
    print("no run to compare yet" if table.empty else table.to_string(index=False, float_format="{:.3g}".format))
    if "mean" in table:
        (folder / "real_model.svg").write_text(draw(final, table) + "\n")
