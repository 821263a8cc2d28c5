"""Metrics that carry their own reducer, so that they stay right under accumulation, over devices and over hosts.

Each is a small pytree with `value()`, `merge(other)` and `empty()`, the identity of merge. Over dictionaries (any
trees) of them: `merge(a, b)`, `empty(metrics)` to start a `lax.fori_loop` with (shapes are enough), `values(metrics)`
for the log.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from rpg_jax.objectives.batch import promoted
from rpg_jax.types import pytree


@pytree
class Mean:
    """A mean as numerator and denominator; 0 where nothing was counted."""

    total: jax.Array
    count: jax.Array

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def empty(self) -> "Mean":
        return Mean(jnp.zeros_like(self.total), jnp.zeros_like(self.count))

    def value(self) -> jax.Array:
        return self.total / jnp.where(self.count == 0, 1, self.count)


@pytree
class Max:
    """A maximum; −inf inside and 0 as a value where nothing was seen."""

    maximum: jax.Array

    def merge(self, other: "Max") -> "Max":
        return Max(jnp.maximum(self.maximum, other.maximum))

    def empty(self) -> "Max":
        return Max(jnp.full_like(self.maximum, -jnp.inf))

    def value(self) -> jax.Array:
        return jnp.where(self.maximum == -jnp.inf, 0, self.maximum)


@pytree
class EffectiveSampleSize:
    """(Σ w)² / (n Σ w²), the effective share of n samples in (0, 1], from moments of w·exp(−shift) that fit."""

    shift: jax.Array  # the largest log ratio seen
    first: jax.Array  # Σ exp(log w − shift)
    second: jax.Array  # Σ exp(2 (log w − shift))
    count: jax.Array

    def merge(self, other: "EffectiveSampleSize") -> "EffectiveSampleSize":
        shift = jnp.maximum(self.shift, other.shift)
        mine, yours = (jnp.where(m.count == 0, 0, jnp.exp(m.shift - shift)) for m in (self, other))
        return EffectiveSampleSize(
            shift,
            self.first * mine + other.first * yours,
            self.second * mine**2 + other.second * yours**2,
            self.count + other.count,
        )

    def empty(self) -> "EffectiveSampleSize":
        zero = jnp.zeros_like(self.shift)
        return EffectiveSampleSize(jnp.full_like(zero, -jnp.inf), zero, zero, zero)

    def value(self) -> jax.Array:
        share = self.first**2 / jnp.where(self.count == 0, 1, self.count * self.second)
        return jnp.minimum(share, 1)  # which rounding alone can exceed


Metric: TypeAlias = Mean | Max | EffectiveSampleSize
Metrics: TypeAlias = dict[str, Metric]


def mean_of(values: jax.Array, mask: jax.Array | None = None) -> Mean:
    """Mean of an array's entries, or of those under `mask` (bool, same shape); of booleans their share."""
    values = promoted(values)
    mask = jnp.ones_like(values, bool) if mask is None else mask
    return Mean(jnp.sum(jnp.where(mask, values, 0)), jnp.sum(mask, dtype=values.dtype))


def max_of(values: jax.Array, mask: jax.Array) -> Max:
    """Largest entry under `mask`."""
    return Max(jnp.max(values, initial=-jnp.inf, where=mask))


def effective_sample_size(log_ratio: jax.Array, mask: jax.Array) -> EffectiveSampleSize:
    """Effective sample size of the importance ratios exp(log_ratio) under `mask`."""
    shift = jnp.max(log_ratio, initial=-jnp.inf, where=mask)
    scaled = jnp.exp(jnp.where(mask, log_ratio - jnp.where(shift == -jnp.inf, 0, shift), -jnp.inf))
    return EffectiveSampleSize(shift, jnp.sum(scaled), jnp.sum(scaled**2), jnp.sum(mask, dtype=scaled.dtype))


def is_metric(x: Any) -> bool:
    return isinstance(x, Metric)


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Merges two trees of metrics of one structure; associative and commutative to rounding."""
    return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=is_metric)


def empty(metrics: Metrics) -> Metrics:
    """The identity of `merge` for a tree of metrics, or of what `jax.eval_shape` says of one."""
    return jax.tree.map(lambda x: x.empty(), metrics, is_leaf=is_metric)


def values(metrics: Metrics) -> dict[str, jax.Array]:
    """The tree of values, on the host or inside jit."""
    return jax.tree.map(lambda x: x.value(), metrics, is_leaf=is_metric)
