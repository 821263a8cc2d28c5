"""The arrays that a loss sees, and what it counts: tokens, or whole responses."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax import InputError


def promoted(values: ArrayLike) -> jax.Array:
    """The values in their dtype, or in float32 if it is smaller."""
    values = jnp.asarray(values)
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


class Batch(NamedTuple):
    """Arrays of one shape: [B, T] for tokens, [B, 1] for sequences. Finite wherever masked."""

    logp: jax.Array
    behavior_logp: jax.Array
    reference_logp: jax.Array
    advantage: jax.Array
    weight: jax.Array
    mask: jax.Array  # bool


def prepare(
    logp: jax.Array, behavior_logp: jax.Array, advantage: jax.Array, mask: jax.Array,
    reference_logp: jax.Array | None = None, weight: jax.Array | None = None,
) -> Batch:  # fmt: skip
    """Checks, promotes to one dtype of at least float32, zeroes what is masked, and stops gradients on all but logp."""
    logp, mask = jnp.asarray(logp), jnp.asarray(mask)
    if logp.ndim != 2:
        raise InputError(f"logp has shape {logp.shape}; expected [B, T], one sequence a row")
    rows = (logp.shape[0], 1)
    weight = jnp.ones(rows, logp.dtype) if weight is None else weight
    reference_logp = behavior_logp if reference_logp is None else reference_logp
    given = dict(behavior_logp=behavior_logp, reference_logp=reference_logp, advantage=advantage, weight=weight)
    arrays = {name: jnp.asarray(array) for name, array in given.items()}
    for name, array in {**arrays, "mask": mask}.items():
        by_row = name in ("advantage", "weight")
        if array.shape != logp.shape and not (by_row and array.shape == rows):
            expected = f"{logp.shape}, that of logp" + (f", or {rows}" if by_row else "")
            raise InputError(f"{name} has shape {array.shape}; expected {expected}")
    dtype = jnp.result_type(jnp.float32, logp.dtype, *(array.dtype for array in arrays.values()))
    mask = mask.astype(bool)

    def clean(array):
        return jnp.where(mask, array.astype(dtype), 0)

    constants = {name: jax.lax.stop_gradient(clean(array)) for name, array in arrays.items()}
    return Batch(logp=clean(logp), mask=mask, **constants)


def as_mean_tokens(tokens: Batch) -> Batch:
    """Rows as units, [B, 1], everything a masked row mean: w is the geometric mean of the tokens' ratios."""
    length = jnp.maximum(jnp.sum(tokens.mask, axis=1, keepdims=True), 1).astype(tokens.logp.dtype)
    means = Batch(*(jnp.sum(x, axis=1, keepdims=True) / length for x in tokens))
    return means._replace(mask=jnp.any(tokens.mask, axis=1, keepdims=True))


def as_sequences(tokens: Batch) -> Batch:
    """Rows as units, [B, 1]: log-probs are masked sums, advantage and weight masked row means (no length in w)."""
    sums = {name: jnp.sum(getattr(tokens, name), axis=1, keepdims=True) for name in Batch._fields[:3]}
    return as_mean_tokens(tokens)._replace(**sums)


UNITS = {"token": lambda tokens: tokens, "sequence": as_sequences}  # by level
