"""Rewards from verdicts and response lengths."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike


def signed_reward(correct: ArrayLike) -> np.ndarray:
    """f32[N] from correct [N] in 0..1: +1 for right, -1 for wrong, linear between."""
    return 2.0 * np.asarray(correct, np.float32) - 1.0


def unit_reward(correct: ArrayLike) -> np.ndarray:
    """f32[N] from correct [N] in 0..1: 1 for right, 0 for wrong."""
    return np.asarray(correct, np.float32)


SCALES = {"signed": signed_reward, "unit": unit_reward}


def scale_named(name: str) -> Callable[[ArrayLike], np.ndarray]:
    """The function from verdicts to rewards that reward.scale names; raises ValueError for an unknown name."""
    if name not in SCALES:
        raise ValueError(f"reward.scale is {name!r}; known: {', '.join(SCALES)}")
    return SCALES[name]


def overlong_penalty(lengths: ArrayLike, maximum: int, buffer: int, factor: float = 1.0) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), to be added to the reward.

    0 up to `maximum - buffer` tokens, then linear down to `-factor` at `maximum` tokens and beyond.

    Args:
      lengths: [N] response lengths in tokens, EOS included.
      maximum: the longest response, in tokens; buffer: the last tokens before it, over which the punishment grows.

    Returns:
      f32[N], in -factor..0.

    Raises:
      ValueError: unless 0 < buffer <= maximum.
    """
    if not 0 < buffer <= maximum:
        raise ValueError(f"overlong buffer={buffer} must be between 1 and the largest response length, {maximum}")
    excess = np.asarray(lengths, np.float32) - (maximum - buffer)
    return -factor * np.clip(excess / buffer, 0.0, 1.0).astype(np.float32)
