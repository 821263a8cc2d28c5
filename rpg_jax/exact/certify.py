"""Compares a loss's gradient with that of the exact objective: per sample, and in expectation."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.exact import targets
from rpg_jax.exact.enumeration import (
    CONDITIONS,
    FAR,
    LARGE,
    MOVED,
    SPACES,
    Condition,
    Problem,
    Space,
    random_problems,
    token_logprobs,
)
from rpg_jax.objectives.divergences import ALPHA, DIVERGENCES, full_vocabulary
from rpg_jax.objectives.objective import BIASED, EXACT, EXACT_MEAN, Objective

TOLERANCE = 1e-9  # relative, in float64; exact forms come out near 1e-15
CANCELS = 1e-6  # of parts of a loss as large as w and r, the rounding in float64 is that of a share this small
NEAR, EXTREME = CONDITIONS + MOVED, FAR + LARGE
VERDICTS = (EXACT, EXACT_MEAN, BIASED)  # each promises less than the one before


class Target(NamedTuple):
    """The objective a loss is held against. divergence None: reward only; `alpha` is that of divergence "alpha"."""

    level: str = "token"
    divergence: str | None = None
    beta: float = 0.0
    z: float = 1.0
    alpha: float = ALPHA


class Gap(NamedTuple):
    """Relative gaps of a problem, or the worst of some.

    In the conditions of `EXTREME` each coefficient, and each derivative in a logit, is compared for itself: the gap is
    the largest, as a share of the terms that it is the sum of. Small ones would be lost in a norm there.
    """

    per_sample: float  # largest difference of a sample's coefficient of ∇log policy, over the largest coefficient
    expected: float  # norm of (expected gradient + ∇J) over the norm of ∇J
    residual: float = math.nan  # the same after rescaling the expected gradient by the best constant
    scale: float = math.nan  # that constant

    @property
    def verdict(self) -> str:
        if self.per_sample < TOLERANCE:
            return EXACT
        return EXACT_MEAN if self.expected < TOLERANCE else BIASED

    def __str__(self) -> str:
        if self.verdict == BIASED:
            return f"{BIASED} ({100 * self.expected:.3g} %)"
        return f"{self.verdict} {self.per_sample if self.verdict == EXACT else self.expected:.0e}"


def worst(gaps: Iterable[Gap]) -> Gap:
    """The largest of each gap, NaN above all numbers; the scale is that of the problem with the largest residual."""
    per_sample, expected, residual, scale = np.array(list(gaps)).T
    return Gap(*map(float, (per_sample.max(), expected.max(), residual.max(), scale[residual.argmax()])))


@functools.cache
def _problems(count: int, seed: int, mixture: str | None = None) -> dict[Space, Problem]:
    """The problems of every space: those of all conditions along one leading axis S, condition by condition, `count` of
    those in `NEAR`, and half as many of those in `EXTREME`."""
    problems = {}
    for index, space in enumerate(SPACES):
        sizes = {condition: count if condition in NEAR else (count + 1) // 2 for condition in NEAR + EXTREME}
        each = [random_problems(space, at, size, seed + 1000 * index, mixture) for at, size in sizes.items()]
        problems[space] = jax.tree.map(lambda *x: np.concatenate(x), *each)  # on the host, where nothing is compiled
    return problems


def _near(tree: Any, count: int) -> Any:
    """Of arrays [S, ...] the part of `NEAR`."""
    return jax.tree.map(lambda x: x[: count * len(NEAR)], tree)


@functools.cache
def _rows(count: int, seed: int, mixture: str | None) -> tuple[np.ndarray, ...]:
    """What a loss gets of every sequence of every problem: (logp, behavior, reference, advantage, mask), each
    [rows, T], padded."""
    widest = max(space.mask.shape[1] for space in SPACES)
    batches = []
    for space, problem in _problems(count, seed, mixture).items():
        policies = problem.policy, problem.assumed, problem.reference
        logs = [jax.vmap(functools.partial(token_logprobs, space, observed=True))(x) for x in policies]
        arrays = map(np.asarray, (*logs, problem.advantage, np.broadcast_to(space.mask, problem.advantage.shape)))
        padding = ((0, 0), (0, 0), (0, widest - space.mask.shape[1]))
        batches.append([np.pad(x, padding).reshape(-1, widest) for x in arrays])
    return tuple(map(np.concatenate, zip(*batches, strict=True)))


def sample_gradients(
    objective: Callable, count: int, seed: int, mixture: str | None = None, companion: int = 0
) -> dict[Space, np.ndarray]:
    """dL/dlogp [S, N, T] in every space; each sequence is a batch of its own, [1, T], with denominator=1.

    With `companion` it is the first of a batch with another one, or anywhere among 2 others, drawn by the behavior
    policy, and the mean over these is taken: for losses that depend on the other responses of the batch.
    """
    if companion:
        with_others = jax.vmap(_companion_gradient, in_axes=(None, None, None, 0))
        spaces = _problems(count, seed, mixture).items()
        return {space: np.asarray(with_others(objective, space, companion, problem)) for space, problem in spaces}

    def loss(*row):
        logp, behavior, reference, advantage, mask = (x[None] for x in row)
        return objective(logp, behavior, advantage, mask, reference_logp=reference, denominator=1.0)[0]

    gradients = np.asarray(jax.vmap(jax.grad(loss))(*_rows(count, seed, mixture)))  # [rows, T]
    results, start = {}, 0
    for space, problem in _problems(count, seed, mixture).items():
        problems, sequences, length = problem.advantage.shape
        rows = gradients[start : start + problems * sequences]
        results[space] = rows.reshape(problems, sequences, -1)[:, :, :length]
        start += problems * sequences
    return results


@functools.partial(jax.jit, static_argnames=("objective", "space", "companions"))
def _companion_gradient(objective: Callable, space: Space, companions: int, problem: Problem) -> jax.Array:
    """dL/dlogp [N, T] of a sequence in a batch with others, averaged over them and over its place among two of them."""
    places = range(companions + 1) if companions > 1 else (0,)  # a pair is for a loss of ours, which they do not move
    logs = [token_logprobs(space, x) for x in problem[:3]]
    rows = (*logs, problem.advantage, jnp.asarray(space.mask))
    probability = jnp.exp(jnp.sum(logs[1], axis=1))

    def in_place(first, others, place):
        batch = zip(*others[:place], first, *others[place:], strict=True)
        logp, behavior, reference, advantage, mask = (jnp.stack(x) for x in batch)
        loss = lambda x: objective(x, behavior, advantage, mask, reference_logp=reference, denominator=1.0)[0]  # noqa: E731
        return jax.grad(loss)(logp)[place]

    def averaged(first, others):
        if len(others) == companions:
            return sum(in_place(first, others, place) for place in places) / len(places)
        return jnp.einsum("n,nt->t", probability, jax.vmap(lambda other: averaged(first, [*others, other]))(rows))

    return jax.lax.map(lambda first: averaged(first, []), rows)


@functools.partial(jax.jit, static_argnames=("space", "level", "names"))
def _parts(
    space: Space, level: str, z: float, alpha: float, names: tuple[str, ...], problem: Problem
) -> tuple[dict, dict]:
    """By "reward" and divergence: the parts of a sample's coefficient [S, N, T] and those of ∇J [S, H, V]."""

    def of_problem(problem):
        parts = targets.PARTS[level]
        gradient = jax.jacrev(lambda policy: parts(space, policy, problem, z, names, alpha))(problem.policy)
        return targets.sample_parts(space, problem, level, z, names, alpha), gradient

    return jax.vmap(of_problem)(problem)


@functools.cache
def _truth(
    space: Space, target: Target, count: int, seed: int, mixture: str | None, names: tuple[str, ...]
) -> tuple[np.ndarray, ...]:
    """The right gradient of a sample, as a multiple of ∇log policy [S, N, T]; ∇J [S, H, V]; the size of the first's
    terms. Computed for all divergences of `names` at once."""
    sample, gradient = _parts_of(space, target.level, target.z, target.alpha, names, count, seed, mixture)
    beta, name = (target.beta, target.divergence) if target.divergence else (0.0, "reward")
    terms = np.abs(sample["reward"]) + beta * (np.abs(sample[name]) + CANCELS * sample["ratios"])
    return beta * sample[name] - sample["reward"], gradient["reward"] - beta * gradient[name], terms


@functools.cache
def _parts_of(
    space: Space, level: str, z: float, alpha: float, names: tuple[str, ...], count: int, seed: int, mixture: str | None
) -> tuple[dict, dict]:
    return jax.device_get(_parts(space, level, z, alpha, names, _problems(count, seed, mixture)[space]))


@functools.partial(jax.jit, static_argnames="space")
def _measure(
    space: Space, problem: Problem, actual: jax.Array, coefficient: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, ...]:
    """The four numbers of a `Gap`, each [S]; `actual` and `coefficient` [S, N, T] multiply ∇log policy."""

    def of_problem(problem, actual, coefficient, gradient):
        expected, _ = _expected(space, problem, actual)
        scale = -jnp.sum(expected * gradient) / jnp.sum(expected**2)
        size = jnp.linalg.norm(gradient)
        return (
            jnp.max(jnp.abs(actual - coefficient)) / jnp.max(jnp.abs(coefficient)),
            jnp.linalg.norm(expected + gradient) / size,
            jnp.linalg.norm(scale * expected + gradient) / size,
            scale,
        )

    return jax.vmap(of_problem)(problem, actual, coefficient, gradient)


@functools.partial(jax.jit, static_argnames="space")
def _measure_entries(
    space: Space, problem: Problem, actual: jax.Array, coefficient: jax.Array, gradient: jax.Array, terms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The first two numbers of a `Gap` as shares of the `terms` [S, N, T] of each coefficient, and their sums in each
    derivative."""

    def share(difference, whole):
        return jnp.max(jnp.where(whole == 0, 0, jnp.abs(difference) / jnp.where(whole == 0, 1, whole)))

    def of_problem(problem, actual, coefficient, gradient, terms):
        expected, probability = _expected(space, problem, actual)
        terms += jnp.abs(actual)
        drawn = jnp.zeros_like(gradient).at[space.history, space.token].add(probability * terms)
        summed = drawn + jax.nn.softmax(problem.policy) * jnp.sum(drawn, axis=1, keepdims=True)  # [H, V]
        return share(actual - coefficient, terms), share(expected + gradient, summed)

    return jax.vmap(of_problem)(problem, actual, coefficient, gradient, terms)


def _expected(space: Space, problem: Problem, actual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The expected gradient [H, V], and each sequence's probability [N, 1]."""
    probability = jnp.exp(jnp.sum(token_logprobs(space, problem.behavior), axis=1, keepdims=True))
    _, pull_back = jax.vjp(functools.partial(token_logprobs, space, observed=True), problem.policy)
    return pull_back(probability * actual)[0], probability


def examine(
    objective: Callable, target: Target, count: int = 6, seed: int = 0, mixture: str | None = None, companion: int = 0,
    names: tuple[str, ...] | None = None,
) -> dict[tuple[str, Condition], list[Gap]]:  # fmt: skip
    """Gaps of `count` random problems in every space and condition of `NEAR`, and of half as many in those of
    `EXTREME`, in float64.

    `objective` has the contract of `rpg_jax.objectives` and should have the gradient of `target`. `mixture` is one of
    `MIXTURES`, for sequences with tokens of different policies; with `companion` each sequence is in a batch with so
    many others, see `sample_gradients`. The truth is compiled for the divergences of `names` together, by default for
    all: those of all calls to come, the target's among them. Returns (space name, condition) -> a Gap of each problem.
    """
    results, names = {}, tuple(DIVERGENCES) if names is None else names
    with jax.enable_x64():
        problems, near = _problems(count, seed, mixture), count * len(NEAR)
        for space, actual in sample_gradients(objective, count, seed, mixture, companion).items():
            arrays = problems[space], actual, *_truth(space, target, count, seed, mixture, names)
            shares = _measure_entries(space, *jax.tree.map(lambda x: x[near:], arrays))
            measured = zip(*jax.device_get(_measure(space, *_near(arrays[:-1], count))), strict=True)
            gaps = iter([Gap(*map(float, x)) for x in measured] + [Gap(*x) for x in np.asarray(shares).T.tolist()])
            for condition in NEAR + EXTREME:
                size = count if condition in NEAR else (count + 1) // 2
                results[space.name, condition] = list(itertools.islice(gaps, size))
    return results


def full_vocabulary_gaps(objective: Objective, count: int = 6) -> dict[Condition, float]:
    """|expected gradient + ∇J| / |∇J| of an objective with kl="full", of the token level's J; worst over all spaces.

    Its regularizer does not reach the policy through log-probs of samples, so the gradient is that in the logits.
    """
    target = Target("token", objective.divergence, objective.beta)
    divergence, gaps = DIVERGENCES[str(objective.divergence)], np.zeros(len(NEAR))

    @functools.partial(jax.jit, static_argnums=0)
    def expected(space, problem):
        behavior = token_logprobs(space, problem.behavior)
        probability = jnp.exp(jnp.sum(behavior, axis=1))

        def loss(policy):
            whole = full_vocabulary(divergence, policy, problem.reference)[space.history]  # [N, T]
            rows = (token_logprobs(space, policy), behavior, token_logprobs(space, problem.reference))

            def of_row(*row):
                logp, mu, reference, advantage, mask, kl = (x[None] for x in row)
                return objective(logp, mu, advantage, mask, reference_logp=reference, denominator=1.0, full_kl=kl)[0]

            return jnp.sum(probability * jax.vmap(of_row)(*rows, problem.advantage, jnp.asarray(space.mask), whole))

        return jax.grad(loss)(problem.policy)

    with jax.enable_x64():
        for space, problem in _problems(count, 0).items():
            _, gradient, _ = _truth(space, target, count, 0, None, tuple(DIVERGENCES))
            problem, gradient = _near((problem, gradient), count)
            off = jnp.linalg.norm(jax.vmap(functools.partial(expected, space))(problem) + gradient, axis=(1, 2))
            relative = off / jnp.linalg.norm(gradient, axis=(1, 2))
            gaps = np.maximum(gaps, relative.reshape(-1, count).max(axis=1))
    return dict(zip(NEAR, gaps.tolist(), strict=True))


def level_gap(divergence: str, count: int = 6) -> dict[Condition, tuple[float, float]]:
    """How far the token-level objective's gradient is from the sequence-level one's: (reward part, divergence part).

    Relative to the sequence level's, worst over problems and spaces; advantages are one a sequence. Where both
    gradients vanish the gap is 0.
    """
    gaps = np.zeros((2, len(CONDITIONS)))
    with jax.enable_x64():
        for space, problem in _problems(count, 0).items():  # whole, in the shapes that `examine` compiles
            means = jax.vmap(functools.partial(targets.row_means, space))(problem.advantage)
            problem = problem._replace(advantage=jnp.broadcast_to(means, problem.advantage.shape))
            _, token = _parts(space, "token", 1.0, ALPHA, tuple(DIVERGENCES), problem)
            _, sequence = _parts(space, "sequence", 1.0, ALPHA, tuple(DIVERGENCES), problem)
            for part, name in enumerate(("reward", divergence)):
                difference, size = (
                    jnp.linalg.norm(x, axis=(1, 2)) for x in (token[name] - sequence[name], sequence[name])
                )
                relative = jnp.where(difference < 1e-12, 0, difference / size)
                of_conditions = relative[: len(CONDITIONS) * count].reshape(-1, count)
                gaps[part] = np.maximum(gaps[part], of_conditions.max(axis=1))
    return dict(zip(CONDITIONS, zip(*gaps.tolist(), strict=True), strict=True))


def reach(count: int = 6) -> tuple[float, float, float]:
    """How far the problems go: the largest |log(policy / behavior)| of a token and of a response, and |advantage|."""
    reached = []
    with jax.enable_x64():
        for space, problem in _problems(count, 0).items():
            logs = [np.asarray(jax.vmap(functools.partial(token_logprobs, space))(x)) for x in problem[:2]]
            arrays = logs[0] - logs[1], (logs[0] - logs[1]).sum(axis=-1), problem.advantage
            reached.append([float(np.abs(x).max()) for x in arrays])
    ratio, response, advantage = np.max(reached, axis=0)
    return float(ratio), float(response), float(advantage)
