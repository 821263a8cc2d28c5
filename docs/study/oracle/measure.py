"""Measuring: the moments of every estimator at each length and age, kept as one row of a table each.

A row has products of block means in place of the means themselves, so that it is small and all that `tables` reports
can be computed from it, with its error: independent blocks have independent noise.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd

from oracle import task
from oracle.estimators import ESTIMATORS
from oracle.gradients import fresh_block, stale_block
from oracle.policies import DEMONSTRATIONS, TRAINING, logprobs, respond, training, transformer, warm_start
from rpg_jax import InputError
from rpg_jax.models import Model
from rpg_jax.types import Params

KEYS = ("length", "updates", "group", "estimator")


class Sampled(NamedTuple):
    """What is sampled; responses are counted over all blocks, and each block has as many of every prompt."""

    lengths: tuple[int, ...] = (16, 64, 256)  # tokens of a response
    ages: tuple[int, ...] = (4, 16, 64, 256)  # updates since the behavior policy; at 0 all estimators are the same
    groups: tuple[int, ...] = (2, 4, 8)  # G, responses to a prompt that share a baseline
    fresh: int = 16384  # responses of the current policy, for the reference gradient
    stale: int = 4096  # responses of the behavior policy
    blocks: int = 8  # independent parts of either, from which errors are estimated
    prompts: int = 64  # distinct ones
    seed: int = 0  # of parameters, prompts and responses
    parallel: int = 2  # lengths and ages that are measured at a time
    maker: str = ""  # the estimator that made the policies from responses of the first one; none: on policy


def samples(settings: Sampled, responses: int) -> int:
    """Responses to each prompt in a block."""
    return responses // (settings.blocks * settings.prompts)


def check(settings: Sampled) -> None:
    """Raises ValueError for settings that the moments cannot be computed with."""
    if settings.prompts < 1 or len(task.prompts().tokens) % settings.prompts:
        raise InputError(f"--prompts={settings.prompts} must divide the task's {len(task.prompts().tokens)} prompts")
    if settings.blocks < 3:
        raise InputError(f"--blocks={settings.blocks}: errors are estimated from at least 3 blocks")
    if samples(settings, settings.fresh) < 2:
        least = 2 * settings.blocks * settings.prompts
        raise InputError(f"--fresh={settings.fresh} leaves a prompt of a block without a second response; give {least}")
    for group in settings.groups:
        if group < 2 or samples(settings, settings.stale) % group or not samples(settings, settings.stale):
            count = samples(settings, settings.stale)
            raise InputError(f"--groups: {group} does not divide the {count} stale responses to a prompt in a block")


def measured(settings: Sampled, done: set[tuple[int, int]], log: Callable[[str], None]) -> Iterator[pd.DataFrame]:
    """The rows of each length and age that is not among `done`, as they are measured; columns are those of `rows`."""
    wanted = [(length, age) for length in settings.lengths for age in settings.ages if (length, age) not in done]
    if not wanted:
        return
    model, started = transformer(), time.monotonic()
    begun = warm_start(model, settings.seed, **DEMONSTRATIONS)
    log(f"behavior policy: {time.monotonic() - started:.0f} s")
    prompts = task.prompts(len(task.prompts().tokens) // settings.prompts).tokens
    ages, maker = {age for _, age in wanted}, ESTIMATORS[settings.maker].objective if settings.maker else None
    policies = dict(training(model, begun, ages, settings.seed + 1, maker=maker, **TRAINING))
    log(f"policies after {', '.join(map(str, policies))} updates: {time.monotonic() - started:.0f} s")
    stale = {}
    for length in {length for length, _ in wanted}:
        drawn = [
            respond(model, begun, prompts, samples(settings, settings.stale), length, settings.seed + 2, block)
            for block in range(settings.blocks)
        ]
        stale[length] = drawn, [batched_logprobs(model, begun, tokens) for tokens in drawn]

    def measure(where: tuple[int, int]) -> pd.DataFrame:
        length, age = where
        before = time.monotonic()
        table = point(model, policies[age], prompts, *stale[length], length, age, settings)
        log(f"length {length}, {age} updates: {time.monotonic() - started:.0f} s")
        return table.assign(seconds=time.monotonic() - before)

    with ThreadPoolExecutor(settings.parallel) as pool:
        yield from pool.map(measure, wanted)


def batched_logprobs(model: Model, params: Params, tokens: jax.Array, rows: int = 128) -> jax.Array:
    """`logprobs` of the drawn tokens f32[B, T], some rows at a time."""
    of_rows = jax.jit(lambda params, tokens: logprobs(model, params, tokens)[0])
    return np.concatenate([of_rows(params, tokens[i : i + rows]) for i in range(0, len(tokens), rows)])


def point(
    model: Model, params: Params, prompts: np.ndarray, drawn: list[jax.Array], behavior: list[jax.Array],
    length: int, age: int, settings: Sampled,
) -> pd.DataFrame:  # fmt: skip
    """The rows of one length and age, from the stale responses in blocks and their behavior log-probs."""
    each, fresh_samples = samples(settings, settings.stale), samples(settings, settings.fresh)
    fresh, reward = [], []
    for block in range(settings.blocks):
        tokens = respond(model, params, prompts, fresh_samples, length, settings.seed + 3 + age, block)
        fresh.append(fresh_block(model, params, tokens, fresh_samples))
        reward.append(float(task.rewards(tokens).mean()))
    blocks = [
        stale_block(model, params, tokens, logp, each, settings.groups)
        for tokens, logp in zip(drawn, behavior, strict=True)
    ]
    log_ratio = np.concatenate([block.log_ratio for block in blocks]).astype(np.float64)
    facts = dict(
        kl=float(-log_ratio.sum(1).mean()), token_ess=effective(log_ratio), sequence_ess=effective(log_ratio.sum(1)),
        outside=float(np.mean((log_ratio < np.log(0.8)) | (log_ratio > np.log(1.28)))),
        fresh=settings.fresh, stale=settings.stale, reward=float(np.mean(reward)),
    )  # fmt: skip
    return rows(fresh, blocks, settings.groups).assign(length=length, updates=age, **facts)


def effective(log_ratio: np.ndarray) -> float:
    """Effective sample size, a share of the entries: (Σw)² / (n Σw²)."""
    w = np.exp(log_ratio - log_ratio.max())
    return float(w.sum() ** 2 / (w.size * (w**2).sum()))


def rows(fresh: list[np.ndarray], blocks: list, groups: tuple[int, ...]) -> pd.DataFrame:
    """A row for each group size and estimator: products of the means of B blocks, each list of B² or B numbers.

    fresh_fresh, stale_stale, stale_fresh: inner products of block means, row by row; square: mean squared norms.
    """
    fresh = np.stack(fresh)
    table = []
    for group in groups:
        means = np.stack([block.mean[group] for block in blocks], 1)  # [estimators, B, D]
        squares = np.stack([block.square[group] for block in blocks], 1)  # [estimators, B]
        for name, mean, square in zip(ESTIMATORS, means, squares, strict=True):
            products = dict(fresh_fresh=fresh @ fresh.T, stale_stale=mean @ mean.T, stale_fresh=mean @ fresh.T)
            flat = {key: product.reshape(-1).tolist() for key, product in products.items()}
            table.append(dict(group=group, estimator=name, **flat, square=square.tolist()))
    return pd.DataFrame(table)
