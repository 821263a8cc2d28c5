"""Advantages taken from a group of G draws, which couple its samples: exact moments over every group there can be.

Rewards are ±1 and sequences of one length, so that an advantage depends on how many of the draws won alone: groups are
enumerated by that number, and those beside a draw by binomial probabilities. One group is the whole batch. Dynamic
sampling draws until the rewards of a group are not all equal. GPG's factor alone is of many groups: it is its limit,
one over the share of groups that are not uniform.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, xlog1py, xlogy

from rpg_jax.exact.enumeration import Space, token_logprobs
from rpg_jax.lab.tradeoff.moments import Situations, exact_gradients, in_chunks, steepness, with_settings
from rpg_jax.objectives import make
from rpg_jax.objectives.advantages import ADVANTAGES

RESCALED = "rescaled_group_mean"  # GPG's


class GroupMoments(NamedTuple):
    """Each f64[distances, directions, problems]; a gradient m = E[mean over the group], ∇J that of the token level."""

    bias: np.ndarray  # |m + ∇J|² / |∇J|²
    variance: np.ndarray  # of one sample's worth, G · that of a group, over |∇J|²
    cosine: np.ndarray  # between −m and ∇J
    scale: np.ndarray  # the s that brings s·m nearest to −∇J
    residual: np.ndarray  # |s·m + ∇J| / |∇J|


def measure_groups(situations: Situations, group: int, betas) -> dict[tuple[str, bool, float], GroupMoments]:
    """(advantage, dynamic sampling, beta) -> moments, for every name of `ADVANTAGES`; unclipped `urkl`, token level."""
    space = situations.space
    reward, divergence = exact_gradients(space, situations.problem, "token", "urkl")
    losses = {name: make("rpg", advantage=name, reduction="constant", beta=1.0) for name in ADVANTAGES}

    @jax.jit
    def run(beta, problem, reward, divergence):
        def one(arguments):
            problem, reward, divergence = arguments
            target = reward - beta * divergence
            objectives = {name: with_settings(loss, {"beta": beta}) for name, loss in losses.items()}
            return _moments(space, group, objectives, problem, target)

        return in_chunks(one, (problem, reward, divergence), (group + 1) * space.mask.size)

    results = {}
    for beta in betas:
        moments = jax.device_get(run(beta, situations.problem, reward, divergence))
        for (name, dynamic), values in moments.items():
            results[name, dynamic, beta] = GroupMoments(*(x.reshape(situations.shape) for x in values))
    return results


def _moments(space: Space, group: int, objectives: dict, problem, target) -> dict:
    """Of one problem, (name, dynamic sampling) -> `GroupMoments`; target [H, V] is ∇J. k counts the draws that won."""
    won = problem.advantage[:, 0] > 0  # R = ±1, of which the advantage is R − E[R]
    behavior = token_logprobs(space, problem.behavior)
    logp, pull_back = jax.vjp(lambda x: token_logprobs(space, x), problem.policy)
    probability = jnp.exp(jnp.sum(behavior, axis=1))
    wins = jnp.sum(jnp.where(won, probability, 0))
    steep = steepness(space, problem.policy)
    rewards = jnp.where(jnp.arange(group) < jnp.arange(group + 1)[:, None], 1.0, -1.0)  # [k, G]
    alone, pair = _chances(group - 1, wins), _chances(group - 2, wins)
    # The chance of k wins in all beside one draw that won or not, or beside two of which so many won: [k] each.
    beside = [jnp.pad(alone, (c, 1 - c)) for c in (0, 1)]
    beside_two = [jnp.pad(pair, (c, 2 - c)) for c in (0, 1, 2)]
    tells = (jnp.arange(group + 1) % group > 0).astype(logp.dtype)
    share = jnp.sum(_chances(group, wins) * tells)

    def gradients(objective, factor):
        """Mean gradients of what won and what did not, given k, weighted by probability [2, k, H, V]; |f|² [k, N]."""
        flat = jnp.zeros((group, space.mask.shape[1]))
        found = jax.vmap(lambda r: objective.advantages(r[None], flat, flat, flat + 1))(rewards)  # [k, G, 1 or T]
        advantage = factor * jnp.where(won, found[:, :1, 0], found[:, -1:, 0])  # [k, N]; of wins at k = 0 never used

        def coefficient(a):  # [N] -> dL/dlogp [N, T]
            return jax.grad(lambda x: objective(x, behavior, a[:, None], space.mask, denominator=1.0)[0])(logp)

        each = jax.vmap(coefficient)(advantage)
        parts = [jnp.where(won == bool(c), probability, 0)[:, None] * each for c in (0, 1)]
        return jnp.stack([jax.vmap(pull_back)(part)[0] for part in parts]), jnp.sum(each**2 * steep, axis=2)

    def moments(found, accepted):  # accepted: [k], 1 over the share of groups that are, or 0
        means, squares = found
        mean = sum(jnp.tensordot(accepted * beside[c], means[c], 1) for c in (0, 1))
        own = jnp.where(won, beside[1][:, None], beside[0][:, None]) * probability * squares
        products = jnp.einsum("akhv,bkhv->abk", means, means)
        pairs = sum(beside_two[a + b] * products[a, b] for a in (0, 1) for b in (0, 1))
        second = jnp.sum(accepted * (jnp.sum(own, axis=1) + (group - 1) * pairs)) / group
        return _group_moments(mean, second, group, target)

    results = {}
    for name, objective in objectives.items():
        plain = gradients(objective, 1.0)
        every = gradients(objective, 1 / share) if name == RESCALED else plain
        results[name, False] = moments(every, jnp.ones_like(tells))
        results[name, True] = moments(plain, tells / share)
    return results


def _chances(draws: int, wins):
    """The probability of 0 … draws wins, each of probability `wins`."""
    k = jnp.arange(draws + 1.0)
    ways = gammaln(draws + 1.0) - gammaln(k + 1) - gammaln(draws - k + 1)
    return jnp.exp(ways + xlogy(k, wins) + xlog1py(draws - k, -wins))


def _group_moments(mean, second, group, target) -> GroupMoments:
    size, square, product = jnp.sum(target**2), jnp.sum(mean**2), -jnp.sum(mean * target)
    scale = product / square
    return GroupMoments(
        bias=jnp.sum((mean + target) ** 2) / size,
        variance=group * jnp.maximum(second - square, 0) / size,
        cosine=product / jnp.sqrt(square * size),
        scale=scale,
        residual=jnp.linalg.norm(scale * mean + target) / jnp.sqrt(size),
    )
