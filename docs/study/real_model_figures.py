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


def draw(table: pd.DataFrame) -> str:
    """A panel for each regime: what each arm's outcome is above that of `rpg`, in points, with 95 % intervals."""
    regimes = list(table.groupby(AT, sort=False))

    def panels(axes):
        for axis, ((machine, level, regime), of) in zip(axes, regimes, strict=True):
            for row, (arm, mean, half) in enumerate(of[["arm", "mean", "half"]].itertuples(index=False)):
                style = dict(color=COLORS[row], marker=MARKERS[row], capsize=2)
                axis.errorbar(100 * mean, -row, xerr=100 * half, **style)
                axis.text(0.02, -row, arm, transform=axis.get_yaxis_transform(), fontsize=7, va="bottom")
            axis.axvline(0, color="black", linewidth=0.8)
            axis.set_yticks([])
            frame(axis, f"{regime}, level {level}, {machine}", "points of mean score above rpg", "")

    return svg_figure("real_model", len(regimes), panels, height=2.8, columns=3)


def show(final: pd.DataFrame, arms: list[str], folder: pathlib.Path) -> None:
    """Prints the table of rows with an `area`, and draws FOLDER/real_model.svg once arms can be compared."""
    table = compared(final, arms)
    print("no run to compare yet" if table.empty else table.to_string(index=False, float_format="{:.3g}".format))
    if "mean" in table:
        (folder / "real_model.svg").write_text(draw(table.dropna(subset="mean")) + "\n")
