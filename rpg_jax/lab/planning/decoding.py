"""Decoding by continuous batching over a paged KV cache: steps, tokens that are read, slots that fit a memory.

Everything follows from the distribution of response lengths, an array f64[longest + 1] whose entry L is the probability
of a response of L tokens. A slot that is always busy holds a response of length L for L steps. So at a random step long
responses are more frequent than in the queue, and what a response has drawn by then is E[L²] / 2E[L] on average (the
mean age of renewal theory), which is less than the longest and more than half of the mean.
"""

import numpy as np
from scipy import stats

from rpg_jax import InputError

SPARE = 3.0  # standard deviations of the tokens in use at a time for which a pool has room before it preempts


def parse(text: str, longest: int) -> np.ndarray:
    """The distribution that `uniform`, `lognormal:MEAN,SIGMA` or `fixed:TOKENS` names, cut off at `longest` tokens.

    MEAN is in tokens and SIGMA that of the logarithm. ValueError says what is wrong, and what would do.
    """
    kind, _, numbers = text.partition(":")
    try:
        values = [float(number) for number in numbers.split(",") if number]
    except ValueError:
        values = []
    tokens = np.arange(longest + 1)
    if kind == "uniform" and not numbers:
        return np.where(tokens > 0, 1 / longest, 0.0)
    if kind == "fixed" and len(values) == 1 and 0 < values[0] <= longest:
        low = int(values[0])  # a fraction is a mixture of the whole numbers on both sides
        return np.where(tokens == low, low + 1 - values[0], np.where(tokens == low + 1, values[0] - low, 0.0))
    if kind == "lognormal" and len(values) == 2 and values[0] > 0 and values[1] > 0:
        mean, sigma = values
        below = stats.lognorm.cdf(tokens, sigma, scale=mean * np.exp(-(sigma**2) / 2))
        return np.diff(np.where(tokens < longest, below, 1.0), prepend=0.0)
    raise InputError(
        f"--lengths={text}: expected uniform, lognormal:MEAN,SIGMA with both above 0, or fixed:TOKENS above 0 and at "
        f"most {longest}"
    )


def mean(lengths: np.ndarray) -> float:
    """E[L], tokens of a response."""
    return float(np.arange(len(lengths)) @ lengths)


def age(lengths: np.ndarray, power: int = 1) -> float:
    """E[A^power], where A = 1, 2, ..., L is the tokens of the response in a busy slot at a random step."""
    sums = np.cumsum(np.arange(len(lengths), dtype=float) ** power)
    return float(sums @ lengths) / mean(lengths)


def steps(lengths: np.ndarray, requests: int, slots: int, shards: int = 1) -> float:
    """Decode steps until the last of `requests` responses of a shard is complete, in expectation.

    As long as the queue is not empty, each step draws `slots` tokens. Then the slots run dry: what is left of their
    responses is distributed as their age, and the longest counts. The shards wait for the one with most tokens.
    """
    mean_length = mean(lengths)
    if lengths.max() == 1:  # responses of one length end together
        return -(-requests // slots) * mean_length
    if requests <= slots:
        return _largest(lengths, requests * shards)
    beyond = 1 - np.cumsum(lengths)  # P(L > x)
    rest = np.concatenate([[0.0], beyond[:-1]]) / mean_length  # P(a busy slot has x steps to go), x = 0, 1, ...
    until_empty = (requests * mean_length - slots * age(lengths)) / slots
    spread = np.sqrt((lengths @ np.arange(len(lengths)) ** 2.0 - mean_length**2) * requests) / slots
    slowest = spread * stats.norm.ppf((shards - 0.375) / (shards + 0.25)) if shards > 1 else 0.0  # Blom's formula
    return float(until_empty + slowest + _largest(rest, slots))


def _largest(probability: np.ndarray, count: int) -> float:
    """The expected largest of `count` draws from a distribution over 0, 1, 2, ..."""
    return float((1 - np.minimum(np.cumsum(probability), 1.0) ** count).sum())


def slots_that_fit(lengths: np.ndarray, prompt: float, pages: int, page_size: int) -> int:
    """The most slots whose sequences rarely need more than `pages` at a time. A sequence's last page is half full."""
    held = (prompt + age(lengths)) / page_size + 0.5  # pages
    deviation = np.sqrt(max(age(lengths, 2) - age(lengths) ** 2, 0)) / page_size
    # held · s + SPARE · deviation · √s = pages, solved for √s
    root = (np.sqrt((SPARE * deviation) ** 2 + 4 * held * pages) - SPARE * deviation) / (2 * held)
    return int(root**2)
