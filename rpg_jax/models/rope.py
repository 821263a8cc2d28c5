"""Rotary frequencies and the scalings that extend them to longer contexts, as `transformers` computes them.

Field names are those of `rope_scaling` in a `config.json`. Frequencies are computed in float32, as in transformers,
because at position 30,000 their last bit changes angles visibly.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import InputError


@dataclasses.dataclass(frozen=True)
class Positive:
    """Raises InputError unless every number of a scaling is finite and positive."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool or value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                kind = type(self).__name__.lower()
                raise InputError(f"rope scaling {kind}: {field.name} is {value!r}; expected a positive number")


@dataclasses.dataclass(frozen=True)
class Linear(Positive):
    """Positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float

    def scaled(self, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        return frequency / np.float32(self.factor), 1.0


@dataclasses.dataclass(frozen=True)
class Llama3(Positive):
    """Frequencies of long waves divided by `factor`, of short ones kept, of those between interpolated (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scaled(self, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        old, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelength = 2 * math.pi / frequency
        long = wavelength > old / low
        stretched = np.where(long, frequency / self.factor, frequency)
        smooth = (old / wavelength - low) / (high - low)
        between = (1 - smooth) * stretched / self.factor + smooth * stretched
        return np.where(~long & (wavelength >= old / high), between, stretched), 1.0


@dataclasses.dataclass(frozen=True)
class Yarn(Positive):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): a ramp between kept and divided frequencies; cos and sin are scaled.

    `attention_factor` multiplies cos and sin; None means the paper's 0.1 ln(factor) + 1. `truncate` rounds the ends of
    the ramp to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scaled(self, frequency: np.ndarray, theta: float) -> tuple[np.ndarray, float]:
        half = len(frequency)

        def dimension(rotations):
            """The dimension of the wave that turns `rotations` times over the original context."""
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return 2 * half * math.log(turns) / (2 * math.log(theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        high += 0.001 * (low == high)
        kept = 1 - np.clip((np.arange(half, dtype=np.float32) - low) / (high - low), 0, 1)
        mixed = 1 / (self.factor * (1 / frequency)) * (1 - kept) + frequency * kept
        return mixed, yarn_mscale(self.factor) if self.attention_factor is None else self.attention_factor


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's scale of attention logits, 0.1 mscale ln(factor) + 1; 1 for a factor of at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


SCALINGS = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
Scaling = Linear | Llama3 | Yarn | None


@functools.lru_cache
def frequencies(head_dim: int, theta: float, scaling: Scaling) -> tuple[np.ndarray, float]:
    """(f32[head_dim / 2], radians per position of each pair of a head's entries; the factor of cos and sin)."""
    frequency = 1 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    frequency, factor = scaling.scaled(frequency, theta) if scaling else (frequency, 1.0)
    return frequency.astype(np.float32), factor


def turns(positions: jax.Array, head_dim: int, theta: float, scaling: Scaling) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, f32[B, T, head_dim / 2] each, by which positions i32[B, T] turn pairs of a head's entries."""
    frequency, factor = frequencies(head_dim, theta, scaling)
    angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor
