"""Rewards from verdicts and response lengths."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from rpg_jax import InputError


def signed_reward(correct: ArrayLike) -> np.ndarray:
    """f32[N] from correct [N] in 0..1: +1 for right, -1 for wrong, linear between."""
    return 2.0 * np.asarray(correct, np.float32) - 1.0


SCALES = {"signed": signed_reward, "unit": partial(np.asarray, dtype=np.float32)}


def scale_named(name: str) -> Callable[[ArrayLike], np.ndarray]:
    """The function from verdicts to rewards that reward.scale names; raises ValueError for an unknown name."""
    if name not in SCALES:
        raise InputError(f"reward.scale is {name!r}; known: {', '.join(SCALES)}")
    return SCALES[name]


def check_weights(weights: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """The weights as floats; raises ValueError for one that is no finite number, or of no reward in `names`."""
    for name, weight in weights.items():
        if name not in names:
            raise InputError(f"reward.weights has {name!r}, which is no reward; there are: {', '.join(names)}")
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise InputError(f"reward.weights.{name} is {weight!r}; it must be a finite number, which may be negative")
    return {name: float(weight) for name, weight in weights.items()}


def weighted_sum(
    values: Mapping[str, np.ndarray], weights: Mapping[str, float], scale: Callable[[np.ndarray], np.ndarray],
    unscaled: Sequence[str] = (),
) -> np.ndarray:  # fmt: skip
    """f32[...], the sum of weight times `scale` of each reward's values f32[...] in 0..1; a weight is 1 if not given.

    Those named in `unscaled` may be any numbers and are taken as they are. It is summed in float64: sums that are equal
    but for the order of their terms are equal in float32.
    """
    scaled = {name: value if name in unscaled else scale(value) for name, value in values.items()}
    terms = [np.float64(weights.get(name, 1.0)) * value for name, value in scaled.items()]
    return np.sum(terms, axis=0, dtype=np.float64).astype(np.float32) + 0.0  # no -0 of a weight of 0


def overlong_penalty(lengths: ArrayLike, maximum: int, buffer: int, factor: float = 1.0) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), to be added to the reward.

    f32[N] of response lengths [N] in tokens that the policy drew, EOS included and an environment's observations not: 0
    up to `maximum - buffer`, then linear down to `-factor` at `maximum` and beyond.
    """
    excess = np.asarray(lengths, np.float32) - (maximum - buffer)
    return -factor * np.clip(excess / buffer, 0.0, 1.0).astype(np.float32)
