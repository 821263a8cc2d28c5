"""The trade-off of a grid for a terminal: a few small tables, each (header, rows of strings), and sentences."""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from rpg_jax.lab.tradeoff import tables

Printed = tuple[tuple, list[tuple]]
FIRST_CLIP = ["divergence", "clip", "beta", "clip_c"]


def count(n: float) -> str:
    """An N*, in words at its ends."""
    if n == 0:
        return "never"
    return "always" if math.isinf(n) else f"{n:,.0f}" if n >= 10 else f"{n:.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def root_percent(square: float) -> str:
    """The root of a relative square, 0 where that is exact up to rounding."""
    return percent(math.sqrt(square)) if square > tables.TINY else "0"


def _spread(cells: Iterable[tuple[tuple, str]]) -> list[tuple]:
    """(key, cell) pairs as one row a key: the key's words, then its cells."""
    rows = {}
    for key, cell in cells:
        rows.setdefault(key, []).append(cell)
    return [(*key, *row) for key, row in rows.items()]


def clips(medians: pd.DataFrame) -> Printed:
    """Bias in percent of |∇J|, one sample's variance over |∇J|², and N*, at every distance."""
    at = tables.like_first(tables.shown(medians), ["samples"])  # none of the three depends on N
    cells = []
    for row in at.itertuples():
        star = "" if row.clip == "none" else f", {count(row.n_star)}"
        cell = f"{root_percent(row.bias_squared)}, {row.variance:.3g}{star}"
        cells.append(((row.level, tables.spelled(row), row.direction), cell))
    header = ("level", "clip", "direction", *(f"KL {kl:g}: bias, variance, N*" for kl in at.kl.unique()))
    return header, _spread(cells)


def best(choices: pd.DataFrame) -> Printed:
    """The bounds of least error of the first clip, at its first beta and c."""
    at = tables.like_first(choices, FIRST_CLIP)
    header = ("level", "clip", "direction", "KL", *(f"N={n:,}" for n in at.samples.unique()))
    return header, _spread(
        ((row.level, row.clip, row.direction, f"{row.kl:g}"), tables.bounds(row.epsilon_low, row.epsilon_high))
        for row in at.itertuples()
    )


def levels(pairs: pd.DataFrame) -> Printed:
    """Unclipped token-level against sequence-level weighting, at the first beta."""
    header = ("direction", "KL", "effective tokens", "effective sequences", "token-level bias", "errs less below N")
    return header, [
        (row.direction, f"{row.kl:g}", percent(row.token_effective_sample_size))
        + (percent(row.sequence_effective_sample_size), root_percent(row.token_bias_squared))
        + (count(row.token_better_below),)
        for row in tables.like_first(tables.unclipped_levels(pairs), ["samples"]).itertuples()
    ]


def groups(baselines: pd.DataFrame) -> Printed:
    """Advantages from a group, at the largest beta and distance, uphill."""
    header = ("advantage", "dynamic sampling", "bias", "best scale", "cosine", "bias after it", "variance")
    return header, [
        (row.advantage, "yes" if row.dynamic_sampling else "no", root_percent(row.bias_squared), f"{row.scale:.4g}")
        + (f"{row.cosine:.4g}", root_percent(row.residual**2), f"{row.variance:.4g}")
        for row in _farthest(baselines).itertuples()
    ]


def _farthest(baselines: pd.DataFrame) -> pd.DataFrame:
    most = (baselines.beta == baselines.beta.max()) & (baselines.kl == baselines.kl.max())
    return baselines[most & (baselines.direction == "uphill")]


def finding(frames: dict[str, pd.DataFrame]) -> list[str]:
    """What the tables of `tables.all_tables` say, a sentence each; medians over problems."""
    sentences = _of_clips(frames["tradeoff"])
    if "best_epsilon" in frames:
        sentences += _of_bounds(frames["best_epsilon"])
    if "levels" in frames:
        at = tables.like_first(tables.unclipped_levels(frames["levels"]), ["samples"])
        sentences.append(
            "Against the sequence-level objective, unclipped token-level weights err less than sequence-level ones only "
            f"with fewer samples than {_ranges(at, 'direction', 'token_better_below')}; their bias is "
            f"{root_percent(at.token_bias_squared.min())} to {root_percent(at.token_bias_squared.max())} of |∇J|."
        )
    if "groups" in frames:
        sentences.append(_of_groups(frames["groups"]))
    return sentences


def _range(values) -> str:
    ends = [f"{n:,.0f}" if n >= 10 or n == 0 else f"{n:.1f}" for n in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def _ranges(table: pd.DataFrame, by: str, column: str) -> str:
    """The range of a column for each value of another one, as "KL 1: 9.7 to 16"."""
    name = "KL {:g}" if by == "kl" else "{}"
    groups = tables.grouped(table, [by])[column]
    return ", ".join(f"{_range(values)} ({name.format(key)})" for (key,), values in groups)


def _of_clips(medians: pd.DataFrame) -> list[str]:
    sentences = []
    for _, at in tables.grouped(tables.like_first(tables.shown(medians), ["samples"]), tables.FORM):
        form = next(at.itertuples())
        subject, biased = f"{tables.spelled(form)}, {form.level} level", at[at.bias_squared > tables.TINY]
        if form.clip == "none":
            continue
        if biased.empty:
            sentences.append(f"{subject}: no bias at any distance of this grid.")
            continue
        sentences.append(
            f"{subject}: where it is biased, it errs less than no clip only with fewer samples than N* = "
            f"{_ranges(biased, 'kl', 'n_star')}; bias at most {root_percent(biased.bias_squared.max())} of |∇J|, "
            f"cosine with ∇J at least {biased.cosine.min():.2g}."
        )
    return sentences


def _of_bounds(choices: pd.DataFrame) -> list[str]:
    """From which N on no clip at all errs least, for the first clip at its first beta and c; a sentence a level."""
    at = tables.like_first(choices, FIRST_CLIP)
    starts = []
    for (level, direction, kl), row in tables.grouped(at, ["level", *tables.WHERE]):
        last = row.samples[row.epsilon_high.notna()].max()  # NaN if no bounds ever err least
        free = row.samples[~(row.samples <= last)]
        starts.append((level, direction, kl, free.min() if len(free) else np.inf))
    starts = pd.DataFrame(starts, columns=["level", *tables.WHERE, "start"])
    return [
        f"Whatever the bounds of clip {at['clip'].iloc[0]}, {level} level, no clip at all errs least from N = "
        f"{_ranges(rows, 'direction', 'start')} samples on."
        for (level,), rows in tables.grouped(starts, ["level"])
    ]


def _of_groups(baselines: pd.DataFrame) -> str:
    """What a constant factor does not mend, at the largest beta and distance, uphill."""
    far = _farthest(baselines)
    names = far.advantage.astype(str) + np.where(far.dynamic_sampling, " with dynamic sampling", "")
    biased = far.bias_squared >= tables.TINY
    sentence = f"Advantages from groups of {far['group'].iloc[0]}: exact are {', '.join(names[~biased]) or 'none'}."
    if biased.any():
        residual = far.residual[biased] ** 2
        sentence += (
            f" At KL {far.kl.iloc[0]:g} and beta {far.beta.iloc[0]:g} the best constant factor leaves of the biases of "
            f"the others {root_percent(residual.min())} ({names[residual.idxmin()]}) to "
            f"{root_percent(residual.max())} ({names[residual.idxmax()]}) of |∇J|."
        )
    return sentence
