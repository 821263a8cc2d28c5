"""The first two moments of a loss's gradient, summed over every sequence, at policies a given KL from the behavior.

One sample is one sequence x of the behavior policy mu, and its gradient is f = Σ_t g_t ∇log policy_t with g = dL/dlogp.
With m = E_mu[f], an average of any number of samples has the bias m + ∇J, and an average of N samples has the variance
(E_mu|f|² − |m|²) / N (docs/method.md 8). Gradients are taken in the policy's table of logits [H, V], norms over all
of it. Shapes: S situations, P problems, N sequences, T tokens, H histories, V tokens to choose from.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.exact import targets
from rpg_jax.exact.enumeration import Problem, Space, kl, move_to, token_logprobs
from rpg_jax.objectives import Objective

DIRECTIONS = ("uphill", "random", "downhill")  # from the behavior policy along +∇E[R], anywhere, along −∇E[R]
CHUNK = 1 << 20  # token gradients at once


class Situations(NamedTuple):
    """Every problem at every distance in every direction; S counts [distances, DIRECTIONS, problems] row-major."""

    space: Space
    shape: tuple[int, int, int]  # (distances, directions, problems)
    problem: Problem  # leading axis S; the reference is the behavior policy
    kl_back: jax.Array  # f64[S], KL(policy || behavior)


class Moments(NamedTuple):
    """Of one loss in every situation, each f64[distances, directions, problems]; J is that of the loss's own level."""

    bias_squared: np.ndarray  # |m + ∇J|²
    sequence_bias_squared: np.ndarray  # the same against the sequence-level J
    variance: np.ndarray  # of one sample, the trace of the covariance
    gradient_squared: np.ndarray  # |∇J|²
    sequence_gradient_squared: np.ndarray  # of the sequence-level J
    cosine: np.ndarray  # between −m and ∇J
    best_scale: np.ndarray  # the s that brings s·m nearest to −∇J
    dead_mass: np.ndarray  # share of mu's tokens that give no gradient
    effective_sample_size: np.ndarray  # 1 / E_mu[w²] of what the level weights: tokens, or sequences


def situations(space: Space, count: int, distances: Sequence[float], seed: int = 0) -> Situations:
    """Random behavior policies with rewards ±1, half and half, moved until KL(behavior || policy) is each distance.

    Logits are standard normal. Advantages are R − E_mu[R], one a sequence: the baseline is exact.
    """
    rng = np.random.default_rng(seed)
    behavior, anywhere = rng.normal(size=(2, count, space.histories, space.vocab))  # [P, H, V] each
    half = np.where(np.arange(len(space.mask)) % 2, 1.0, -1.0)
    reward = jnp.asarray(np.stack([rng.permutation(half) for _ in range(count)]))  # [P, N]

    @jax.jit
    def prepare(behavior, reward):
        probability = jax.vmap(lambda x: jnp.exp(token_logprobs(space, x).sum(axis=1)))(behavior)  # [P, N]
        advantage = reward - jnp.sum(probability * reward, axis=1, keepdims=True)
        advantage = jnp.broadcast_to(advantage[:, :, None], (count, *space.mask.shape))  # [P, N, T]
        problem = Problem(behavior, behavior, behavior, advantage, behavior)
        gain = jax.grad(lambda x, p: targets.sequence_parts(space, x, p, 1.0, ())["reward"])
        return problem, jax.vmap(gain)(behavior, problem)

    problem, ascent = prepare(behavior, reward)
    shape = (len(distances), len(DIRECTIONS), count)

    def spread(x, *leading):  # repeats x along new leading axes until they are those of `shape`, then flattens them
        return jnp.broadcast_to(x, (*leading, *x.shape)).reshape(-1, *x.shape[len(shape) - len(leading) :])

    direction = spread(jnp.stack([ascent, anywhere, -ascent]), shape[0])  # [S, H, V]
    problem = jax.tree.map(lambda x: spread(x, *shape[:2]), problem)
    distance = jnp.repeat(jnp.asarray(distances, jnp.float64), shape[1] * shape[2])  # [S]
    policy = jax.jit(jax.vmap(functools.partial(move_to, space)))(problem.behavior, direction, distance)
    kl_back = jax.jit(jax.vmap(functools.partial(kl, space)))(policy, problem.behavior)
    return Situations(space, shape, problem._replace(policy=policy), kl_back)


@functools.partial(jax.jit, static_argnames=("space", "level", "divergence", "z"))
def exact_gradients(
    space: Space, problem: Problem, level: str, divergence: str, z: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """∇ of the reward part and of the divergence, each f64[S, H, V]: ∇J = reward − beta·divergence."""

    def of_problem(problem):
        gradient = jax.jacrev(lambda x: targets.PARTS[level](space, x, problem, z, (divergence,)))(problem.policy)
        return gradient["reward"], gradient[divergence]

    return in_chunks(of_problem, problem, space.mask.size)


def in_chunks(function: Callable, arguments: Any, size: int) -> Any:
    """`function` over the leading axis of a tree, as many at once as make CHUNK if each has `size` numbers."""
    return jax.lax.map(function, arguments, batch_size=max(1, CHUNK // size))


def measurer(
    situations: Situations, build: Callable, level: str, divergence: str, z: float = 1.0
) -> Callable[[Mapping[str, float]], Moments]:
    """settings -> `Moments`, compiled once for every value of the settings, a dict of numbers with `beta`.

    `build` makes an objective of them, traced; `level`, `divergence` and `z` are of the J that it is held against.
    """
    space, problem = situations.space, situations.problem
    own = exact_gradients(space, problem, level, divergence, z)
    sequence = exact_gradients(space, problem, "sequence", divergence, z)

    @jax.jit
    def run(settings, problem, own, sequence):
        objective, beta = build(settings), settings["beta"]

        def of_problem(arguments):
            problem, own, sequence = arguments
            gradients = own[0] - beta * own[1], sequence[0] - beta * sequence[1]
            return _moments(space, level, problem, coefficients(objective, space, problem), *gradients)

        return in_chunks(of_problem, (problem, own, sequence), space.mask.size)

    def measure(settings) -> Moments:
        moments = jax.device_get(run(settings, problem, own, sequence))
        return Moments(*(x.reshape(situations.shape) for x in moments))

    return measure


def with_settings(objective: Objective, settings: Mapping) -> Objective:
    """An objective of `make("rpg")` with other numbers (beta, clip_low, clip_high, clip_c), which may be traced."""
    clip = objective.loss.keywords["clip"]
    bounds = {name: settings.get(name, value) for name, value in clip.bounds.items()}
    loss = functools.partial(objective.loss, beta=settings["beta"], clip=clip._replace(bounds=bounds))
    return dataclasses.replace(objective, loss=loss)


def coefficients(objective: Callable, space: Space, problem: Problem) -> jax.Array:
    """dL/dlogp f64[N, T] of one problem; each sequence is a batch of its own, [1, T], with denominator=1."""

    def loss(*row):
        logp, behavior, reference, advantage, mask = (x[None] for x in row)
        return objective(logp, behavior, advantage, mask, reference_logp=reference, denominator=1.0)[0]

    logps = (token_logprobs(space, x) for x in problem[:3])
    return jax.vmap(jax.grad(loss))(*logps, problem.advantage, jnp.asarray(space.mask))


def _moments(space: Space, level: str, problem: Problem, coefficient, own, sequence) -> Moments:
    """Of one problem; coefficient [N, T], own and sequence [H, V] the exact gradients of the two levels."""
    behavior = token_logprobs(space, problem.behavior)  # [N, T]
    logp, pull_back = jax.vjp(functools.partial(token_logprobs, space), problem.policy)
    probability = jnp.exp(jnp.sum(behavior, axis=1, keepdims=True))  # [N, 1]
    (mean,) = pull_back(probability * coefficient)  # [H, V]
    p = jax.nn.softmax(problem.policy)
    norms = (1 - 2 * p + jnp.sum(p**2, axis=1, keepdims=True))[space.history, space.token]  # |∇log p(token)|², [N, T]
    # The tokens of a sequence move different rows of the table, so that their squared norms add up.
    second = jnp.sum(probability * jnp.where(space.mask, coefficient**2 * norms, 0))
    tokens = probability * space.mask  # [N, T]
    if level == "token":
        weight_squared = jnp.sum(tokens * jnp.exp(2 * (logp - behavior))) / jnp.sum(tokens)
    else:
        weight_squared = jnp.sum(probability[:, 0] * jnp.exp(2 * jnp.sum(logp - behavior, axis=1)))
    product, mean_squared = -jnp.sum(mean * own), jnp.sum(mean**2)
    return Moments(
        bias_squared=jnp.sum((mean + own) ** 2),
        sequence_bias_squared=jnp.sum((mean + sequence) ** 2),
        variance=jnp.maximum(second - mean_squared, 0),
        gradient_squared=jnp.sum(own**2),
        sequence_gradient_squared=jnp.sum(sequence**2),
        cosine=product / jnp.sqrt(mean_squared * jnp.sum(own**2)),
        best_scale=product / mean_squared,
        dead_mass=jnp.sum(tokens * (coefficient == 0)) / jnp.sum(tokens),
        effective_sample_size=1 / weight_squared,
    )
