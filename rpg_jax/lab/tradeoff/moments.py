"""The first two moments of a loss's gradient, summed over every sequence, at policies a given KL from the behavior.

One sample is one sequence x of the behavior policy mu, and its gradient is f = Σ_t g_t ∇log policy_t with g = dL/dlogp.
With m = E_mu[f]: the bias of any average of samples is m + ∇J, and the variance of an average of N is
(E_mu|f|² − |m|²) / N (docs/method.md 8). Gradients are in the policy's table of logits, and norms are of all of it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.exact import targets
from rpg_jax.exact.enumeration import Problem, Space, kl, move_to, token_logprobs

DIRECTIONS = ("uphill", "random", "downhill")  # from the behavior policy along +∇E[R], anywhere, along −∇E[R]
CHUNK = 1 << 20  # token gradients at once


class Situations(NamedTuple):
    """Every problem at every distance in every direction; S counts [distances, DIRECTIONS, problems] row-major."""

    space: Space
    shape: tuple  # (distances, directions, problems)
    problem: Problem  # leading axis S; the reference is the behavior policy
    kl_back: jax.Array  # f64[S], KL(policy || behavior)


class Moments(NamedTuple):
    """Of one loss in every situation, each f64[distances, directions, problems]; gaps and norms are squared."""

    bias: np.ndarray  # |m + ∇J|², J of the loss's own level
    sequence_bias: np.ndarray  # against the sequence-level J
    variance: np.ndarray  # of one sample, the trace of the covariance
    size: np.ndarray  # |∇J|²
    sequence_size: np.ndarray
    cosine: np.ndarray  # between −m and ∇J
    scale: np.ndarray  # the s that brings s·m nearest to −∇J
    dead: np.ndarray  # share of mu's tokens that give no gradient
    effective: np.ndarray  # 1 / E_mu[w²] of what the level weights: tokens, or sequences


def situations(space: Space, count: int, distances, seed: int = 0) -> Situations:
    """Random behavior policies with rewards ±1, half and half, moved until KL(behavior || policy) is each distance.

    Logits are standard normal; advantages are R − E_mu[R], one a sequence: an exact baseline.
    """
    rng = np.random.default_rng(seed)
    behavior, anywhere = rng.normal(size=(2, count, space.histories, space.vocab))
    half = np.where(np.arange(len(space.mask)) % 2, 1.0, -1.0)
    reward = jnp.asarray(np.stack([rng.permutation(half) for _ in range(count)]))

    @jax.jit
    def prepare(behavior, reward):  # advantages [P, N, T] and the reward's ascent [P, H, V]
        probability = jax.vmap(lambda x: jnp.exp(token_logprobs(space, x).sum(axis=1)))(behavior)
        advantage = reward - jnp.sum(probability * reward, axis=1, keepdims=True)
        advantage = jnp.broadcast_to(advantage[:, :, None], (count, *space.mask.shape))
        problem = Problem(behavior, behavior, behavior, advantage)
        gain = jax.grad(lambda x, p: targets.sequence_parts(space, x, p, 1.0, ())["reward"])
        return problem, jax.vmap(gain)(behavior, problem)

    problem, ascent = prepare(behavior, reward)
    directions = jnp.stack([ascent, anywhere, -ascent])

    shape = (len(distances), len(DIRECTIONS), count)

    def spread(x):  # [P, ...] -> [S, ...]
        return jnp.broadcast_to(x, (*shape[:2], *x.shape)).reshape(-1, *x.shape[1:])

    directions = jnp.broadcast_to(directions, (len(distances), *directions.shape)).reshape(-1, *behavior.shape[1:])
    problem = jax.tree.map(spread, problem)
    far = jnp.repeat(jnp.asarray(distances, jnp.float64), shape[1] * shape[2])
    move = functools.partial(move_to, space)
    policy = jax.jit(jax.vmap(move))(problem.behavior, directions, far)
    back = jax.jit(jax.vmap(functools.partial(kl, space)))(policy, problem.behavior)
    return Situations(space, shape, problem._replace(policy=policy), back)


@functools.partial(jax.jit, static_argnames=("space", "level", "divergence", "z"))
def exact_gradients(space: Space, problem: Problem, level: str, divergence: str, z: float = 1.0):
    """∇ of the reward part and of the divergence, each [S, H, V]: ∇J = reward − beta·divergence."""

    def one(problem):
        gradient = jax.jacrev(lambda x: targets.PARTS[level](space, x, problem, z, (divergence,)))(problem.policy)
        return gradient["reward"], gradient[divergence]

    return in_chunks(one, problem, space.mask.size)


def in_chunks(function, arguments, size: int):
    """jax.vmap(function) over the leading axis of a tree, as many at once as make CHUNK if each has `size` numbers.

    A divisor of the axis, for a rest would be compiled a second time.
    """
    count = len(jax.tree.leaves(arguments)[0])
    batch = next(n for n in range(max(1, min(count, CHUNK // size)), 0, -1) if count % n == 0)
    chunks = jax.tree.map(lambda x: x.reshape(-1, batch, *x.shape[1:]), arguments)
    results = jax.lax.map(jax.vmap(function), chunks)
    return jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), results)


def measurer(situations: Situations, build, level: str, divergence: str, z: float = 1.0):
    """(settings, beta) -> `Moments`, compiled once for every value of the settings.

    Args:
      build: settings (a dict of numbers, traced) -> an objective with the contract of `rpg_jax.objectives`.
      level, divergence, z: of the objective J that it is held against; its beta is an argument of the result.
    """
    space, problem = situations.space, situations.problem
    own = exact_gradients(space, problem, level, divergence, z)
    whole = exact_gradients(space, problem, "sequence", divergence, z)

    @jax.jit
    def run(settings, beta, problem, own, whole):
        objective = build(settings)

        def one(arguments):
            problem, own, whole = arguments
            coefficient = coefficients(objective, space, problem)
            return _moments(space, level, problem, coefficient, own[0] - beta * own[1], whole[0] - beta * whole[1])

        return in_chunks(one, (problem, own, whole), space.mask.size)

    def measure(settings, beta) -> Moments:
        moments = jax.device_get(run(settings, beta, problem, own, whole))
        return Moments(*(x.reshape(situations.shape) for x in moments))

    return measure


def with_settings(objective, settings: dict):
    """An objective of `make` with other numbers (beta, clip_low, clip_high, clip_c), which may be traced."""
    return dataclasses.replace(objective, surrogate=functools.partial(objective.surrogate, **settings))


def coefficients(objective, space: Space, problem: Problem):
    """dL/dlogp [N, T] of one problem; each sequence is a batch of its own, [1, T], with denominator=1."""

    def loss(*row):
        logp, behavior, reference, advantage, mask = (x[None] for x in row)
        return objective(logp, behavior, advantage, mask, reference_logp=reference, denominator=1.0)[0]

    logs = (token_logprobs(space, x) for x in problem[:3])
    return jax.vmap(jax.grad(loss))(*logs, problem.advantage, jnp.asarray(space.mask))


def steepness(space: Space, policy):
    """|∇log p(token)|² [N, T] for logits [H, V].

    A sequence's tokens follow different histories, hence different rows: a sum's squared norm is the sum of theirs.
    """
    p = jax.nn.softmax(policy)
    return (1 - 2 * p + jnp.sum(p**2, axis=1, keepdims=True))[space.history, space.token]


def _moments(space: Space, level, problem: Problem, coefficient, own, whole) -> Moments:
    """Of one problem; coefficient [N, T], own and whole [H, V] the exact gradients."""
    behavior = token_logprobs(space, problem.behavior)
    logp, pull_back = jax.vjp(functools.partial(token_logprobs, space), problem.policy)
    probability = jnp.exp(jnp.sum(behavior, axis=1, keepdims=True))
    (mean,) = pull_back(probability * coefficient)
    second = jnp.sum(probability * jnp.where(space.mask, coefficient**2 * steepness(space, problem.policy), 0))
    tokens = probability * space.mask
    if level == "token":
        squared = jnp.sum(tokens * jnp.exp(2 * (logp - behavior))) / jnp.sum(tokens)
    else:
        squared = jnp.sum(probability[:, 0] * jnp.exp(2 * jnp.sum(logp - behavior, axis=1)))
    product, square = -jnp.sum(mean * own), jnp.sum(mean**2)
    return Moments(
        bias=jnp.sum((mean + own) ** 2),
        sequence_bias=jnp.sum((mean + whole) ** 2),
        variance=jnp.maximum(second - square, 0),
        size=jnp.sum(own**2),
        sequence_size=jnp.sum(whole**2),
        cosine=product / jnp.sqrt(square * jnp.sum(own**2)),
        scale=product / square,
        dead=jnp.sum(tokens * (coefficient == 0)) / jnp.sum(tokens),
        effective=1 / squared,
    )
