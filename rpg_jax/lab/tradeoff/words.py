"""The trade-off of a grid for a terminal: a few small tables, each (header, rows of strings), and sentences."""

import math

import numpy as np
import pandas as pd

from rpg_jax.lab.tradeoff import tables

Printed = tuple[tuple, list[tuple]]


def _star(n: float) -> str:
    """An N*, in words at its ends."""
    return "never" if n == 0 else "always" if math.isinf(n) else _number(n)


def _number(n: float) -> str:
    return f"{n:,.0f}" if n >= 10 or n % 1 == 0 else f"{n:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _root(square: float) -> str:
    """The root of a relative square in percent; 0 where that is exact up to rounding."""
    return _percent(math.sqrt(square)) if square > tables.TINY else "0"


def _wide(table: pd.DataFrame, keys: list[str], cells: list[str]) -> list[tuple]:
    """A row of strings for each value of the keys: the key, then the cells of its rows."""
    rows = {}
    for key, cell in zip(table[keys].itertuples(index=False, name=None), cells, strict=True):
        rows.setdefault(key, [*key]).append(cell)
    return [tuple(row) for row in rows.values()]


def clips(medians: pd.DataFrame) -> Printed:
    """Bias in percent of |∇J|, one sample's variance over |∇J|², and N*, at every distance."""
    at = tables.like_first(tables.shown(medians), ["samples"])  # none of the three depends on N
    cells = [
        f"{_root(row.bias_squared)}, {row.variance:.3g}" + ("" if row.clip == "none" else f", {_star(row.n_star)}")
        for row in at.itertuples()
    ]
    header = ("level", "clip", "direction", *(f"KL {kl:g}: bias, variance, N*" for kl in at.kl.unique()))
    return header, _wide(at, ["level", "label", "direction"], cells)


def best(choices: pd.DataFrame) -> Printed:
    """The bounds of least error of the first clip, at its first beta and c."""
    at = tables.first_clip(choices)
    at = at.assign(kl=at.kl.map("{:g}".format))
    header = ("level", "clip", "direction", "KL", *(f"N={n:,}" for n in at.samples.unique()))
    cells = list(map(tables.bounds, at.epsilon_low, at.epsilon_high))
    return header, _wide(at, ["level", "clip", "direction", "kl"], cells)


def levels(pairs: pd.DataFrame) -> Printed:
    """Unclipped token-level against sequence-level weighting, at the first beta."""
    header = ("direction", "KL", "effective tokens", "effective sequences", "token-level bias", "errs less below N")
    return header, [
        (row.direction, f"{row.kl:g}", _percent(row.token_effective_sample_size))
        + (_percent(row.sequence_effective_sample_size), _root(row.token_bias_squared), _star(row.token_better_below))
        for row in tables.like_first(tables.unclipped_levels(pairs), ["samples"]).itertuples()
    ]


def groups(baselines: pd.DataFrame) -> Printed:
    """Advantages from a group, at the largest beta and distance, uphill."""
    header = ("advantage", "dynamic sampling", "bias", "best scale", "cosine", "bias after it", "variance")
    return header, [
        (row.advantage, "yes" if row.dynamic_sampling else "no", _root(row.bias_squared), f"{row.scale:.4g}")
        + (f"{row.cosine:.4g}", _root(row.residual**2), f"{row.variance:.4g}")
        for row in _farthest(baselines).itertuples()
    ]


def _farthest(baselines: pd.DataFrame) -> pd.DataFrame:
    most = (baselines.beta == baselines.beta.max()) & (baselines.kl == baselines.kl.max())
    return baselines[most & (baselines.direction == "uphill")]


def finding(frames: dict[str, pd.DataFrame]) -> list[str]:
    """What the tables of `tables.all_tables` say, a sentence each; medians over problems."""
    sentences = []
    at = tables.like_first(tables.shown(frames["tradeoff"]), ["samples"])
    for (level, label), rows in tables.grouped(at[at["clip"] != "none"], ["level", "label"]):
        biased = rows[rows.bias_squared > tables.TINY]
        sentences.append(
            f"{label}, {level} level, errs less than no clip only with fewer samples than N* = "
            f"{_ranges(biased, 'kl', 'n_star', 'KL {:g}')}, where it is biased: by at most "
            f"{_root(biased.bias_squared.max())} of |∇J|, its cosine with ∇J at least {biased.cosine.min():.2g}."
            if len(biased)
            else f"{label}, {level} level: no bias at any distance of this grid."
        )
    if "best_epsilon" in frames:
        at = tables.first_clip(frames["best_epsilon"])
        # The N after the last one at which some bounds err least; infinite if they do at the largest N.
        keys = ["level", "clip", *tables.WHERE]
        last = tables.grouped(at.assign(last=at.samples.where(at.epsilon_high.notna(), 0)), keys)["last"].max()
        samples = np.append(np.sort(at.samples.unique()), np.inf)
        starts = last.map(lambda n: samples[samples > n][0]).reset_index(name="start")
        for (level, clip), rows in tables.grouped(starts, ["level", "clip"]):
            ranges = _ranges(rows, "direction", "start")
            sentences.append(
                f"{level} level, whatever the bounds of clip {clip}: no clip errs least from N = {ranges}."
            )
    if "levels" in frames:
        at = tables.like_first(tables.unclipped_levels(frames["levels"]), ["samples"])
        ranges = _ranges(at, "direction", "token_better_below")
        sentences.append(
            f"Unclipped token-level weights err less than sequence-level ones, held against the sequence-level "
            f"objective, only with fewer samples than {ranges}."
        )
    if "groups" in frames:
        at = _farthest(frames["groups"])
        names = at.advantage.astype(str) + np.where(at.dynamic_sampling, " with dynamic sampling", "")
        exact, residual = at.bias_squared < tables.TINY, at.residual.where(at.bias_squared >= tables.TINY)
        sentences.append(
            f"Advantages from groups of {at.group.iloc[0]}: exact are {', '.join(names[exact]) or 'none'}; the best "
            f"constant factor leaves a bias of at most {_percent(residual.fillna(0).max())} of |∇J| to the others."
        )
    return sentences


def _ranges(table: pd.DataFrame, by: str, column: str, name: str = "{}") -> str:
    """The range of a column for each value of another one, as "9.7 to 16 (KL 1)"."""
    ends = table.groupby(by, observed=True, sort=by == "kl")[column].agg(["min", "max"])
    ranges = (" to ".join(dict.fromkeys(map(_number, pair))) for pair in ends.itertuples(index=False))
    return ", ".join(f"{each} ({name.format(key)})" for each, key in zip(ranges, ends.index, strict=True))
