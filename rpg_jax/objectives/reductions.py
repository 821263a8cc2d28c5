"""From per-token losses to one number: a total over valid entries divided by a count (docs/method.md 5.2).

| name | total | divided by | |
|---|---|---|---|
| `token_mean` | tokens | valid tokens | a ratio estimator, unless `denominator` is given |
| `sequence_mean` | tokens | rows with tokens | |
| `sequence_mean_token_mean` | each row's token mean | rows with tokens | biased by length; GRPO's |
| `constant` | tokens | `denominator` | |

A row without tokens counts in neither. For gradient accumulation, take `count` of the whole minibatch and pass it as
`denominator` for every microbatch: their losses, and gradients, then add up to the minibatch's exactly.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax import InputError

BY_LEVEL = {"token": "token_mean", "sequence": "sequence_mean"}  # the defaults
REDUCTIONS = ("token_mean", "sequence_mean", "sequence_mean_token_mean", "constant")


def count(reduction: str, mask: ArrayLike) -> jax.Array:
    """The number that the reduction divides by, i32[]: valid tokens of `mask` [B, T], or its rows that have any.

    Raises ValueError for `constant`, which has no count of its own.
    """
    valid = jnp.asarray(mask).astype(bool)
    if reduction == "token_mean":
        return jnp.sum(valid, dtype=jnp.int32)
    if reduction in ("sequence_mean", "sequence_mean_token_mean"):
        return jnp.sum(jnp.any(valid, axis=-1), dtype=jnp.int32)
    if reduction == "constant":
        raise InputError("reduction 'constant' has no count of its own: pass denominator=, the number to divide by")
    raise InputError(f"unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")


def reduce(reduction: str, values: jax.Array, mask: jax.Array, denominator: ArrayLike | None = None) -> jax.Array:
    """Reduces values [B, T] under mask [B, T] to a scalar of values' dtype; 0 if nothing is valid.

    `denominator`, a positive scalar (may be traced), replaces the reduction's own count.
    """
    if denominator is None:
        denominator = count(reduction, mask)
    elif jnp.ndim(denominator):
        raise InputError(f"denominator has shape {jnp.shape(denominator)}; expected a scalar")
    elif isinstance(denominator, int | float) and not 0 < denominator < float("inf"):
        raise InputError(f"denominator is {denominator}; expected a positive finite number")
    rows = jnp.sum(jnp.where(mask, values, 0), axis=-1)
    if reduction == "sequence_mean_token_mean":
        rows = rows / jnp.maximum(jnp.sum(mask, axis=-1), 1).astype(rows.dtype)
    divisor = jnp.asarray(denominator).astype(rows.dtype)
    return jnp.sum(rows) / jnp.where(divisor == 0, 1, divisor)
