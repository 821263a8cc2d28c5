"""The trade-off of a grid in a few small tables and sentences, for a terminal."""

import math

import numpy as np

from rpg_jax.lab.tradeoff import tables
from rpg_jax.lab.tradeoff.measure import Tradeoff
from rpg_jax.lab.tradeoff.moments import DIRECTIONS


def count(n: float) -> str:
    """An N*, in words at its ends."""
    if n == 0:
        return "never"
    return "always" if math.isinf(n) else f"{n:,.0f}" if n >= 10 else f"{n:.1f}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _median(values):
    return np.median(values, axis=-1)


def clips(result: Tradeoff) -> tuple[tuple, list]:
    """(header, rows): bias in percent of |∇J|, one sample's variance over |∇J|², and N*, at every distance."""
    header = ("level", "clip", "direction", *(f"KL {d:g}: bias, variance, N*" for d in result.grid.distances))
    rows = []
    for index in tables.shown(result):
        form, moments = result.forms[index], result.moments[index]
        bias, variance = _median(moments.bias / moments.size), _median(moments.variance / moments.size)
        star = _median(tables.crossing(moments, result.unclipped(form)))
        for j, direction in enumerate(DIRECTIONS):
            cells = []
            for i in range(len(result.grid.distances)):
                cell = f"{_share(bias[i, j])}, {variance[i, j]:.3g}"
                cells.append(cell if form.clip == "none" else f"{cell}, {count(star[i, j])}")
            rows.append((form.level, tables.spelled(form), direction, *cells))
    return header, rows


def best(result: Tradeoff, lines) -> tuple[tuple, list]:
    """(header, rows): the bounds of least error of the first clip, at its first beta and c."""
    first, rows = lines[0], {}
    for line in lines:
        if all(line[key] == first[key] for key in ("divergence", "clip", "beta", "clip_c")):
            key = (line["level"], line["clip"], line["direction"], f"{line['kl']:g}")
            rows.setdefault(key, []).append(tables.bounds(line["epsilon_low"], line["epsilon_high"]))
    header = ("level", "clip", "direction", "KL", *(f"N={n:,}" for n in result.grid.samples))
    return header, [(*key, *cells) for key, cells in rows.items()]


def level(result: Tradeoff, lines) -> tuple[tuple, list]:
    """(header, rows): unclipped token-level against sequence-level weighting, at the first beta."""
    rows = {}
    for line in lines:
        if _plain(line, lines[0]):
            rows[line["direction"], f"{line['kl']:g}"] = (
                percent(line["token_effective_sample_size"]),
                percent(line["sequence_effective_sample_size"]),
                _share(line["token_bias_squared"]),
                count(line["token_better_below"]),
            )
    header = ("direction", "KL", "effective tokens", "effective sequences", "token-level bias", "errs less below N")
    return header, [(*key, *cells) for key, cells in rows.items()]


def _plain(line, first) -> bool:
    same = all(line[key] == first[key] for key in ("divergence", "beta"))
    return same and (line["clip"], line["estimator"]) == ("none", "reinforce")


def groups(lines) -> tuple[tuple, list]:
    """(header, rows): advantages from a group, at the largest beta and distance, uphill."""
    rows = []
    for line in lines:
        if _far(line, lines):
            how = "yes" if line["dynamic_sampling"] else "no"
            numbers = (f"{line[key]:.4g}" for key in ("scale", "cosine"))
            rows.append(
                (line["advantage"], how, _share(line["bias_squared"]), *numbers)
                + (_share(line["residual"] ** 2), f"{line['variance']:.4g}")
            )
    header = ("advantage", "dynamic sampling", "bias", "best scale", "cosine", "bias after it", "variance")
    return header, rows


def _share(square: float) -> str:
    return percent(math.sqrt(square)) if square > tables.TINY else "0"


def _far(line, lines) -> bool:
    most = {key: max(x[key] for x in lines) for key in ("beta", "kl")}
    return line["direction"] == "uphill" and all(line[key] == value for key, value in most.items())


def finding_of_groups(lines) -> str:
    """What a constant factor does not mend, at the largest beta and distance, uphill."""
    far = [line for line in lines if _far(line, lines)]

    def spelled(line):
        return line["advantage"] + (" with dynamic sampling" if line["dynamic_sampling"] else "")

    exact = [spelled(line) for line in far if line["bias_squared"] < tables.TINY]
    rest = [
        f"{spelled(line)} {_share(line['bias_squared'])} (then {_share(line['residual'] ** 2)})"
        for line in far
        if line["bias_squared"] >= tables.TINY
    ]
    return (
        f"Advantages from groups of {far[0]['group']}: exact are {', '.join(exact) or 'none'}. Biases at KL "
        f"{far[0]['kl']:g} and beta {far[0]['beta']:g}, and what the best constant factor leaves of them: "
        f"{', '.join(rest)}."
    )


def finding(result: Tradeoff) -> list[str]:
    """What the numbers say, a sentence each; medians over problems."""
    grid, sentences = result.grid, []
    for index in tables.shown(result):
        form, moments = result.forms[index], result.moments[index]
        if form.clip == "none":
            sentences.append(_of_weights(result, form.level, moments))
            continue
        star = _median(tables.crossing(moments, result.unclipped(form)))
        bias, cosine = _median(moments.bias / moments.size), _median(moments.cosine)
        if not (bias > tables.TINY).any():
            sentences.append(f"{tables.spelled(form)}, {form.level} level: no bias at any distance of this grid.")
            continue
        each = [
            f"{direction} {', '.join(count(n) for n in star[:, j])} (bias at most {_share(bias[:, j].max())}, "
            f"cosine with ∇J at least {cosine[:, j].min():.2g})"
            for j, direction in enumerate(DIRECTIONS)
        ]
        sentences.append(
            f"{tables.spelled(form)}, {form.level} level, errs less than no clip only with fewer samples than, "
            f"at KL {_joined(grid.distances)}: {'; '.join(each)}."
        )
        if form.clip == "-":
            sentences.append(_of_turning(moments))
    return sentences


def _of_turning(moments) -> str:
    cosine, scale = _median(moments.cosine), _median(moments.scale)
    return (
        f"Its expected gradient has a cosine of {cosine.min():.4g} to {cosine.max():.4g} with ∇J; multiplied by "
        f"{scale.min():.4g} to {scale.max():.4g} it comes nearest."
    )


def _of_weights(result, level, moments) -> str:
    effective, size = _median(moments.effective)[:, 0], _median(moments.variance / moments.size)[:, 0]
    near, far = result.grid.distances[0], result.grid.distances[-1]
    return (
        f"Unclipped, {level} level: exact. Uphill from KL {near:g} to {far:g} its effective sample size goes from "
        f"{percent(effective[0])} to {percent(effective[-1])}, one sample's variance from {size[0]:.3g} to "
        f"{size[-1]:.3g} |∇J|²: with fewer samples than that, estimating zero errs less."
    )


def finding_of_bounds(lines) -> list[str]:
    """From which N on no clip at all errs least, for the first clip at its first beta and c; a sentence a level."""
    first, sentences = lines[0], []
    kept = [x for x in lines if all(x[key] == first[key] for key in ("divergence", "clip", "beta", "clip_c"))]
    for where in dict.fromkeys(x["level"] for x in kept):
        each = []
        for direction in DIRECTIONS:
            at = [x for x in kept if (x["level"], x["direction"]) == (where, direction)]
            ends = [_from(sorted((x["samples"], x["epsilon_high"]) for x in at if x["kl"] == d)) for d in _kls(at)]
            each.append(f"{direction} {', '.join(ends)}")
        sentences.append(
            f"Whatever the bounds of clip {first['clip']}, {where} level, no clip at all errs least from N, "
            f"at KL {_joined(_kls(kept))}: {'; '.join(each)}."
        )
    return sentences


def _kls(lines) -> list:
    return list(dict.fromkeys(x["kl"] for x in lines))


def _joined(values) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _from(choices) -> str:
    """The N after which every choice is no clip, of ascending (N, epsilon)."""
    clipped = [n for n, high in choices if high is not None]
    free = [n for n, _ in choices if not clipped or n > clipped[-1]]
    return f"{free[0]:,}" if free else f"over {choices[-1][0]:,}"


def finding_of_levels(lines) -> list[str]:
    """Token-level against sequence-level weighting, unclipped, a sentence a direction."""
    sentences = []
    for direction in DIRECTIONS:
        kept = [x for x in lines if x["direction"] == direction and _plain(x, lines[0])]
        each = {x["kl"]: f"{count(x['token_better_below'])} (bias {_share(x['token_bias_squared'])})" for x in kept}
        sentences.append(
            f"Against the sequence-level objective, {direction}: token-level weights err less than sequence-level ones "
            f"only with fewer samples than, at KL {_joined(each)}: {', '.join(each.values())}."
        )
    return sentences
