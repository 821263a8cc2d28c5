"""Exact moments for advantages taken from a group of G draws, which couple its samples.

Rewards are ±1 and all sequences have one length, so an advantage depends only on k, the number of draws of its group
that won. Groups are therefore enumerated by k with binomial probabilities, where one group is the whole batch. Dynamic
sampling draws until the rewards of a group are not all equal. GPG divides by the share of such groups in a batch; here
that share is its limit for many groups.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, xlog1py, xlogy

from rpg_jax.exact.enumeration import Problem, Space, token_logprobs
from rpg_jax.lab.tradeoff.moments import Situations, exact_gradients, in_chunks, score_norms_squared, with_settings
from rpg_jax.objectives import make
from rpg_jax.objectives.advantages import ADVANTAGES

RESCALED = "rescaled_group_mean"  # GPG's


class GroupMoments(NamedTuple):
    """Each f64[distances, directions, problems]; m = E[mean gradient of the group], J that of the token level."""

    bias_squared: np.ndarray  # |m + ∇J|² / |∇J|²
    variance: np.ndarray  # of one sample's worth, G times that of a group, over |∇J|²
    cosine: np.ndarray  # between −m and ∇J
    scale: np.ndarray  # the s that brings s·m nearest to −∇J
    residual: np.ndarray  # |s·m + ∇J| / |∇J|


def measure_groups(
    situations: Situations, group: int, betas: Sequence[float]
) -> dict[tuple[str, bool, float], GroupMoments]:
    """(advantage, dynamic sampling, beta) -> moments, for every name of `ADVANTAGES`; unclipped `urkl`, token level."""
    space = situations.space
    reward, divergence = exact_gradients(space, situations.problem, "token", "urkl")
    losses = {name: make("rpg", advantage=name, reduction="constant", beta=1.0) for name in ADVANTAGES}

    @jax.jit
    def run(beta, problem, reward, divergence):
        objectives = {name: with_settings(loss, {"beta": beta}) for name, loss in losses.items()}

        def of_problem(arguments):
            problem, reward, divergence = arguments
            return _moments(space, group, objectives, problem, reward - beta * divergence)

        return in_chunks(of_problem, (problem, reward, divergence), (group + 1) * space.mask.size)

    results = {}
    for beta in betas:
        moments = jax.device_get(run(beta, situations.problem, reward, divergence))
        for (name, dynamic), values in moments.items():
            results[name, dynamic, beta] = GroupMoments(*(x.reshape(situations.shape) for x in values))
    return results


def _moments(space: Space, group: int, objectives: dict, problem: Problem, gradient) -> dict:
    """Of one problem, (advantage, dynamic sampling) -> `GroupMoments`; gradient [H, V] is ∇J.

    Axes: k of [group + 1] counts the draws that won, N sequences, T tokens; G is `group`. Indices a, b, c are 1 for a
    draw that won and 0 for one that did not.
    """
    won = problem.advantage[:, 0] > 0  # [N]; R is ±1 and the advantage is R − E[R]
    behavior = token_logprobs(space, problem.behavior)  # [N, T]
    logp, pull_back = jax.vjp(lambda x: token_logprobs(space, x), problem.policy)
    probability = jnp.exp(jnp.sum(behavior, axis=1))  # [N]
    win_rate = jnp.sum(jnp.where(won, probability, 0))
    norms = score_norms_squared(space, problem.policy)  # [N, T]
    rewards = jnp.where(jnp.arange(group) < jnp.arange(group + 1)[:, None], 1.0, -1.0)  # [k, G], winners first
    # Probability of each k given the result c of one draw, or given that a + b of two draws won: [k] each.
    others, others_of_two = _binomial(group - 1, win_rate), _binomial(group - 2, win_rate)
    given_one = [jnp.pad(others, (c, 1 - c)) for c in (0, 1)]
    given_two = [jnp.pad(others_of_two, (wins, 2 - wins)) for wins in (0, 1, 2)]
    mixed = (jnp.arange(group + 1) % group > 0).astype(logp.dtype)  # [k], 1 unless all rewards are equal
    mixed_share = jnp.sum(_binomial(group, win_rate) * mixed)

    def gradients(objective, factor):
        """Probability-weighted gradient sums given k of sequences that lost and won [2, k, H, V]; |f|² [k, N]."""
        flat = jnp.zeros((group, space.mask.shape[1]))  # zero logps, and a mask of ones [G, T]
        by_draw = jax.vmap(lambda r: objective.advantages(r[None], flat, flat, flat + 1))(rewards)  # [k, G, 1 or T]
        # [k, N]: the first draw of a group won and the last lost, unless there is none (k = 0 or G), of probability 0.
        advantage = factor * jnp.where(won, by_draw[:, :1, 0], by_draw[:, -1:, 0])

        def coefficient(a):  # [N] -> dL/dlogp [N, T]
            return jax.grad(lambda x: objective(x, behavior, a[:, None], space.mask, denominator=1.0)[0])(logp)

        each = jax.vmap(coefficient)(advantage)  # [k, N, T]
        parts = [jnp.where(won == bool(c), probability, 0)[:, None] * each for c in (0, 1)]
        return jnp.stack([jax.vmap(pull_back)(part)[0] for part in parts]), jnp.sum(each**2 * norms, axis=2)

    def moments(sums, squares, accepted):  # [2, k, H, V], [k, N], [k]: 1 over the share of accepted groups, or 0
        mean = sum(jnp.tensordot(accepted * given_one[c], sums[c], 1) for c in (0, 1))  # [H, V]
        own = jnp.where(won, given_one[1][:, None], given_one[0][:, None]) * probability * squares  # [k, N]
        products = jnp.einsum("akhv,bkhv->abk", sums, sums)
        pairs = sum(given_two[a + b] * products[a, b] for a in (0, 1) for b in (0, 1))  # [k]
        second = jnp.sum(accepted * (jnp.sum(own, axis=1) + (group - 1) * pairs)) / group
        return _group_moments(mean, second, group, gradient)

    results = {}
    for name, objective in objectives.items():
        plain = gradients(objective, 1.0)
        rescaled = gradients(objective, 1 / mixed_share) if name == RESCALED else plain
        results[name, False] = moments(*rescaled, jnp.ones_like(mixed))
        results[name, True] = moments(*plain, mixed / mixed_share)
    return results


def _binomial(draws: int, win_rate):
    """The probability of 0 … draws wins, [draws + 1]."""
    k = jnp.arange(draws + 1.0)
    log_ways = gammaln(draws + 1.0) - gammaln(k + 1) - gammaln(draws - k + 1)
    return jnp.exp(log_ways + xlogy(k, win_rate) + xlog1py(draws - k, -win_rate))


def _group_moments(mean, second, group: int, gradient) -> GroupMoments:
    """mean, gradient [H, V]; second = E|mean gradient of a group|²."""
    size, square, product = jnp.sum(gradient**2), jnp.sum(mean**2), -jnp.sum(mean * gradient)
    scale = product / square
    return GroupMoments(
        bias_squared=jnp.sum((mean + gradient) ** 2) / size,
        variance=group * jnp.maximum(second - square, 0) / size,
        cosine=product / jnp.sqrt(square * size),
        scale=scale,
        residual=jnp.linalg.norm(scale * mean + gradient) / jnp.sqrt(size),
    )
