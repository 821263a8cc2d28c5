"""What the moments of a grid say: medians over problems with intervals, the error of N samples, and in words.

Everything is relative to ∇J: a squared bias, variance or mean squared error of 1 is that of estimating zero.
"""

import functools

import numpy as np
from scipy.special import bdtrc  # (m, n, share): the chance of more than m of n

from rpg_jax.lab.tradeoff.measure import Form, Tradeoff
from rpg_jax.lab.tradeoff.moments import DIRECTIONS, Moments

TINY = 1e-20  # relative squared bias of what is exact in float64; exact forms come out near 1e-30


@functools.cache
def _ranks(count: int, level: float = 0.95) -> tuple[int, int]:
    """Order statistics of `count` values that bound the bootstrap of their median, which is summed, not drawn.

    A resample's m-th smallest is at most the k-th smallest value if at least m of `count` draws are among k values.
    """
    share, below, above = np.arange(1, count + 1) / count, (count + 1) // 2, count // 2 + 1  # the two middle ones
    low = np.argmax(bdtrc(below - 1, count, share) >= (1 - level) / 2)
    high = np.argmax(bdtrc(above - 1, count, share) >= (1 + level) / 2)
    return int(low), int(high)


def median_interval(values) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The median of the last axis (problems) and its 95 % percentile bootstrap interval, exactly."""
    ordered = np.sort(np.asarray(values, np.float64), axis=-1)
    low, high = _ranks(ordered.shape[-1])
    with np.errstate(invalid="ignore"):
        return np.median(ordered, axis=-1), ordered[..., low], ordered[..., high]


def error(moments: Moments, samples, sequence: bool = False):
    """Relative mean squared error of the mean of N samples, [N, distances, directions, problems].

    Against the J of the loss's own level, or with `sequence` against the sequence-level one.
    """
    bias, size = moments.bias, moments.size
    if sequence:
        bias, size = moments.sequence_bias, moments.sequence_size
    n = np.asarray(samples, np.float64).reshape(-1, *[1] * bias.ndim)
    return (bias + moments.variance / n) / size


def crossing(biased: Moments, exact: Moments, sequence: bool = False):
    """N* = (V_exact − V_biased) / (|b_biased|² − |b_exact|²): the N below which the biased loss errs less.

    0 if it never does, infinite if it always does.
    """
    which = "sequence_bias" if sequence else "bias"
    cost = getattr(biased, which) - getattr(exact, which)
    gain = exact.variance - biased.variance
    size = exact.sequence_size if sequence else exact.size
    unbiased, worse = cost <= TINY * size, gain < -1e-9 * exact.variance
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(unbiased, np.where(worse, 0.0, np.inf), np.maximum(gain, 0) / cost)


def _interval_columns(name, values, index) -> dict:
    median, low, high = values
    return {name: float(median[index]), f"{name}_low": float(low[index]), f"{name}_high": float(high[index])}


def rows(result: Tradeoff) -> list[dict]:
    """One for each form, direction, distance and N; medians over problems, with `_low` and `_high` of an interval."""
    grid, table = result.grid, []
    back = np.median(result.kl_back, axis=-1)
    for form, moments in zip(result.forms, result.moments, strict=True):
        exact = result.unclipped(form)
        once = {
            "bias_squared": median_interval(moments.bias / moments.size),
            "variance": median_interval(moments.variance / moments.size),
            "sequence_bias_squared": median_interval(moments.sequence_bias / moments.sequence_size),
        }
        if form.clip != "none":
            once["n_star"] = median_interval(crossing(moments, exact))
        single = {
            "kl_back": back,
            "effective_sample_size": np.median(moments.effective, axis=-1),
            "dead_mass": np.median(moments.dead, axis=-1),
            "cosine": np.median(moments.cosine, axis=-1),
            "best_scale": np.median(moments.scale, axis=-1),
        }
        errors = error(moments, grid.samples)
        better = (errors < error(exact, grid.samples)).mean(axis=-1)
        each = {
            "mse": median_interval(errors),
            "sequence_mse": median_interval(error(moments, grid.samples, sequence=True)),
        }
        for j, direction in enumerate(DIRECTIONS):
            for i, distance in enumerate(grid.distances):
                fixed = form._asdict() | {"direction": direction, "kl": distance}
                fixed |= {name: float(values[i, j]) for name, values in single.items()}
                for name in ("bias_squared", "variance", "sequence_bias_squared", "n_star"):
                    blank = dict.fromkeys((name, f"{name}_low", f"{name}_high"))
                    fixed |= _interval_columns(name, once[name], (i, j)) if name in once else blank
                for k, count in enumerate(grid.samples):
                    line = fixed | {"samples": count}
                    for name, values in each.items():
                        line |= _interval_columns(name, values, (k, i, j))
                    table.append(line | {"beats_unclipped": float(better[k, i, j])})
    return table


def best_epsilon(result: Tradeoff) -> list[dict]:
    """For each clip with bounds, beta, c, level, direction, distance and N: the bounds of least median error.

    `none` competes: epsilon_low and epsilon_high are then None.
    """
    grid, table = result.grid, []
    choices = {}
    for form, moments in zip(result.forms, result.moments, strict=True):
        if form.clip_low is not None:
            choices.setdefault(form._replace(clip_low=None, clip_high=None), []).append((form, moments))
    for key, members in choices.items():
        exact = result.unclipped(key)
        candidates = [(form.clip_low, form.clip_high) for form, _ in members] + [(None, None)]
        errors = np.stack([error(m, grid.samples) for m in [*(m for _, m in members), exact]])
        medians = np.median(errors, axis=-1)  # [candidates, N, distances, directions]
        better = (errors < errors[-1]).mean(axis=-1)
        # Of equals, as where no bound is reached, no clip.
        ties = medians <= medians.min(axis=0) * (1 + 1e-9)
        winner = len(candidates) - 1 - np.argmax(ties[::-1], axis=0)
        for j, direction in enumerate(DIRECTIONS):
            for i, distance in enumerate(grid.distances):
                for k, count in enumerate(grid.samples):
                    best = winner[k, i, j]
                    fixed = {name: value for name, value in key._asdict().items() if name not in _BOUNDS}
                    low, high = candidates[best]
                    table.append(
                        fixed
                        | {"direction": direction, "kl": distance, "samples": count}
                        | {"epsilon_low": low, "epsilon_high": high, "mse": float(medians[best, k, i, j])}
                        | {"mse_unclipped": float(medians[-1, k, i, j])}
                        | {"beats_unclipped": float(better[best, k, i, j])}
                    )
    return table


_BOUNDS = ("clip_low", "clip_high")


def levels(result: Tradeoff) -> list[dict]:
    """Token-level against sequence-level weighting of each form: errors against the sequence-level J."""
    grid, table = result.grid, []
    at = dict(zip(result.forms, result.moments, strict=True))
    for form, token in at.items():
        sequence = at.get(form._replace(level="sequence"))
        if form.level != "token" or sequence is None:
            continue
        errors = [error(m, grid.samples, sequence=True) for m in (token, sequence)]
        medians, better = [np.median(e, axis=-1) for e in errors], (errors[0] < errors[1]).mean(axis=-1)
        floors = [np.median(m.sequence_bias / m.sequence_size, axis=-1) for m in (token, sequence)]
        effective = [np.median(m.effective, axis=-1) for m in (token, sequence)]
        meeting = np.median(crossing(token, sequence, sequence=True), axis=-1) if form.clip == "none" else None
        for j, direction in enumerate(DIRECTIONS):
            for i, distance in enumerate(grid.distances):
                for k, count in enumerate(grid.samples):
                    line = {name: value for name, value in form._asdict().items() if name != "level"}
                    line |= {"direction": direction, "kl": distance, "samples": count}
                    for name, values, index in (
                        ("mse", medians, (k, i, j)),
                        ("bias_squared", floors, (i, j)),
                        ("effective_sample_size", effective, (i, j)),
                    ):
                        line |= {f"token_{name}": float(values[0][index]), f"sequence_{name}": float(values[1][index])}
                    line["token_better"] = float(better[k, i, j])
                    line["token_better_below"] = None if meeting is None else float(meeting[i, j])
                    table.append(line)
    return table


def group_rows(result: Tradeoff) -> list[dict]:
    """One for each advantage, dynamic sampling or not, beta, direction and distance; medians over problems."""
    table = []
    for (name, dynamic, beta), moments in result.groups.items():
        medians = {field: np.median(values, axis=-1) for field, values in moments._asdict().items()}
        for j, direction in enumerate(DIRECTIONS):
            for i, distance in enumerate(result.grid.distances):
                fixed = {"advantage": name, "dynamic_sampling": dynamic, "group": result.grid.group, "beta": beta}
                values = {field: float(value[i, j]) for field, value in medians.items()}
                values = {"bias_squared": values.pop("bias")} | values
                table.append(fixed | {"direction": direction, "kl": distance} | values)
    return table


def spelled(form: Form) -> str:
    """A form in a few words, without level and beta."""
    if form.clip == "-":
        return form.objective
    if form.clip_low is None:
        return "no clip"
    ceiling = f", c {form.clip_c:g}" if form.clip_c else ""
    return f"{form.clip} {bounds(form.clip_low, form.clip_high)}{ceiling}"


def bounds(low, high) -> str:
    """A clip's epsilon in a word: one number where its two bounds are equal, none where there is no clip."""
    if high is None:
        return "none"
    return f"{high:g}" if low == high else f"{low:g}/{high:g}"


def shown(result: Tradeoff, levels=("token", "sequence")) -> list[int]:
    """Indices of the forms that tables and figures show: every clip at the first divergence, beta, epsilon and c.

    Unclipped, the two estimators have one gradient and share a line.
    """
    seen, chosen = set(), []
    for index, form in enumerate(result.forms):
        key = (form.objective, form.clip, form.level)
        if key not in seen and form.level in levels and form.divergence == result.forms[0].divergence:
            seen.add(key)
            chosen.append(index)
    return chosen
