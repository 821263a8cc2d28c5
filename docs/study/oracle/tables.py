"""From the kept moments to squared bias, variance, direction and N*, each relative to the reference and with an error.

N* is the number of responses below which an estimator has the smaller mean squared error than unclipped token weights:
G·(V₀ − V) / (|b|² − |b₀|²), with V the variance of one group's gradient. Cosines tell the direction apart, because an
optimizer that normalizes does not see an estimator's length.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from oracle.measure import KEYS

BASELINE = "token"
LARGEST_ERROR = 0.05  # of the reference gradient, as a share of its norm, at a point that is shown
BATCH = 128  # responses at which cosines are given
NOTHING = 1e-12  # |gradient|² over |g|² below which it has no direction: ratios of long responses underflow
POINT = ["length", "updates", "kl", "token_ess", "sequence_ess", "outside", "reward", "reference_error"]


class Moments(NamedTuple):
    """Of one estimator: numbers, or an array with an entry for each left-out block."""

    reference: np.ndarray  # |g|² of the reference gradient
    mean: np.ndarray  # |m|² of the estimator's expectation
    product: np.ndarray  # m·g
    variance: np.ndarray  # of one group's gradient

    @property
    def bias(self) -> np.ndarray:
        """|m − g|², without a bias of its own; may be negative where it is small."""
        return self.mean - 2 * self.product + self.reference

    def error(self, groups) -> np.ndarray:
        """Mean squared error of so many groups' mean gradient, over |g|²."""
        return (self.bias + self.variance / groups) / self.reference

    def cosine(self, groups) -> np.ndarray:
        """m·g / (|g| √E|gradient|²) of so many groups' mean gradient."""
        squared = self.mean + self.variance / groups
        return self.product / np.sqrt(np.where(squared > NOTHING * self.reference, self.reference * squared, np.nan))


def moments(row: pd.Series, kept: np.ndarray) -> Moments:
    """From the products of the blocks `kept`, i64[n]: off-diagonal ones, whose factors are independent."""
    count = len(row.square)
    fresh, stale, cross = (
        np.reshape(row[key], (count, count))[np.ix_(kept, kept)]
        for key in ("fresh_fresh", "stale_stale", "stale_fresh")
    )
    n = len(kept)
    apart = [(product.sum() - np.trace(product)) / (n * (n - 1)) for product in (fresh, stale)]
    return Moments(apart[0], apart[1], cross.mean(), np.mean(np.asarray(row.square)[kept]) - apart[1])


def jackknife(row: pd.Series) -> tuple[Moments, Moments]:
    """The moments from all blocks, and from all but each: arrays [B]."""
    every = np.arange(len(row.square))
    without = [moments(row, np.delete(every, block)) for block in every]
    return moments(row, every), Moments(*map(np.array, zip(*without, strict=True)))


def standard_error(without: np.ndarray) -> float:
    """Of a statistic, from its values without each block."""
    return float(np.sqrt((len(without) - 1) * np.var(without)))


def reference_error(row: pd.Series) -> float:
    """The standard error of the reference gradient, as a share of its norm."""
    count = len(row.square)
    products = np.reshape(row.fresh_fresh, (count, count))
    squared_norm = (products.sum() - np.trace(products)) / (count * (count - 1))
    noise = max(np.trace(products) / count - squared_norm, 0.0) / count
    return float(np.sqrt(noise / squared_norm)) if squared_norm > 0 else np.inf


def crossing(better_noise, more_bias, error: float) -> tuple[float, float, float]:
    """Where `better_noise / N` = `more_bias`: N with the ends of its 95 % interval; infinite where it never is."""
    low, high = more_bias + 1.96 * error, more_bias - 1.96 * error
    return tuple(float(better_noise / bias) if bias > 0 else np.inf for bias in (more_bias, low, high))


def estimates(kept: pd.DataFrame) -> pd.DataFrame:
    """A row for each of `kept`: what is known of an estimator at a length, an age and a group size."""
    table = []
    for _, at in kept.groupby(["length", "updates", "group"], sort=True):
        at = at.set_index("estimator", drop=False)
        base, base_without = jackknife(at.loc[BASELINE])
        for _, row in at.iterrows():
            value, without = jackknife(row)
            norm = value.reference
            excess, excess_without = value.bias - base.bias, without.bias - base_without.bias
            saved = base.variance - value.variance
            n_star = crossing(saved, excess, standard_error(excess_without))
            batch = BATCH / row.group
            table.append(dict(
                {key: row[key] for key in (*KEYS, *POINT[2:-1])}, reference_error=reference_error(row),
                bias=value.bias / norm, bias_error=standard_error(without.bias / without.reference),
                variance=value.variance / norm, error=value.error(batch), cosine=value.cosine(batch),
                cosine_error=standard_error(without.cosine(batch)), direction=value.cosine(np.inf),
                direction_error=standard_error(without.cosine(np.inf)),
                mean_squared=value.mean / norm,
                variance_saved=saved / norm, bias_added=excess / norm,
                bias_added_error=standard_error(excess_without / without.reference),
                **{f"n_star{end}": row.group * n for end, n in zip(("", "_low", "_high"), n_star, strict=True)},
            ))  # fmt: skip
    return pd.DataFrame(table)


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the points whose reference gradient is known well enough."""
    return table[table.reference_error < LARGEST_ERROR]
