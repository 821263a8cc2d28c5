"""Conversations inside `generate`: a row whose turn is over leaves its slot, and waits again with what was answered.

An environment answers on the host, between two segments, while other rows are decoded. When an answer comes changes no
token: a row goes on from its own tokens, under the noise of its own number and of its tokens' indices. Only with
`until`, where the rows that are complete first end the rollout, all answers are waited for after every segment, and
segments have a fixed number of steps.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rpg_jax import InputError, parallel
from rpg_jax.parallel import multihost
from rpg_jax.sampling.decode import ASKED, COMPLETE, ENDED, WAITING, DecodeState
from rpg_jax.types import Sequences

PATIENCE = 0.1  # seconds that rows to decode wait for answers that are late
MOST_STATES = 256  # of a stop table


class Row(NamedTuple):
    """A row of this process, whole."""

    number: int  # among this process's rows
    tokens: list[int]  # that exist, the prompt's first
    drawn: list[bool]  # which of them the policy drew
    prompt: int  # how many of them are the prompt


class Answer(NamedTuple):
    """How a row goes on."""

    number: int
    observation: Sequence[int] = ()  # tokens that are appended to it
    limit: int = 0  # tokens after the prompt at which the coming turn ends
    matched: int = 0  # how much of a stop string its tokens end with
    ended: bool = False  # nothing more is drawn
    finished: bool = False  # and that is its own end, no limit


class Conversation(Protocol):
    """What answers turns: an environment, of which each process has its own for its own rows."""

    stops: np.ndarray | None  # i32[states, V] of `stop_table`: what ends a turn beside the stop tokens

    def __call__(self, rows: Sequence[Row], seconds: float | None) -> list[Answer]:
        """Takes rows whose turn is over, at first all that are not complete; returns the answers that have come.

        It waits until none is missing, for `seconds` at most; None is any time.
        """


def rows_of(sequences: Sequences, numbers: np.ndarray) -> list[Row]:
    """These of this process's rows, i64[n], whole."""
    if not len(numbers):
        return []
    names = ("tokens", "loss_mask", "length", "prompt_length")
    arrays = (parallel.local_rows(getattr(sequences, name))[numbers] for name in names)
    rows = zip(numbers.tolist(), *arrays, strict=True)
    return [Row(n, tokens[:end].tolist(), drawn[:end].tolist(), int(prompt)) for n, tokens, drawn, end, prompt in rows]


def spans(drawn: Sequence[bool]) -> list[tuple[int, int]]:
    """The turns of a row: (begin, end) of each run of tokens that the policy drew."""
    edges = np.flatnonzero(np.diff(np.r_[False, np.asarray(drawn, bool), False]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def stop_table(strings: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """i32[states, V], an automaton that reads tokens and finds the first of some strings, wherever tokens begin.

    A state is the longest end of the text so far that begins one of the strings; the state after a token is
    table[state, token], and it is the number of states once a string is there. 0 is the state without any.

    Args:
      strings: not empty; texts: what each token adds to a text, V of them.

    Raises InputError for an empty string or too many characters in all.
    """
    states = list(dict.fromkeys(["", *(string[:end] for string in strings for end in range(1, len(string)))]))
    if not all(strings) or len(states) > MOST_STATES:
        raise InputError(f"stop strings {list(strings)}: expected no empty one, and {MOST_STATES} characters in all")
    number = {state: index for index, state in enumerate(states)}

    def after(index: int, token: int) -> int:
        held = states[index]
        for character in texts[token]:
            held += character
            if held.endswith(tuple(strings)):
                return len(states)
            while held not in number:
                held = held[1:]
        return number[held]

    table = np.zeros((len(states), len(texts)), np.int32)
    begins = {string[0] for string in strings}
    for index, state in enumerate(states):  # most tokens lead to 0: those that no string can go on or begin with
        ends = [state[start:] for start in range(len(state)) if state[start:] in number]
        following = {x[len(end)] for end in ends for x in strings if x.startswith(end) and len(x) > len(end)}
        may = [n for n, text in enumerate(texts) if text[:1] in following or not begins.isdisjoint(text) or not text]
        table[index, may] = [after(index, token) for token in may]
    return table


def matched(table: np.ndarray, tokens: Sequence[int]) -> int:
    """The state of `stop_table` after these tokens of a turn."""
    state = 0
    for token in tokens:
        if state < len(table):
            state = int(table[state, token])
    return state


def exchange(
    mesh: Mesh, state: DecodeState, conversation: Conversation, seconds: float | None
) -> tuple[DecodeState, bool]:
    """Tells the environments of the turns that are over, and lets rows go on that have been answered.

    Returns the state, which is donated, and whether answers are still missing on any process.
    """
    status = parallel.local_rows(state.status).copy()
    ended, length = np.flatnonzero(status == ENDED), parallel.local_rows(state.rows.length)
    answers = conversation(rows_of(state.rows, ended), seconds)
    status[ended] = ASKED
    appended = np.zeros((len(status), state.rows.tokens.shape[1]), np.int32)
    count, limit, matched = np.zeros((3, len(status)), np.int32)
    finished = np.zeros(len(status), bool)
    for answer in answers:
        n, first = answer.number, length[answer.number]
        status[n] = COMPLETE if answer.ended else WAITING
        count[n], limit[n] = len(answer.observation), answer.limit
        matched[n], finished[n] = answer.matched, answer.finished
        appended[n, first : first + count[n]] = answer.observation
    news, missing = bool(len(ended) or answers), bool((status == ASKED).any())
    if jax.process_count() > 1:
        news, missing = (any(flags) for flags in zip(*multihost.gather([news, missing]), strict=True))
    if news:
        arrays = parallel.to_global(mesh, parallel.ROWS, (status, appended, count, limit, matched, finished))
        state = _answered(mesh, state, *arrays)
    return state, missing


@partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def _answered(
    mesh: Mesh, state: DecodeState, status: jax.Array, appended: jax.Array, count: jax.Array, limit: jax.Array,
    matched: jax.Array, finished: jax.Array,
) -> DecodeState:  # fmt: skip
    """The state after answers: tokens i32[N, T], `count` i32[N] of them, are appended; statuses of rows are i32[N]."""
    rows, column = state.rows, jnp.arange(appended.shape[1])
    length = rows.length + count
    new = (column >= rows.length[:, None]) & (column < length[:, None])  # [N, T]
    off = {name: jnp.where(new, 0, getattr(rows, name)) for name in ("sampler_logp", "model_logp", "version")}
    rows = dataclasses.replace(
        rows,
        tokens=jnp.where(new, appended, rows.tokens),
        loss_mask=rows.loss_mask & ~new,
        length=length,
        finished=rows.finished | finished,
        **off,
    )
    goes_on = (status == WAITING) & (state.status != WAITING)
    fresh = dict(turn=length, limit=limit, turn_matched=matched)
    changed = {name: jnp.where(goes_on, value, getattr(state, name)) for name, value in fresh.items()}
    by_rows = jax.lax.with_sharding_constraint((rows, status, changed), NamedSharding(mesh, parallel.ROWS))
    return dataclasses.replace(state, rows=by_rows[0], status=by_rows[1], **by_rows[2])
