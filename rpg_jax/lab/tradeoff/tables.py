"""What the moments of a grid say: medians over problems with intervals, the error of N samples, the best bounds.

Everything is relative to ∇J: a squared bias, variance or mean squared error of 1 is that of estimating zero.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy.special import bdtrc  # (m, n, share): the probability of more than m successes in n draws

from rpg_jax.lab.tradeoff.groups import GroupMoments
from rpg_jax.lab.tradeoff.measure import Form, Tradeoff

TINY = 1e-20  # relative squared bias of what is exact in float64; exact forms come out near 1e-30
FORM = list(Form._fields)
WHERE = ["direction", "kl"]
TARGET = ["divergence", "level", "beta", *WHERE]  # which J, held at which policies
BOUNDS = ["clip_low", "clip_high"]
CHOICE = [name for name in FORM if name not in BOUNDS]  # a clip whose bounds are still to be chosen


@functools.cache
def _ranks(count: int, level: float = 0.95) -> tuple[int, int]:
    """Order statistics of `count` values that bound the bootstrap of their median, which is summed, not drawn.

    A resample's m-th smallest is at most the k-th smallest value if at least m of `count` draws are among k values.
    """
    share, below, above = np.arange(1, count + 1) / count, (count + 1) // 2, count // 2 + 1  # the two middle ones
    low = np.argmax(bdtrc(below - 1, count, share) >= (1 - level) / 2)
    high = np.argmax(bdtrc(above - 1, count, share) >= (1 + level) / 2)
    return int(low), int(high)


def grouped(table: pd.DataFrame, keys: list[str]):
    """`table.groupby(keys)` in order of appearance; a NaN among the keys (a bound that a clip lacks) is a value."""
    return table.groupby(keys, sort=False, dropna=False, observed=True)


def summary(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """A row for each value of the keys: of every other column the median over problems, of a bool its share.

    With `_low` and `_high` it has the ends of each median's 95 % percentile bootstrap interval, exactly. A value that
    is undefined in one problem, as the cosine of a gradient that is 0, is NaN.
    """
    groups = grouped(table, keys)
    values = [name for name in table if name not in keys]
    shares = [name for name in values if table[name].dtype == bool]
    medians = groups[[name for name in values if name not in shares]]
    sizes = groups.size()
    count, defined = int(sizes.max()), medians.count().eq(sizes, axis=0)
    low, high = (rank / max(1, count - 1) for rank in _ranks(count))
    parts = [
        medians.median().where(defined),
        medians.quantile(low, interpolation="nearest").where(defined).add_suffix("_low"),
        medians.quantile(high, interpolation="nearest").where(defined).add_suffix("_high"),
        groups[shares].mean(),
    ]
    return pd.concat(parts, axis=1).reset_index()


def error(moments, samples, sequence: bool = False):
    """Relative mean squared error of the mean of N samples, of `Moments` or a table with their columns.

    Against the J of the loss's own level, or with `sequence` against the sequence-level one.
    """
    bias, gradient = moments.bias_squared, moments.gradient_squared
    if sequence:
        bias, gradient = moments.sequence_bias_squared, moments.sequence_gradient_squared
    return (bias + moments.variance / samples) / gradient


def crossing(biased, exact, sequence: bool = False):
    """N* = (V_exact − V_biased) / (|b_biased|² − |b_exact|²): the N below which the biased loss errs less.

    0 if it never does, infinite if it always does. Both arguments as in `error`, of equal shape.
    """
    bias, gradient = "bias_squared", exact.gradient_squared
    if sequence:
        bias, gradient = "sequence_bias_squared", exact.sequence_gradient_squared
    cost = getattr(biased, bias) - getattr(exact, bias)
    gain = exact.variance - biased.variance
    unbiased, worse = cost <= TINY * gradient, gain < -1e-9 * exact.variance
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(unbiased, np.where(worse, 0.0, np.inf), np.maximum(gain, 0) / cost)


def _matching(table: pd.DataFrame, others: pd.DataFrame, on: list[str]) -> pd.DataFrame:
    """For each row of `table`, in its order, the first row of `others` with equal values in the columns `on`."""
    return table[on].merge(others.drop_duplicates(on), on=on, how="left")


def _at_each_samples(table: pd.DataFrame, keys: list[str], samples: Sequence[int], errors: Callable) -> pd.DataFrame:
    """`summary` of a table and, at every N, of the columns that errors(N) returns: a row for each key and N."""
    at_each = [summary(table[keys].assign(samples=n, **errors(n)), [*keys, "samples"]) for n in samples]
    return summary(table, keys).merge(pd.DataFrame({"samples": samples}), how="cross").merge(pd.concat(at_each))


def tradeoff(result: Tradeoff) -> pd.DataFrame:
    """A row for each form, direction, distance and N: medians over problems, with `_low`, `_high` of an interval."""
    table, keys = result.table, [*FORM, *WHERE]
    exact = _matching(table, table[table["clip"] == "none"], [*TARGET, "problem"])
    single = ["kl_back", "effective_sample_size", "dead_mass", "cosine", "best_scale"]
    relative = table[[*keys, *single]].assign(
        bias_squared=table.bias_squared / table.gradient_squared,
        variance=table.variance / table.gradient_squared,
        sequence_bias_squared=table.sequence_bias_squared / table.sequence_gradient_squared,
        n_star=np.where(table["clip"] == "none", np.nan, crossing(table, exact)),
    )

    def errors(n):
        mse = error(table, n)
        sequence_mse = error(table, n, sequence=True)
        return {"mse": mse, "sequence_mse": sequence_mse, "beats_unclipped": mse < error(exact, n)}

    medians = _at_each_samples(relative, keys, result.grid.samples, errors)
    once = _with_ends("bias_squared", "variance", "sequence_bias_squared", "n_star")
    return medians[[*keys, *single, *once, "samples", *_with_ends("mse", "sequence_mse"), "beats_unclipped"]]


def _with_ends(*names: str) -> list[str]:
    return [name + end for name in names for end in ("", "_low", "_high")]


def best_epsilon(medians: pd.DataFrame) -> pd.DataFrame:
    """For each clip with bounds, beta, c, level, direction, distance and N: the bounds of least median error.

    No clip at all competes: its epsilon_low and epsilon_high are NaN. Of equals, as where no ratio reaches a bound,
    it wins.

    Args:
      medians: of `tradeoff`.
    """
    keys, on = [*CHOICE, *WHERE, "samples"], [*TARGET, "samples"]
    clipped = medians[medians.clip_low.notna()].reset_index(drop=True)
    clipped["mse_unclipped"] = _matching(clipped, medians[medians["clip"] == "none"], on).mse
    situations = clipped.drop_duplicates(keys)
    unclipped = situations.assign(clip_low=np.nan, clip_high=np.nan, mse=situations.mse_unclipped, beats_unclipped=0.0)
    candidates = pd.concat([clipped, unclipped])
    least = grouped(candidates, keys)["mse"].transform("min") * (1 + 1e-9)
    best = _matching(situations, candidates[candidates.mse <= least][::-1], keys)
    best = best.rename(columns={"clip_low": "epsilon_low", "clip_high": "epsilon_high"})
    return best[[*keys, "epsilon_low", "epsilon_high", "mse", "mse_unclipped", "beats_unclipped"]]


def levels(result: Tradeoff) -> pd.DataFrame:
    """Token-level against sequence-level weighting of each form: errors against the sequence-level J."""
    keys = [name for name in (*FORM, *WHERE) if name != "level"]
    token = result.table[result.table.level == "token"].reset_index(drop=True)
    sequence = result.table[result.table.level == "sequence"]
    if token.empty or sequence.empty:
        return pd.DataFrame()
    sequence = _matching(token, sequence, [*keys, "problem"])
    both = {"token": token, "sequence": sequence}
    once = token[keys].assign(
        **{f"{name}_bias_squared": x.sequence_bias_squared / x.sequence_gradient_squared for name, x in both.items()},
        **{f"{name}_effective_sample_size": x.effective_sample_size for name, x in both.items()},
        token_better_below=np.where(token["clip"] == "none", crossing(token, sequence, sequence=True), np.nan),
    )

    def errors(n):
        token_mse, sequence_mse = (error(x, n, sequence=True) for x in both.values())
        return {"token_mse": token_mse, "sequence_mse": sequence_mse, "token_better": token_mse < sequence_mse}

    pairs = [f"{name}_{x}" for x in ("mse", "bias_squared", "effective_sample_size") for name in both]
    medians = _at_each_samples(once, keys, result.grid.samples, errors)
    return medians[[*keys, "samples", *pairs, "token_better", "token_better_below"]]


def group_baselines(result: Tradeoff) -> pd.DataFrame:
    """A row for each advantage, dynamic sampling or not, beta, direction and distance; medians over problems."""
    if result.groups is None:
        return pd.DataFrame()
    keys = ["advantage", "dynamic_sampling", "group", "beta", *WHERE]
    return summary(result.groups.drop(columns="problem"), keys)[[*keys, *GroupMoments._fields]]


def all_tables(result: Tradeoff) -> dict[str, pd.DataFrame]:
    """Every table that the grid has data for, under the name of its CSV file."""
    medians = tradeoff(result)
    frames = {
        "tradeoff": medians,
        "best_epsilon": best_epsilon(medians),
        "levels": levels(result),
        "groups": group_baselines(result),
    }
    return {name: frame for name, frame in frames.items() if not frame.empty}


def like_first(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """The rows that agree with the first one in these columns."""
    return table.merge(table[columns].head(1), on=columns)


def unclipped_levels(levels: pd.DataFrame) -> pd.DataFrame:
    """Of the rows of `levels`, those without a clip at the first divergence and beta."""
    return like_first(levels[(levels["clip"] == "none") & (levels.estimator == "reinforce")], ["divergence", "beta"])


def shown(table: pd.DataFrame, levels: Sequence[str] = ("token", "sequence")) -> pd.DataFrame:
    """The rows that are printed and drawn, named by a `label`: every clip at the first divergence, beta, epsilon and c.

    Unclipped, the two estimators have one gradient and share a line.
    """
    at = table[(table.divergence == table.divergence.iloc[0]) & table.level.isin(levels)]
    forms = at[FORM].drop_duplicates(["objective", "clip", "level"])
    return at.merge(forms.assign(label=[_label(form) for form in forms.itertuples()]), on=FORM)


def _label(form) -> str:
    """A form in a few words, without level and beta."""
    if form.clip == "-":
        return form.objective
    if np.isnan(form.clip_low):
        return "no clip"
    ceiling = "" if np.isnan(form.clip_c) else f", c {form.clip_c:g}"
    return f"{form.clip} {bounds(form.clip_low, form.clip_high)}{ceiling}"


def bounds(low: float, high: float) -> str:
    """A clip's epsilon in a word: one number where its two bounds are equal, none where there is no clip."""
    if np.isnan(high):
        return "none"
    return f"{high:g}" if low == high else f"{low:g}/{high:g}"
