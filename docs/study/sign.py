"""Keeps the runs of configs/sweeps/sign.py as sign.parquet, prints the tables of sign.md and draws its figure.

python docs/study/sign.py runs/sign    # adds the runs of a folder first
python docs/study/sign.py              # from sign.parquet alone
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import pandas as pd
from scipy import stats

from rpg_jax.lab.reporting import estimates, runs
from rpg_jax.lab.reporting.figures import MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame

HERE = pathlib.Path(__file__).parent
FILE = HERE / "sign.parquet"
LAST = 8  # steps over which the KL is averaged
MARGIN = 0.01  # of equality: a point
KEY = ["branch", "coefficient", "clipped"]


def read(folder: str) -> pd.DataFrame:
    """A row for each finished run: its settings, last score, and the KL that it came to."""
    rows = []
    for run in map(runs.read, runs.find([folder])):
        if run.is_finished:
            settings = {key: run.settings.get(f"objective.{key}") for key in [*KEY, "beta"]}
            settings |= dict(branch=settings["branch"] or 0.0, clipped=settings["clipped"] is not False)
            end = run.metrics.tail(LAST)
            reached = dict(kl=end["train/kl_reference_weighted"].mean(), clip=run.metrics["train/clip_fraction"].mean())
            score = run.scores[run.tasks].iloc[-1].mean()
            rows.append(settings | dict(seed=run.seed, score=score, **reached))
    return pd.DataFrame(rows).sort_values(["beta", *KEY, "seed"], ignore_index=True)


def paired(gap: np.ndarray, margin: float = MARGIN) -> dict:
    """Of differences over seeds: mean, half of the 95 % interval, p of the t-test, of all sign flips, of equality."""
    gap, error = np.asarray(gap), stats.sem(gap)
    flips = np.zeros(1)
    for one in gap:  # the sums under all choices of signs
        flips = np.concatenate([flips + one, flips - one])
    free = len(gap) - 1
    equal = stats.t.sf((margin - abs(gap.mean())) / error, free)  # the larger of the two one-sided tests
    half = stats.t.ppf(0.975, free) * error
    p = stats.ttest_1samp(gap, 0).pvalue
    return dict(mean=gap.mean(), half=half, t=p, flip=np.mean(np.abs(flips) >= abs(gap.sum()) - 1e-12), equal=equal)


def effects(kept: pd.DataFrame) -> pd.DataFrame:
    """For each beta: what branch and coefficient do, whether they act together, and the coefficient without a clip."""
    rows = []
    for beta, at in kept.groupby("beta"):
        score = at.pivot(index="seed", columns=KEY, values="score")
        of = {(b, c): score[b, c, True] for b in (0.0, 1.0) for c in (0.0, 1.0)}
        gaps = {
            "branch": (of[1, 0] + of[1, 1] - of[0, 0] - of[0, 1]) / 2,
            "coefficient": (of[0, 1] + of[1, 1] - of[0, 0] - of[1, 0]) / 2,
            "together": (of[1, 1] - of[1, 0] - of[0, 1] + of[0, 0]) / 2,
            "coefficient, no clip": score[0.0, 1.0, False] - score[0.0, 0.0, False],
        }
        rows += [dict(beta=beta, effect=name, **paired(gap)) for name, gap in gaps.items()]
    table = pd.DataFrame(rows)
    tested = table.effect != "coefficient, no clip"  # beside the tests, and not one of them
    for p in ("t", "flip", "equal"):
        table[f"{p}, Holm"] = pd.Series(estimates.holm(table[p][tested]), table.index[tested])
    return table


def at_one_kl(kept: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """(The runs with their scores moved to the mean log KL of all, points for each e-fold of it): by one slope of
    scores on log KL, that of seeds within an arm and beta."""
    kept = kept.assign(log_kl=np.log(kept.kl))
    apart = kept[["log_kl", "score"]] - kept.groupby(["beta", *KEY])[["log_kl", "score"]].transform("mean")
    slope = (apart.log_kl * apart.score).sum() / (apart.log_kl**2).sum()
    return kept.assign(score=kept.score - slope * (kept.log_kl - kept.log_kl.mean())), 100 * slope


def draw(kept: pd.DataFrame) -> str:
    """A panel a beta with the mean score of each arm and its 95 % interval, and one of all scores by the KL reached."""
    arms, betas = list(kept.groupby(KEY)), sorted(kept.beta.unique())

    def name(branch, coefficient, clipped):
        return f"branch {branch:.0f}, coefficient {coefficient:.0f}" if clipped else f"no clip, {coefficient:.0f}"

    def panels(axes):
        for axis, beta in zip(axes, betas, strict=False):
            axis.sharex(axes[0])
            for row, (_, of) in enumerate(arms[::-1]):
                score, number = of[of.beta == beta].score, len(arms) - 1 - row
                style = dict(color=COLORS[number], marker=MARKERS[number], capsize=2)
                axis.errorbar(score.mean(), row, xerr=stats.t.ppf(0.975, len(score) - 1) * score.sem(), **style)
            axis.set_yticks(range(len(arms)), [name(*key) for key, _ in arms[::-1]])
            frame(axis, f"beta {beta:g}", "held-out mean@8, mean of seeds", "")
        for number, (_, of) in enumerate(arms):
            axes[-1].plot(of.kl, of.score, MARKERS[number], color=COLORS[number], markersize=4)
        frame(axes[-1], "each run, at the KL that it reached", "KL to the reference, nats a token", "held-out mean@8")

    return svg_figure("sign", len(betas) + 1, panels, height=2.6, columns=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of runs, which are added first")
    folder, kept = parser.parse_args().folder, pd.read_parquet(FILE) if FILE.exists() else None
    if folder:
        kept = pd.concat([kept, read(folder)]).drop_duplicates([*KEY, "beta", "seed"], keep="last")
        kept.to_parquet(FILE, index=False)
    print(kept.groupby(["beta", *KEY])[["score", "kl", "clip"]].mean().to_string(float_format="{:.4f}".format))
    moved, slope = at_one_kl(kept)
    for title, of in (("as they are", kept), (f"at one KL, by {slope:.1f} points for each e-fold of it", moved)):
        print(f"\n{title}\n{effects(of).to_string(index=False, float_format='{:.3g}'.format)}")
    reached = kept.groupby([*KEY, "seed"]).kl
    print(f"KL over the betas of an arm and seed: the least is up to {reached.min().max():.3f},")
    print(f"the largest from {reached.max().min():.3f} on; with the first below the second, all reach what is between")
    FILE.with_suffix(".svg").write_text(draw(kept) + "\n")
