"""What a loss does with a whole batch, which an enumeration of one response at a time cannot see.

A batch of four rows, of which one has no tokens, is compared with its rows alone, with other values in it, and with
the counts that reductions are defined to divide by.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.objectives import Objective

INPUTS = ("logp", "behavior_logp", "reference_logp", "advantage")
MASK = np.array([[2, 2, 2, 2], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])  # nonzero counts; a gap, and an empty row
SPREADS = (1.0, 8.0)  # of log-probs: moderate and far ratios
COUNTS = {"token_mean": ("tokens", 8), "sequence_mean": ("rows with tokens", 3)}  # in MASK, by definition
COUNTS["sequence_mean_token_mean"] = COUNTS["sequence_mean"]


class Entangled(NamedTuple):
    """What else than its own inputs moves a gradient, in words; "" where nothing does."""

    rows: str  # other rows of the batch
    tokens: str  # other tokens of the row, at level "token"
    padding: str  # columns, or values, that the mask leaves out


def entangled(objective: Objective) -> Entangled:
    """Compares the gradients of a batch with those of each row alone, and with other values in it; in float64."""
    rows, columns = range(3), range(MASK.shape[1])  # rows with tokens
    found = {"rows": "", "tokens": "", "padding": ""}
    with jax.enable_x64():
        gradient = jax.jit(jax.vmap(lambda x, mask: _gradient(objective, x, mask), (0, None)))
        for seed, spread in enumerate(SPREADS):
            batch, other = _batches(seed, spread)
            places: list[tuple[int, int, Any]] = [(i, row, slice(None)) for i in range(len(INPUTS)) for row in rows]
            places += [(i, 0, column) for i in range(len(INPUTS)) for column in columns]
            changed = np.stack([batch] * (len(places) + 2))
            for index, place in enumerate(places, 2):
                changed[index][place] = other[place]
            changed[1] = np.where(MASK > 0, batch, other)
            whole, masked, *each = gradient(changed, MASK)
            alone = [gradient(batch[None, :, row : row + 1], MASK[row : row + 1])[0, 0] for row in rows]
            short = gradient(batch[None, :, 1:2, :2], MASK[1:2, :2])[0, 0]
            moved = list(zip(places, each, strict=True))
            if not _same(alone, whole[:3]):
                by = {i for (i, row, at), x in moved if at == slice(None) and not _others_same(x, whole, row)}
                found["rows"] = found["rows"] or _words(by, "other rows", "how many rows there are")
            by = {i for (i, _, at), x in moved if at != slice(None) and not _others_same(x[0], whole[0], at)}
            if by and objective.level == "token":
                found["tokens"] = found["tokens"] or _words(by, "other tokens", "")
            if not _same(short, alone[1][:2]):
                found["padding"] = "the number of columns beyond a row's tokens"
            elif not _same(masked, whole):
                found["padding"] = "values where the mask is zero"
    return Entangled(**found)


def miscounted(objective: Objective) -> str:
    """What is wrong with the number that a reduction divides by, in words; "" if nothing is. In float64."""
    if objective.reduction not in COUNTS:
        return ""  # "constant", which has no count of its own
    unit, count = COUNTS[objective.reduction]
    with jax.enable_x64():
        batch, _ = _batches(0, SPREADS[0])
        if int(counted := objective.count(jnp.asarray(MASK))) != count:
            return f"its count is {counted} for a batch with {count} {unit}"
        total, halved, own = jax.jit(lambda x: [_loss(objective, x[0], x, MASK, d) for d in (1.0, 2.0, None)])(batch)
        if not _same(total, 2 * halved):
            return "its loss is not the total over the denominator that is given"
        if not _same(total, count * own):
            return f"its loss divides by {total / own:.3g} for a batch with {count} {unit}"
    return ""


def _batches(seed: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Two draws of the inputs [4, rows, columns], in the order of `INPUTS`."""
    rng = np.random.default_rng(seed)
    logs = -spread * rng.exponential(size=(2, 3, *MASK.shape))
    return tuple(np.concatenate([logs, rng.normal(size=(2, 1, *MASK.shape))], axis=1))


def _loss(objective, logp, batch, mask, denominator):
    _, behavior, reference, advantage = batch
    return objective(logp, behavior, advantage, mask, reference_logp=reference, denominator=denominator)[0]


def _gradient(objective, batch, mask):
    return jax.grad(lambda logp: _loss(objective, logp, batch, mask, 1.0))(batch[0])


def _same(a: Any, b: Any) -> bool:
    return np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


def _others_same(a: np.ndarray, b: np.ndarray, index: Any) -> bool:
    """Whether all but one of the rows, or entries, are the same."""
    return _same(np.delete(a, index, 0), np.delete(b, index, 0))


def _words(inputs: set[int], whose: str, otherwise: str) -> str:
    return f"the {' and '.join(INPUTS[i] for i in sorted(inputs))} of {whose}" if inputs else otherwise
