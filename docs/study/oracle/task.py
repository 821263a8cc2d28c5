"""A task whose reward a policy's own probabilities predict: counting on, modulo a number.

A prompt is a level and a value; every token of a response is right if it is one more than the token before it. The
level says how often demonstrations are right, so that prompts differ in difficulty. The reward is the share of right
tokens: it has a noise of its own at every length and is never all or nothing. Responses have a fixed length, so that
token means, sums and sequence means differ by constants only.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

VALUES = 16  # tokens 0 .. VALUES − 1 are values
LEVELS = 8  # tokens VALUES .. VALUES + LEVELS − 1 are levels
VOCABULARY = VALUES + LEVELS
PROMPT = 2  # tokens: the level, and the value to count on from
SURE = (0.4, 0.7)  # how often demonstrations are right, from the first level to the last


class Prompts(NamedTuple):
    """Every prompt there is, [P, PROMPT] int32, and the share of right tokens of its demonstrations, [P] float64."""

    tokens: np.ndarray
    sure: np.ndarray


def prompts(every: int = 1) -> Prompts:
    """All VALUES x LEVELS prompts, or one in `every` of them."""
    level, value = (grid.reshape(-1)[::every] for grid in np.meshgrid(np.arange(LEVELS), np.arange(VALUES)))
    return Prompts(np.stack([VALUES + level, value], 1).astype(np.int32), np.linspace(*SURE, LEVELS)[level])


def right_tokens(tokens: jax.Array) -> jax.Array:
    """The token that would be right in each column of i32[B, T], given the token before it; columns as in `tokens`."""
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    return (before + 1) % VALUES


def rewards(tokens: jax.Array) -> jax.Array:
    """The share of right tokens of each response of i32[B, PROMPT + length], f32[B]."""
    return jnp.mean((tokens == right_tokens(tokens))[:, PROMPT:], axis=1, dtype=jnp.float32)


def demonstrations(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """i32[rows, PROMPT + length]: random prompts, each token right with the prompt's share and else a random value."""
    every = prompts()
    chosen = rng.integers(len(every.tokens), size=rows)
    tokens = np.concatenate([every.tokens[chosen], rng.integers(VALUES, size=(rows, length))], 1).astype(np.int32)
    right = rng.random(tokens.shape) < every.sure[chosen][:, None]
    for column in range(PROMPT, tokens.shape[1]):
        tokens[:, column] = np.where(right[:, column], (tokens[:, column - 1] + 1) % VALUES, tokens[:, column])
    return tokens
