"""What the moments of a grid say: medians over problems with intervals, the error of N samples, N*; and figures of it.

Everything is relative to ∇J: a squared bias, variance or mean squared error of 1 is that of estimating zero.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import binom

from rpg_jax.lab.reporting.figures import line_panels
from rpg_jax.lab.tradeoff.measure import OWN, Form

ERROR = "error, over |∇J|²"  # 1 is that of estimating zero
TINY = 1e-20  # relative squared bias of what is exact in float64; exact forms come out near 1e-30
FORM = list(Form._fields)
WHERE = ["direction", "kl"]
TARGET = ["divergence", "level", "beta", *WHERE]  # which J, held at which policies


def summary(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """A row for each value of the keys: of every other column the median over problems, of a bool its share.

    With `_low` and `_high` it has the ends of each median's 95 % interval, which are order statistics: how many values
    lie below the median is binomial. A value that is undefined in one problem, as the cosine of a gradient that is 0,
    is NaN.
    """
    groups = table.groupby(keys, sort=False, dropna=False, observed=True)  # NaN, a bound that a clip lacks, is a value
    values = [name for name in table if name not in keys]
    shares = [name for name in values if table[name].dtype == bool]
    medians = groups[[name for name in values if name not in shares]]
    sizes = groups.size()
    count, defined = int(sizes.max()), medians.count().eq(sizes, axis=0)
    low = binom.ppf(0.025, count, 0.5) / max(1, count - 1)
    parts = [
        medians.median().where(defined),
        medians.quantile(low, interpolation="nearest").where(defined).add_suffix("_low"),
        medians.quantile(1 - low, interpolation="nearest").where(defined).add_suffix("_high"),
        groups[shares].mean(),
    ]
    return pd.concat(parts, axis=1).reset_index()


def error(moments, samples, sequence: bool = False):
    """Relative mean squared error of the mean of N samples, of `Moments` or a table with their columns; against the J
    of the loss's own level, or with `sequence` against the sequence-level one."""
    bias, gradient = moments.bias_squared, moments.gradient_squared
    if sequence:
        bias, gradient = moments.sequence_bias_squared, moments.sequence_gradient_squared
    return (bias + moments.variance / samples) / gradient


def crossing(biased, exact):
    """N* = (V_exact − V_biased) / (|b_biased|² − |b_exact|²): the N below which the biased loss errs less.

    0 if it never does, infinite if it always does. Both arguments as in `error`, of equal shape.
    """
    cost, gain = biased.bias_squared - exact.bias_squared, exact.variance - biased.variance
    unbiased, worse = cost <= TINY * exact.gradient_squared, gain < -1e-9 * exact.variance
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(unbiased, np.where(worse, 0.0, np.inf), np.maximum(gain, 0) / cost)


def tradeoff(table: pd.DataFrame, samples: Sequence[int]) -> pd.DataFrame:
    """A row for each form, direction, distance and N of `measure.measure`: medians over problems, with intervals."""
    keys, on = [*FORM, *WHERE], [*TARGET, "problem"]
    exact = table[on].merge(table[table["clip"] == "none"].drop_duplicates(on), on=on, how="left")
    single = ["kl_back", "effective_sample_size", "dead_mass", "cosine", "best_scale"]
    relative = table[[*keys, *single]].assign(
        bias_squared=table.bias_squared / table.gradient_squared,
        variance=table.variance / table.gradient_squared,
        sequence_bias_squared=table.sequence_bias_squared / table.sequence_gradient_squared,
        n_star=np.where(table["clip"] == "none", np.nan, crossing(table, exact)),
    )
    of_samples = [
        summary(
            table[keys].assign(
                samples=n, mse=(mse := error(table, n)), sequence_mse=error(table, n, sequence=True),
                beats_unclipped=mse < error(exact, n),
            ),
            [*keys, "samples"],
        )
        for n in samples
    ]  # fmt: skip
    medians = summary(relative, keys).merge(pd.concat(of_samples))
    once = _with_ends("bias_squared", "variance", "sequence_bias_squared", "n_star")
    return medians[[*keys, *single, *once, "samples", *_with_ends("mse", "sequence_mse"), "beats_unclipped"]]


def _with_ends(*names: str) -> list[str]:
    return [name + end for name in names for end in ("", "_low", "_high")]


def like_first(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The rows that agree with the first one in these columns."""
    return table.merge(table[columns].head(1), on=columns)


def shown(table: pd.DataFrame, levels: Sequence[str] = ("token", "sequence")) -> pd.DataFrame:
    """The rows that are printed and drawn, named by a `label`: every clip at the first divergence, beta, epsilon and c.
    Unclipped, the two estimators have one gradient and share a line."""
    at = table[(table.divergence == table.divergence.iloc[0]) & table.level.isin(levels)]
    forms = at[FORM].drop_duplicates(["objective", "clip", "level"])
    return at.merge(forms.assign(label=[_label(form) for form in forms.itertuples()]), on=FORM)


def _label(form) -> str:
    """A form in a few words, without level and beta."""
    if form.clip == OWN:
        return form.objective
    if np.isnan(form.clip_low):
        return "no clip"
    low, high, ceiling = form.clip_low, form.clip_high, "" if np.isnan(form.clip_c) else f", c {form.clip_c:g}"
    return f"{form.clip} {f'{high:g}' if low == high else f'{low:g}/{high:g}'}{ceiling}"


def draw(table: pd.DataFrame, medians: pd.DataFrame, samples: Sequence[int]) -> dict[str, str]:
    """{name: SVG} of what there is data for; `table` is of `measure.measure`, `medians` of `tradeoff`."""
    figures = {}
    for level in ("token", "sequence"):
        if len(of_level := shown(table, (level,))):
            figures[f"error_{level}"] = _errors(of_level, samples, f"error_{level}")
    unclipped = medians[(medians["clip"] == "none") & (medians.estimator == "reinforce") & (medians.kl > 0)]
    if unclipped.level.nunique() == 2:
        figures["levels"] = _levels(like_first(unclipped, ["divergence", "beta"]))
    return figures


def _errors(table: pd.DataFrame, samples: Sequence[int], name: str) -> str:
    """Mean squared error of N samples' mean gradient: medians with their intervals, a row for each direction."""
    counts = np.geomspace(1, max(1000, 10 * max(samples)), 41)
    points = table.merge(pd.DataFrame({"x": counts}), how="cross")
    points["y"] = error(points, points.x)
    curves = summary(points[["label", *WHERE, "x", "y"]], ["label", *WHERE, "x"])
    curves["panel"] = curves.direction.astype(str) + curves.kl.map(", KL(old‖new) = {:g}".format)
    curves = curves.rename(columns={"y_low": "low", "y_high": "high"})
    return line_panels(name, curves, "N, samples", ERROR, curves.kl.nunique())


def _levels(unclipped: pd.DataFrame) -> str:
    """Errors of both levels, against the sequence-level J, by the distance, at a few N; a panel a direction."""
    samples = list(unclipped.samples.unique())
    chosen = unclipped[unclipped.samples.isin([samples[0], samples[len(samples) // 2], samples[-1]])]
    label = chosen.level.astype(str) + chosen.samples.map(" level, N = {:,}".format)
    points = chosen.assign(x=chosen.kl, y=chosen.sequence_mse, label=label, panel=chosen.direction)
    return line_panels("levels", points, "KL(old‖new), nats", ERROR, points.panel.nunique())
