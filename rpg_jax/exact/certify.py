"""Holds a loss against the exact objective: per sample, and in expectation."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rpg_jax.exact import targets
from rpg_jax.exact.enumeration import CONDITIONS, SPACES, Condition, Problem, Space, random_problems, token_logprobs
from rpg_jax.objectives.objective import BIASED, EXACT, EXACT_MEAN

TOLERANCE = 1e-9  # relative, in float64; exact forms come out near 1e-15
VERDICTS = (EXACT, EXACT_MEAN, BIASED)  # each promises less than the one before


class Target(NamedTuple):
    """The objective a loss is held against. divergence None: reward only."""

    level: str = "token"
    divergence: str | None = None
    beta: float = 0.0
    z: float = 1.0


class Gap(NamedTuple):
    """Worst relative gaps over some problems."""

    per_sample: float  # largest difference of a sample's coefficient of ∇log policy, over the largest coefficient
    expected: float  # norm of (expected gradient + ∇J) over the norm of ∇J
    residual: float  # the same after rescaling the expected gradient by the best constant
    scale: float  # that constant

    @property
    def verdict(self):
        if self.per_sample < TOLERANCE:
            return EXACT
        return EXACT_MEAN if self.expected < TOLERANCE else BIASED

    def __str__(self):
        if self.verdict != BIASED:
            return f"{self.verdict} {self.per_sample if self.verdict == EXACT else self.expected:.0e}"
        percent = 100 * self.expected
        return f"{BIASED} ({percent:.{0 if 1 <= percent < 1e5 else 1}{'f' if 1 <= percent < 1e5 else 'g'}} %)"


def worst(gaps) -> Gap:
    """The largest of each gap; the scale is that of the problem that rescaling mends least. NaN counts as largest."""
    gaps = list(gaps)
    key = lambda x: (x != x, x)  # noqa: E731
    scale = max(gaps, key=lambda gap: key(gap.residual)).scale
    return Gap(*(max((getattr(gap, field) for gap in gaps), key=key) for field in Gap._fields[:3]), scale)


def sample_gradients(objective, problems: dict[Space, Problem]) -> dict[Space, jax.Array]:
    """dL/dlogp [S, N, T] in every space; each sequence is a batch of its own, [1, T], with denominator=1."""
    widest = max(space.mask.shape[1] for space in problems)

    def rows(space, x):
        """[S, N, T] -> [S · N, widest], padded."""
        return jnp.pad(x, ((0, 0), (0, 0), (0, widest - x.shape[2]))).reshape(-1, widest)

    batches = []
    for space, problem in problems.items():
        logs = [jax.vmap(functools.partial(token_logprobs, space))(x) for x in problem[:3]]
        mask = jnp.broadcast_to(space.mask, problem.advantage.shape)
        batches.append([rows(space, x) for x in (*logs, problem.advantage, mask)])

    def loss(logp, behavior, reference, advantage, mask):
        value, _ = objective(
            logp[None], behavior[None], advantage[None], mask[None], reference_logp=reference[None], denominator=1.0
        )
        return value

    gradients = jax.vmap(jax.grad(loss))(*map(jnp.concatenate, zip(*batches, strict=True)))
    results, start = {}, 0
    for space, problem in problems.items():
        count, sequences, length = problem.advantage.shape
        mine = gradients[start : start + count * sequences]
        results[space] = mine.reshape(count, sequences, widest)[:, :, :length]
        start += count * sequences
    return results


@functools.cache
def _problems(count: int, seed: int) -> dict[Space, Problem]:
    """In every space, all conditions' problems in one leading axis, condition by condition."""
    problems = {}
    for index, space in enumerate(SPACES):
        each = [random_problems(space, condition, count, seed + 1000 * index) for condition in CONDITIONS]
        problems[space] = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
    return problems


@functools.cache
def _truth(space: Space, target: Target, count: int, seed: int):
    """Per-sample coefficients [S, N, T] and ∇J [S, H, V] of the problems."""
    problem = _problems(count, seed)[space]
    terms = target.divergence, target.beta, target.z
    coefficient = jax.vmap(lambda p: targets.sample_coefficient(space, p, target.level, *terms))(problem)
    objective = targets.OBJECTIVES[target.level]
    gradient = jax.vmap(jax.grad(lambda policy, p: objective(space, policy, p, *terms)))(problem.policy, problem)
    return coefficient, gradient


@functools.cache
def _expectation(space: Space):
    """(problem, coefficients) -> Σ_x behavior(x) Σ_t coefficient[x, t] ∇log policy, jitted once per space."""

    def expected(problem, coefficient):
        probability = jnp.exp(jnp.sum(token_logprobs(space, problem.behavior), axis=1, keepdims=True))
        _, pull_back = jax.vjp(functools.partial(token_logprobs, space), problem.policy)
        return pull_back(probability * coefficient)[0]

    return jax.jit(jax.vmap(expected))


def examine(objective, target: Target, count: int = 6, seed: int = 0) -> dict[tuple[str, Condition], Gap]:
    """Worst gaps over `count` random problems in every space and condition, in float64.

    Args:
      objective: a callable with the contract of `rpg_jax.objectives`.
      target: what its gradient is supposed to be that of.

    Returns:
      (space name, condition) -> Gap.
    """
    results = {}
    with jax.enable_x64():
        problems = _problems(count, seed)
        for space, actual in sample_gradients(objective, problems).items():
            coefficient, gradient = _truth(space, target, count, seed)
            expected = _expectation(space)(problems[space], actual)
            measured = jax.device_get(_measure(actual, coefficient, expected, gradient))
            gaps = [Gap(*map(float, x)) for x in zip(*measured, strict=True)]
            for row, condition in enumerate(CONDITIONS):
                results[space.name, condition] = worst(gaps[row * count : (row + 1) * count])
    return results


@jax.jit
def _measure(actual, coefficient, expected, gradient):
    """The four numbers of a `Gap`, each [S]."""

    def norm(x):
        return jnp.sqrt(jnp.sum(x**2, axis=(1, 2)))

    per_sample = jnp.max(jnp.abs(actual - coefficient), axis=(1, 2)) / jnp.max(jnp.abs(coefficient), axis=(1, 2))
    scale = -jnp.sum(expected * gradient, axis=(1, 2)) / jnp.sum(expected**2, axis=(1, 2))
    residual = norm(scale[:, None, None] * expected + gradient) / norm(gradient)
    return per_sample, norm(expected + gradient) / norm(gradient), residual, scale


def level_gap(divergence: str, count: int = 6, seed: int = 0) -> dict[Condition, tuple[float, float]]:
    """How far the token-level objective's gradient is from the sequence-level one's: (reward part, divergence part).

    Relative to the sequence level's, worst over problems and spaces; advantages are one a sequence. Where both gradients
    vanish the gap is 0.
    """
    gaps = {condition: [0.0, 0.0] for condition in CONDITIONS}
    with jax.enable_x64():
        for space, problem in _problems(count, seed).items():
            means = jax.vmap(functools.partial(targets.row_means, space))(problem.advantage)
            problem = problem._replace(advantage=jnp.broadcast_to(means, problem.advantage.shape))
            silent = problem._replace(advantage=jnp.zeros_like(problem.advantage))
            for part, (name, beta, given) in enumerate(((None, 0.0, problem), (divergence, 1.0, silent))):
                token, sequence = (
                    jax.vmap(jax.grad(lambda x, p, f=f, n=name, b=beta: f(space, x, p, n, b, 1.0)))(given.policy, given)
                    for f in (targets.token_objective, targets.sequence_objective)
                )
                difference = jnp.linalg.norm(token - sequence, axis=(1, 2))
                size = jnp.linalg.norm(sequence, axis=(1, 2))
                relative = jnp.where(difference < 1e-12, 0, difference / size)
                for row, condition in enumerate(CONDITIONS):
                    largest = float(jnp.max(relative[row * count : (row + 1) * count]))
                    gaps[condition][part] = max(gaps[condition][part], largest)
    return {condition: tuple(pair) for condition, pair in gaps.items()}
