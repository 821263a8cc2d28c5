"""Gradients of single responses, and the moments from which bias and variance of every batch follow.

A batch is P prompts drawn at random with G responses each; its gradient is the mean of P independent gradients of
groups. So its expectation is that of one group, and its variance that of one group over P.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from oracle import task
from oracle.estimators import ESTIMATORS, SIGNS, every_coefficient
from oracle.policies import logprobs
from rpg_jax.models import Model
from rpg_jax.objectives.advantages import leave_one_out
from rpg_jax.types import Params

ROWS, TOKENS = 128, 8192  # responses, and their tokens, whose own gradients are in memory at a time


class Stale(NamedTuple):
    """What one block of stale responses gives; D parameters."""

    mean: dict[int, np.ndarray]  # group size -> f64[estimators, D], of the gradients of its groups
    square: dict[int, np.ndarray]  # group size -> f64[estimators], the mean of their squared norms
    log_ratio: np.ndarray  # f32[responses, T], log policy − log behavior of each token


@partial(jax.jit, static_argnums=(0, 3))
def fresh_gradient(model: Model, params: Params, tokens: jax.Array, samples: int) -> jax.Array:
    """The gradient of the expected reward from responses of the current policy, f32[D].

    With p_t the probability of the right token given those before, the reward is the mean of p_t in expectation, and

        T · ∇J = E Σ_t (∇p_t + ∇log policy_t · Σ_{s > t} (p_s − b_s))

    for every b_s that does not depend on the response; here the mean over the prompt's other responses. That is the
    policy gradient with each token's reward replaced by its expectation, which takes most of its noise away.

    Args:
      tokens: i32[P · samples, PROMPT + T], `samples` responses to each prompt, prompt after prompt.
    """

    def surrogate(params):
        logp, right = logprobs(model, params, tokens)
        right = jnp.exp(right)  # [P · samples, T]
        columns = right.T.reshape(-1, samples)  # [T · P, samples]
        surplus = leave_one_out(columns).reshape(right.T.shape).T
        later = jax.lax.cumsum(surplus, axis=1, reverse=True) - surplus
        return jnp.mean(right + jax.lax.stop_gradient(later) * logp)

    return ravel_pytree(jax.grad(surrogate)(params))[0]


def fresh_block(model: Model, params: Params, tokens: jax.Array, samples: int) -> np.ndarray:
    """`fresh_gradient` of any number of responses, a few prompts at a time, f64[D]."""
    rows = samples * max(1, TOKENS // (samples * tokens.shape[1]))
    parts = [(tokens[i : i + rows], min(rows, len(tokens) - i)) for i in range(0, len(tokens), rows)]
    total = sum(count * np.asarray(fresh_gradient(model, params, part, samples), np.float64) for part, count in parts)
    return total / len(tokens)


@partial(jax.jit, static_argnums=(0, 4, 5))
def group_gradients(
    model: Model, params: Params, tokens: jax.Array, behavior_logp: jax.Array, samples: int, sizes: tuple[int, ...]
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """For each group size, sums over groups of their gradients [estimators, D] and squared norms [estimators].

    And the log ratio of each token, f32[B, T]. Advantages are rewards without the mean of the group's others.

    Args:
      tokens: i32[B, PROMPT + T], `samples` stale responses to each prompt; behavior_logp: f32[B, T].
    """
    flat, unravel = ravel_pytree(params)
    logp = logprobs(model, params, tokens)[0]
    given = every_coefficient(logp, behavior_logp)
    stacked = jnp.stack(list(given.cotangents.values()), axis=1)  # [B, K, T]

    def of_response(row, cotangents):  # [PROMPT + T], [K, T] -> [K, D]
        pullback = jax.vjp(lambda flat: logprobs(model, unravel(flat), row[None])[0][0], flat)[1]
        return jax.vmap(lambda cotangent: pullback(cotangent)[0])(cotangents)

    # One response after the other, so that all of its cotangents share one product with each weight.
    gradients = jax.lax.map(lambda pair: of_response(*pair), (tokens, stacked))  # [B, K, D]
    # Which of the K gradients, times what, is that of an estimator at a positive or negative advantage: [E, B, K].
    places = {key: place for place, key in enumerate(given.cotangents)}

    def chosen(sign):
        rows = []
        for name, estimator in ESTIMATORS.items():
            own = sign if estimator.signed else 0.0
            place = places[(name, own) if estimator.like is None else (estimator.like, 0.0)]
            rows.append(given.multiples[name, own][:, None] * jax.nn.one_hot(place, len(places)))
        return jnp.stack(rows)

    by_sign, reward, sums = {sign: chosen(sign) for sign in SIGNS}, task.rewards(tokens), []
    for size in sizes:
        advantage = leave_one_out(reward.reshape(-1, size)).reshape(-1)
        weight = jnp.where((advantage >= 0)[:, None], by_sign[1.0], by_sign[-1.0]) * advantage[:, None]  # [E, B, K]
        weight = weight.reshape(len(weight), -1, size * len(places)).swapaxes(0, 1)  # [groups, E, size · K]
        groups = weight @ gradients.reshape(-1, size * len(places), flat.size) / size  # [groups, E, D]
        sums.append((jnp.sum(groups, 0), jnp.sum(groups**2, (0, 2))))
    return sums, logp - behavior_logp


def stale_block(
    model: Model, params: Params, tokens: jax.Array, behavior_logp: jax.Array, samples: int, sizes: tuple[int, ...]
) -> Stale:
    """The moments of one block of stale responses, a few prompts at a time; arguments as in `group_gradients`."""
    rows = samples * max(1, min(ROWS, TOKENS // behavior_logp.shape[1]) // samples)
    mean, square, log_ratios = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0.0), []
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        sums, log_ratio = group_gradients(model, params, tokens[part], behavior_logp[part], samples, sizes)
        for size, (total, squares) in zip(sizes, sums, strict=True):
            mean[size] += np.asarray(total, np.float64) * size / len(tokens)
            square[size] += np.asarray(squares, np.float64) * size / len(tokens)
        log_ratios.append(np.asarray(log_ratio))
    return Stale(mean, square, np.concatenate(log_ratios))
