"""Policies small enough to sum over: every sequence of a few tokens, with one free logit per history and token.

A policy is a table of logits [H, V], a row for each of the H histories. By the chain rule, what is exact here is exact
for every parameterization. With sequences of one token, the policy is a plain softmax.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Space:
    """All N sequences of at most T tokens: for column t of a row, the token and the history that it follows."""

    name: str
    vocab: int
    histories: int  # H
    history: np.ndarray  # i32[N, T], row of the table of logits
    token: np.ndarray  # i32[N, T]
    mask: np.ndarray  # bool[N, T], tokens that the policy draws: false after the stop token, and of an observation
    exists: np.ndarray  # bool[N, T], false after the stop token


def every_sequence(name: str, vocab: int, length: int, stop: int | None = None) -> Space:
    """All vocab ** length sequences; with `stop`, each ends with its first stop token, if it has one."""
    every = itertools.product(range(vocab), repeat=length)
    sequences = dict.fromkeys(x[: x.index(stop) + 1] if stop in x else x for x in every)
    prefixes = sorted({x[:t] for x in sequences for t in range(len(x))}, key=lambda h: (len(h), h))
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}
    history, token = np.zeros((2, len(sequences), length), np.int32)
    mask = np.zeros((len(sequences), length), bool)
    for row, x in enumerate(sequences):
        for t, symbol in enumerate(x):
            history[row, t], token[row, t], mask[row, t] = row_of[x[:t]], symbol, True
    return Space(name, vocab, len(prefixes), history, token, mask, mask)


def two_turns(name: str, vocab: int) -> Space:
    """All conversations of two tokens of the policy, between which stands an observation: the first one, plus 1.

    The observation follows a history of its own, so that its log-prob, which no objective counts, is a policy's, too.
    """
    first, last = map(np.ravel, np.indices((vocab, vocab), np.int32))  # [N]
    token = np.stack([first, (first + 1) % vocab, last], axis=1)
    history = np.stack([0 * first, 1 + first, 1 + vocab + first], axis=1)
    mask = np.broadcast_to([True, False, True], token.shape)
    return Space(name, vocab, 1 + 2 * vocab, history, token, mask, np.ones_like(mask))


SPACES = (
    every_sequence("softmax over 8", 8, 1),
    every_sequence("3 tokens, length 3", 3, 3),
    every_sequence("3 tokens, length up to 3", 3, 3, stop=0),
    two_turns("two turns, 4 tokens", 4),
)


class Problem(NamedTuple):
    """Three policies and a reward signal in a `Space`, with a leading axis S of independent problems."""

    policy: jax.Array  # f64[S, H, V] logits
    behavior: jax.Array
    reference: jax.Array
    advantage: jax.Array  # f64[S, N, T], of each token of each sequence; level "sequence" uses row means
    assumed: jax.Array  # whose log-probs the loss gets as the behavior policy's


class Condition(NamedTuple):
    """Which policies of a problem are equal, and how far the current one is from the behavior policy."""

    on_policy: bool
    reference_is_behavior: bool
    distance: float | None = None  # KL(behavior || policy) of a sequence in nats; None leaves it to the random draws
    reach: float = 0.0  # by how much at most a log-prob is lowered, in each policy those of other tokens
    scale: float = 1.0  # the largest factor of an advantage

    def __str__(self) -> str:
        if self.distance is not None:
            return f"KL {self.distance:g}"
        sign, extreme = "=" if self.reference_is_behavior else "≠", ", far ratios" if self.reach else ""
        extreme += ", large advantages" if self.scale > 1 else ""
        return f"{'on' if self.on_policy else 'off'} policy, reference {sign} behavior{extreme}"


MIXTURES = ("recorded", "recomputed")  # log-probs of sequences whose tokens were drawn by different policies
CONDITIONS = tuple(Condition(on, same) for on in (True, False) for same in (True, False))
MOVED = tuple(Condition(False, True, distance) for distance in (0.001, 0.01, 0.1, 1.0))
FAR = tuple(Condition(on, same, reach=30.0) for on, same in ((False, True), (False, False), (True, False)))
LARGE = tuple(Condition(on, True, scale=1e4) for on in (True, False))
STEPS = 64  # doublings, and bisections, of a move to a distance


def random_problems(
    space: Space, condition: Condition, count: int, seed: int = 0, mixture: str | None = None
) -> Problem:
    """`count` problems. Off policy, logits move by normal draws of deviation 0.7, so that ratios pass all clip bounds.

    With a distance, they move in the direction of the draws until the KL is that distance. With a reach, some tokens of
    every history are unlikely to one policy and likely to another, and each policy has likely tokens: ratios are far
    from 1, and sums of them are not. With a scale, advantages spread over its orders of magnitude.

    With a mixture, one of `MIXTURES`, an earlier policy drew the first token of each sequence and the newest one the
    rest (docs/method.md 9.5). The loss gets the log-probs that were recorded, or those of the newest policy for all
    tokens, as a trainer would recompute them. On policy, the current policy is the newest one.
    """
    rng = np.random.default_rng(seed)
    newest, step, far = rng.normal(size=(3, count, space.histories, space.vocab))
    advantage = rng.normal(size=(count, *space.mask.shape)) + 0.3
    away = newest + 0.7 * step
    if condition.reach:
        away, newest, far = _unlikely(rng, condition.reach, away, newest, far)
    if condition.scale > 1:
        advantage *= condition.scale ** rng.uniform(size=advantage.shape)
    behavior = newest.copy()
    if mixture:
        behavior[:, 0] += 0.7 * rng.normal(size=(count, space.vocab))  # row 0: the history without tokens
    policy = newest if condition.on_policy else away
    if condition.distance is not None:
        policy = _move(space, behavior, step, condition.distance)
    assumed = newest if mixture == "recomputed" else behavior
    reference = assumed if condition.reference_is_behavior else far
    return Problem(*(jnp.asarray(x) for x in (policy, behavior, reference, advantage, assumed)))


def _unlikely(rng: np.random.Generator, reach: float, *tables: np.ndarray) -> Iterator[np.ndarray]:
    """Tables of logits [..., V] of the policy, the behavior policy and the reference, each with some lowered.

    One token of each history at least is lowered in none of the first two, and the others alternate between them.
    """
    order = np.broadcast_to(np.arange(tables[0].shape[-1]), (2, *tables[0].shape))
    first, second = np.where(order < order.max(), order % 2, 2)
    ranks = [rng.permuted(x, axis=-1) for x in (first, second)]
    for table, rank, which in zip(tables, (ranks[0], ranks[0], ranks[1]), (0, 1, 0), strict=True):
        yield table - np.where(rank == which, reach * rng.uniform(size=table.shape), 0)


def token_logprobs(space: Space, logits: jax.Array, observed: bool = False) -> jax.Array:
    """log p(token | history), [H, V] -> [N, T]; 0 where masked, but with `observed` those of observations, too."""
    mask = space.exists if observed else space.mask
    return jnp.where(mask, jax.nn.log_softmax(logits)[space.history, space.token], 0)


def row_means(space: Space, advantage: jax.Array) -> jax.Array:
    """Masked row means of [N, T], as [N, 1]."""
    total = jnp.sum(jnp.where(space.mask, advantage, 0), axis=1, keepdims=True)
    return total / jnp.sum(space.mask, axis=1, keepdims=True)


def kl(space: Space, p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p || q) over whole sequences, of two tables of logits [H, V]."""
    log_p, log_q = token_logprobs(space, p), token_logprobs(space, q)
    return jnp.sum(jnp.exp(log_p.sum(axis=1)) * (log_p - log_q).sum(axis=1))


def move_to(space: Space, logits: jax.Array, direction: jax.Array, distance: float | jax.Array) -> jax.Array:
    """logits + t·direction [H, V] at the t >= 0 where KL(logits || result) = distance, by doubling, then bisection.

    The KL is convex in t and has its minimum, 0, at t = 0: it increases with t.
    """
    unit = direction / jnp.linalg.norm(direction)

    def short(t):
        return kl(space, logits, logits + t * unit) < distance

    high = jax.lax.fori_loop(0, STEPS, lambda _, t: jnp.where(short(t), 2 * t, t), jnp.asarray(1e-6, logits.dtype))

    def halve(_, bounds):
        middle = jnp.mean(bounds)
        return jnp.where(short(middle), bounds.at[0].set(middle), bounds.at[1].set(middle))

    bounds = jax.lax.fori_loop(0, STEPS, halve, jnp.stack([jnp.zeros_like(high), high]))
    return logits + jnp.where(distance > 0, bounds[1], 0) * unit


_move = jax.jit(jax.vmap(move_to, (None, 0, 0, None)), static_argnums=0)
