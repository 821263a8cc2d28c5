"""From rewards [P, G], G responses to each of P prompts, to advantages; at least float32 and global over the batch.

Functions of rewards alone keep their shape. They subtract the first reward of a group before they average, so that a
group of equal rewards gets exactly zero. Functions that whiten do so over valid tokens: they need the mask, and give
each token an advantage of its own.

`ADVANTAGES` holds all of them by name as `(rewards [P, G], penalty [P·G, T], mask [P·G, T]) -> [P·G, 1] or [P·G, T]`,
where `penalty` is subtracted from each token's reward: `kl_penalty` for objectives with their KL in the reward, zeros
for all others. One that names `step` or `turn_reward` gets it, too (`Objective.advantages`). A user's function
FILE.py:NAME is another one (`own.advantage`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax import InputError
from rpg_jax.objectives.batch import promoted

Advantage = Callable[..., jax.Array]  # (rewards, penalty, mask) -> advantages


def _rewards(rewards: ArrayLike, least: int) -> jax.Array:
    rewards = promoted(rewards)
    if rewards.ndim != 2 or rewards.shape[1] < least:
        expected = "[P, G], G responses to each of P prompts" + (", G at least 2" if least > 1 else "")
        raise InputError(f"rewards have shape {rewards.shape}; expected {expected}")
    return rewards


def group_mean(rewards: ArrayLike) -> jax.Array:
    """R − mean of the group. Not exact: the mean contains the sample itself.

    That scales the reward part of the gradient by (G − 1) / G and keeps its direction, so that the effective beta is
    beta·G / (G − 1).
    """
    checked = _rewards(rewards, 2)
    shifted = checked - checked[:, :1]
    return shifted - jnp.mean(shifted, axis=1, keepdims=True)


def group_mean_std(rewards: ArrayLike, epsilon: float = 1e-6) -> jax.Array:
    """(R − mean) / (std + epsilon) with Bessel's standard deviation (GRPO, arXiv 2402.03300, section 4.1.2).

    Not exact: dividing by the group's own deviation changes the objective.
    """
    centered = group_mean(rewards)
    variance = jnp.sum(centered**2, axis=1, keepdims=True) / (centered.shape[1] - 1)
    return centered / (jnp.sqrt(variance) + epsilon)


def leave_one_out(rewards: ArrayLike) -> jax.Array:
    """R − mean of the group's other rewards (RLOO, arXiv 2402.14740). Exact: it does not depend on the sample."""
    centered = group_mean(rewards)
    return centered * (centered.shape[1] / (centered.shape[1] - 1))


def batch_mean(rewards: ArrayLike) -> jax.Array:
    """R − mean over the whole batch. Not exact, as the group mean: the reward part is scaled by (PG − 1) / PG."""
    checked = _rewards(rewards, 1)
    shifted = checked - checked[:1, :1]
    return shifted - jnp.mean(shifted)


def rescaled_group_mean(rewards: ArrayLike) -> jax.Array:
    """alpha·(R − mean of the group), alpha = P / (P − groups of equal rewards): GPG (arXiv 2504.02546, eq. 6 to 8).

    Not exact: alpha depends on the samples. Where every group is uniform, all zeros.
    """
    centered = group_mean(rewards)
    unequal = jnp.sum(jnp.any(centered != 0, axis=1))  # groups whose rewards differ
    return centered * (centered.shape[0] / jnp.maximum(unequal, 1)).astype(centered.dtype)


def kl_penalty(behavior_logp: ArrayLike, reference_logp: ArrayLike, mask: ArrayLike, beta: float) -> jax.Array:
    """The penalty of a KL in the reward: beta·(log behavior − log reference), 0 on invalid tokens; all [B, T]."""
    difference = promoted(behavior_logp) - promoted(reference_logp)
    return beta * jnp.where(jnp.asarray(mask).astype(bool), difference, 0)


def to_go(penalty: jax.Array) -> jax.Array:
    """Σ_{s ≥ t} of penalty [B, T], in that shape."""
    return jax.lax.cumsum(penalty, axis=1, reverse=True)


def whiten(values: jax.Array, mask: ArrayLike, epsilon: float = 1e-8) -> jax.Array:
    """(values − mean) / √(variance + epsilon) over valid entries, Bessel's variance as in verl; 0 where masked.

    Equal values get exactly zero.
    """
    valid = jnp.asarray(mask).astype(bool)
    count = jnp.sum(valid)
    shifted = jnp.where(valid, values - jnp.max(values, initial=-jnp.inf, where=valid), 0)
    centered = jnp.where(valid, shifted - jnp.sum(shifted) / jnp.maximum(count, 1), 0)
    return centered * jax.lax.rsqrt(jnp.sum(centered**2) / jnp.maximum(count - 1, 1) + epsilon)


def whitened_return(rewards: ArrayLike, penalty: jax.Array, mask: jax.Array) -> jax.Array:
    """R − Σ_{s ≥ t} penalty_s, whitened over the batch's valid tokens: REINFORCE++ (arXiv 2501.03262).

    Not exact: mean and deviation contain the sample.
    """
    returns = _rewards(rewards, 1).reshape(-1, 1) - to_go(penalty)
    return whiten(returns, mask)


def whitened_group_mean(rewards: ArrayLike, penalty: jax.Array, mask: jax.Array) -> jax.Array:
    """R − Σ penalty − mean of the group, whitened over valid tokens: REINFORCE++-Baseline (arXiv 2501.03262)."""
    centered = group_mean(penalized(rewards, penalty))
    return whiten(jnp.broadcast_to(centered.reshape(-1, 1), mask.shape), mask)


def begins_turn(mask: ArrayLike) -> jax.Array:
    """bool[B, T], where a turn of the policy begins: a token that is trained after one that is not."""
    valid = jnp.asarray(mask).astype(bool)
    return valid & ~jnp.pad(valid, ((0, 0), (1, 0)))[:, :-1]


def turn_return(
    rewards: ArrayLike, penalty: jax.Array, mask: jax.Array, turn_reward: ArrayLike | None = None,
    epsilon: float = 1e-6,
) -> jax.Array:  # fmt: skip
    """(return to go of a token's turn − mean) / (std + epsilon), over all turns of the group's responses.

    The return to go of a turn is its own reward, those of later turns, and what of the response's reward no turn has; a
    token's penalties are taken off from it on. Not exact, as `group_mean_std`, which it is for responses of one turn.

    Args:
      turn_reward: [P, G, K], the rewards of the first K turns of each response; None: no turn has one.
    """
    total = _rewards(rewards, 2)
    first, valid = begins_turn(mask), jnp.asarray(mask).astype(bool)
    each = jnp.zeros((*total.shape, 1), total.dtype) if turn_reward is None else jnp.asarray(turn_reward, total.dtype)
    later = jnp.cumsum(each[..., ::-1], axis=-1)[..., ::-1].reshape(total.size, -1)  # [P·G, K]
    turn = jnp.cumsum(first, axis=1) - 1  # [P·G, T], the turn of each token
    of_turn = jnp.take_along_axis(later, turn, axis=1, mode="fill", fill_value=0)
    returns = (total - jnp.sum(each, -1)).reshape(-1, 1) + of_turn - to_go(penalty)
    by_group = (total.shape[0], -1)
    starts, values = first.reshape(by_group), returns.reshape(by_group)  # [P, G·T]
    count = jnp.sum(starts, axis=1, keepdims=True)
    one = jnp.take_along_axis(values, jnp.argmax(starts, axis=1, keepdims=True), axis=1)  # so that equal ones get 0
    shifted = jnp.where(starts, values - one, 0)
    mean = jnp.sum(shifted, axis=1, keepdims=True) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.where(starts, shifted - mean, 0) ** 2, axis=1, keepdims=True) / jnp.maximum(count - 1, 1)
    advantage = (values - one - mean) / (jnp.sqrt(variance) + epsilon)
    return jnp.where(valid, advantage.reshape(valid.shape), 0)


def penalized(rewards: ArrayLike, penalty: jax.Array) -> jax.Array:
    """Rewards [P, G] minus each response's summed penalty, of penalty [P·G, T]."""
    return jnp.asarray(rewards) - jnp.sum(penalty, axis=1).reshape(jnp.shape(rewards))


def _of_responses(function: Callable[[jax.Array], jax.Array]) -> Advantage:
    """A function of rewards alone, applied to each response's reward minus its summed penalty."""

    def advantage(rewards, penalty, mask):
        del mask
        return function(penalized(rewards, penalty)).reshape(-1, 1)

    return advantage


OF_REWARDS = (group_mean, group_mean_std, leave_one_out, batch_mean, rescaled_group_mean)
ADVANTAGES: dict[str, Advantage] = {function.__name__: _of_responses(function) for function in OF_REWARDS}
ADVANTAGES |= {function.__name__: function for function in (turn_return, whitened_group_mean, whitened_return)}
