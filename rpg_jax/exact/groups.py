"""Advantages taken from a group of G draws, which couple its samples: moments over every group there can be.

Groups are counted as multisets, with their multinomial probabilities. One group is the whole batch. Dynamic sampling
draws until the rewards of a group are not all equal. GPG's factor alone is of many groups: it is its limit, one over
the share of groups that are not uniform.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.exact.enumeration import Space, token_logprobs
from rpg_jax.exact.moments import Situations, exact_gradients, in_chunks, with_settings
from rpg_jax.objectives import make
from rpg_jax.objectives.advantages import ADVANTAGES

# What groups are enumerated over; the limits of a grid count it.
VOCAB, LENGTH = 2, 3
RESCALED = "rescaled_group_mean"  # GPG's


class GroupMoments(NamedTuple):
    """Each f64[distances, directions, problems]; a gradient m = E[mean over the group], ∇J that of the token level."""

    bias: np.ndarray  # |m + ∇J|² / |∇J|²
    variance: np.ndarray  # of one sample's worth, G · that of a group, over |∇J|²
    cosine: np.ndarray  # between −m and ∇J
    scale: np.ndarray  # the s that brings s·m nearest to −∇J
    residual: np.ndarray  # |s·m + ∇J| / |∇J|


def group_count(group: int) -> int:
    """Multisets of that many of the VOCAB ** LENGTH sequences."""
    return math.comb(VOCAB**LENGTH + group - 1, group)


def every_group(outcomes: int, group: int):
    """Multisets i32[K, G] of outcomes, and how many orders of drawing each has, f64[K]."""
    members = np.array(list(itertools.combinations_with_replacement(range(outcomes), group)), np.int32)
    repeats = (members[:, :, None] == np.arange(outcomes)).sum(axis=1)
    factorial = np.array([math.factorial(n) for n in range(group + 1)], np.float64)
    return members, factorial[group] / factorial[repeats].prod(axis=1)


def measure_groups(situations: Situations, group: int, betas) -> dict[tuple[str, bool, float], GroupMoments]:
    """(advantage, dynamic sampling, beta) -> moments, for every name of `ADVANTAGES`; unclipped `urkl`, token level."""
    space = situations.space
    members, orders = every_group(len(space.mask), group)
    reward, divergence = exact_gradients(space, situations.problem, "token", "urkl")
    losses = {name: make("rpg", advantage=name, reduction="constant", beta=1.0) for name in ADVANTAGES}

    @jax.jit
    def run(beta, problem, reward, divergence):
        def one(arguments):
            problem, reward, divergence = arguments
            target = reward - beta * divergence
            objectives = {name: with_settings(loss, {"beta": beta}) for name, loss in losses.items()}
            return _moments(space, members, orders, objectives, problem, target)

        return in_chunks(one, (problem, reward, divergence), members.size * space.mask.shape[1])

    results = {}
    for beta in betas:
        moments = jax.device_get(run(beta, situations.problem, reward, divergence))
        for (name, dynamic), values in moments.items():
            results[name, dynamic, beta] = GroupMoments(*(x.reshape(situations.shape) for x in values))
    return results


def _moments(space: Space, members, orders, objectives: dict, problem, target) -> dict:
    """Of one problem, (name, dynamic sampling) -> `GroupMoments`; target [H, V] is ∇J."""
    group, mask = members.shape[1], jnp.asarray(space.mask)
    rewards = jnp.sign(problem.advantage[:, 0])  # R = ±1, of which the advantage is R − E[R]
    behavior = token_logprobs(space, problem.behavior)
    logp = token_logprobs(space, problem.policy)
    score = jax.jacrev(lambda x: token_logprobs(space, x))(problem.policy)  # [N, T, H, V]
    whose = jax.nn.one_hot(members, len(mask), dtype=logp.dtype)  # [K, G, N]
    probability = orders * jnp.exp(jnp.sum(jnp.sum(behavior, axis=1)[members], axis=1))
    telling = probability * jnp.any(rewards[members] != rewards[members[:, :1]], axis=1)
    share = jnp.sum(telling)

    def gradients(objective, factor):  # [K, H, V], of every group
        def coefficient(row):  # i32[G] -> dL/dlogp [G, T]
            advantage = factor * objective.advantages(rewards[row][None], behavior[row], behavior[row], mask[row])
            constants = (behavior[row], advantage, mask[row])
            return jax.grad(lambda x: objective(x, *constants, denominator=float(group))[0])(logp[row])

        return jnp.tensordot(jnp.einsum("kgt,kgn->knt", jax.vmap(coefficient)(members), whose), score, 2)

    results = {}
    for name, objective in objectives.items():
        plain = gradients(objective, 1.0)
        every = gradients(objective, 1 / share) if name == RESCALED else plain
        results[name, False] = _group_moments(every, probability, group, target)
        results[name, True] = _group_moments(plain, telling / share, group, target)
    return results


def _group_moments(gradients, probability, group, target) -> GroupMoments:
    mean = jnp.tensordot(probability, gradients, 1)
    second = jnp.sum(probability * jnp.sum(gradients**2, axis=(1, 2)))
    size, square, product = jnp.sum(target**2), jnp.sum(mean**2), -jnp.sum(mean * target)
    scale = product / square
    return GroupMoments(
        bias=jnp.sum((mean + target) ** 2) / size,
        variance=group * jnp.maximum(second - square, 0) / size,
        cosine=product / jnp.sqrt(square * size),
        scale=scale,
        residual=jnp.linalg.norm(scale * mean + target) / jnp.sqrt(size),
    )
