"""One step of decoding as a function on explicit state: the queue, the slots, their pages, and the rows being written.

N rows wait in a queue, and a slot works on one at a time: what it draws is written into the row itself. Keys and values
lie in pages that rows hold (`pages`, `paged_attention`). A row leaves its slot when it is complete or, where an
environment answers (`turns`), at the end of a turn, and then keeps its pages. On a mesh these functions see one data
shard (`parallel.over_rows`): its own rows, slots and pages. How rows come to slots is in `batching`, and how pages come
to rows in `holding`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax import InputError
from rpg_jax.models import Model
from rpg_jax.sampling import pages
from rpg_jax.sampling.draw import draw, token_logp, token_uniforms
from rpg_jax.sampling.filters import filter_threshold
from rpg_jax.sampling.paged_attention import Kernel, Pool
from rpg_jax.sampling.pages import NOWHERE
from rpg_jax.sampling.running_softmax import table_width
from rpg_jax.types import Params, Sequences, pytree

STOP_IDS = 8  # size of Sampling.stop_ids
WAITING, RUNNING, COMPLETE = 0, 1, 2  # a row's status
ENDED, ASKED = 3, 4  # a turn of it is over, and then its environment has been told


@pytree
class Sampling:
    """Settings of the drawn distribution. Values are traced: new ones never recompile, while what is on stays the same.
    Build it with `make`."""

    temperature: jax.Array  # f32[], 0 is greedy, as is what is below 2**-126: devices take it for 0
    top_k: jax.Array  # i32[], 0 is off
    top_p: jax.Array  # f32[], 1 is off
    stop_ids: jax.Array  # i32[STOP_IDS], padded with -1
    on: frozenset[str] = dataclasses.field(metadata=dict(static=True))  # names of the first three that are not off

    @staticmethod
    def make(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, stop_ids: Sequence[int] = ()) -> "Sampling":
        """Arrays of these host values; raises InputError for top_p or stop ids out of range."""
        if not 0 < top_p <= 1:
            raise InputError(f"top_p is {top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if len(stop_ids) > STOP_IDS or any(token < 0 for token in stop_ids):
            raise InputError(f"stop_ids are {tuple(stop_ids)}; give at most {STOP_IDS}, none negative")
        padded = list(stop_ids) + [-1] * (STOP_IDS - len(stop_ids))
        on = dict(temperature=temperature >= 2.0**-126, top_k=top_k > 0, top_p=top_p < 1)
        return Sampling(
            jnp.float32(temperature),
            jnp.int32(top_k),
            jnp.float32(top_p),
            jnp.asarray(padded, dtype=jnp.int32),
            frozenset(name for name, is_on in on.items() if is_on),
        )


@pytree
class DecodeState:
    """What decoding reads and writes. Row n belongs to prompt n // samples; W pages hold the longest sequence.

    Arrays of prompts have the size of those of rows, so that no shape depends on how many rows a prompt has: rollouts
    and evaluations of as many responses run one program.
    """

    pools: list[Pool]  # keys and values of each layer, in pages
    free: pages.Free
    table: jax.Array  # i32[N, W], the pages of each row: full ones of its prompt, then its own
    held: jax.Array  # i32[N], entries in use; 0 of a row without pages
    cached: jax.Array  # i32[N], tokens whose keys and values are in these pages; `collect` counts those of decoding
    samples: jax.Array  # i32[], rows of a prompt
    prompt_table: jax.Array  # i32[N, W]
    prompt_ready: jax.Array  # bool[N], prefilled and held
    position: jax.Array  # i32[slots], column of the next input in the row
    request: jax.Array  # i32[slots], the row that it works on; -1 idle
    done: jax.Array  # bool[slots], the row is to leave; it is collected before the next step
    stopped: jax.Array  # bool[slots], a stop token or a stop string is why
    matched: jax.Array  # i32[slots], how much of a stop string the tokens end with (`turns.stop_table`)
    step: jax.Array  # i32[], decode steps taken
    preemptions: jax.Array  # i32[1] on each data shard, rows that went back to the queue
    status: jax.Array  # i32[N]
    begin: jax.Array  # i32[N], tokens that a row had at the start; one without pages draws the later ones anew
    turn: jax.Array  # i32[N], column of the first token of the turn under way
    turn_matched: jax.Array  # i32[N], `matched` before that token
    limit: jax.Array  # i32[N], tokens after the prompt at which a row leaves; 0 marks padding, which is not run
    # N rows. `length` is that of the time when a row last left a slot; tokens of preempted rows lie beyond it.
    rows: Sequences

    @property
    def first_row(self) -> jax.Array:
        """i32[N], the first row of each prompt, or the last of all."""
        return jnp.minimum(jnp.arange(self.status.size) * self.samples, self.status.size - 1)

    def prompt_of(self, row: jax.Array) -> jax.Array:
        """The prompt of each of some rows."""
        return row // self.samples

    def has(self, rows: jax.Array) -> jax.Array:
        """bool[N], the prompts that have one of these rows, bool[N]."""
        return jnp.zeros_like(rows).at[self.prompt_of(jnp.arange(rows.size))].max(rows)


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What stays the same during a rollout and is known when it is compiled; counts are those of one data shard."""

    model: Model
    kernel: Kernel
    cache_dtype: Any  # of keys and values
    page_size: int  # tokens of a page
    chunk: int  # tokens of a row that are prefilled at a time
    prefill_rows: int  # rows that are prefilled at a time
    conversation: bool  # whether environments answer: rows then leave at the end of a turn, and keep their pages


@pytree
class Inputs:
    """The arrays that a rollout reads."""

    params: Params  # unstacked
    key: jax.Array  # uint32[N, 2], threefry key of each row's noise
    sampling: Sampling
    version: jax.Array  # i32[], optimizer updates of the parameters
    until: jax.Array  # i32[], prompts over all shards whose rows are to be complete; the rollout ends with them
    must: jax.Array  # bool[N], rows that have to be complete, too
    stops: jax.Array | None  # i32[states, V], of `turns.stop_table`; None without stop strings
    turns: Any = ()  # `Model.turns` of all positions, which `prepared` adds


def start(
    sampler: Sampler, rows: Sequences, samples: int, limit: jax.Array, slots: int, cache_pages: int
) -> DecodeState:
    """The state before the first step: every slot idle, every page free, and every row that is not complete WAITING, or
    ENDED where its environment is asked first."""
    width = table_width(rows.tokens.shape[1], sampler.page_size)
    of_slots, off = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, bool)
    of_rows, table = jnp.zeros_like(rows.length), jnp.zeros((len(rows.length), width), jnp.int32)
    cache = sampler.model.config, sampler.cache_dtype, cache_pages, sampler.page_size
    complete = rows.complete | (rows.length - rows.prompt_length >= limit)
    ready = ENDED if sampler.conversation else WAITING
    return DecodeState(
        pools=[sampler.kernel.empty(*cache) for _ in range(sampler.model.config.layers)],
        free=pages.Free(jnp.arange(cache_pages, dtype=jnp.int32), jnp.full(1, cache_pages, jnp.int32)),
        table=table, held=of_rows, cached=of_rows, samples=jnp.int32(samples),
        prompt_table=table, prompt_ready=jnp.zeros_like(rows.complete),
        position=of_slots, request=of_slots - 1, done=off, stopped=off, matched=of_slots,
        step=jnp.int32(0), preemptions=jnp.zeros(1, jnp.int32), status=jnp.where(complete, COMPLETE, ready),
        begin=rows.length, turn=rows.length, turn_matched=of_rows, limit=limit, rows=rows,
    )  # fmt: skip


def prepared(sampler: Sampler, inputs: Inputs, state: DecodeState) -> Inputs:
    """The inputs with what every step needs alike, to be called outside of loops."""
    positions = jnp.arange(state.table.shape[1] * sampler.page_size)
    turns = jax.tree.map(lambda x: x[0], sampler.model.turns(positions[None]))  # [positions, head_dim / 2] each
    return dataclasses.replace(inputs, turns=turns)


def extend(
    sampler: Sampler, inputs: Inputs, pools: list[Pool], table: jax.Array, tokens: jax.Array, first: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, list[Pool], jax.Array | None]:  # fmt: skip
    """Runs C more tokens of each row through the model, and keeps their keys and values.

    Args:
      tokens: i32[R, C]; table: i32[R, W], pages of each row.
      first: i32[R], position of tokens[:, 0]; count: i32[R], how many of the C are meant, 0 for an idle row.

    Returns final hidden states [R, C, hidden], the pools, and with experts the routes u8[R, C, layers * k].
    """
    steps = jnp.arange(tokens.shape[1])
    position = first[:, None] + steps  # [R, C]
    page = jnp.take_along_axis(table, jnp.minimum(position // sampler.page_size, table.shape[1] - 1), axis=1)
    page = jnp.where(steps < count[:, None], page, NOWHERE).reshape(-1)
    offset = (position % sampler.page_size).reshape(-1)
    start = jnp.where(count > 0, first, -1)

    def write_and_attend(kind, pool, q, k, v):  # each [R, C, heads, head_dim]
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pool = sampler.kernel.write(pool, k, v, page, offset)
        return sampler.kernel.attend(q, pool, table, start, sampler.page_size, kind), pool

    turns = jax.tree.map(lambda x: jnp.take(x, position, axis=0, mode="clip"), inputs.turns)  # [R, C, head_dim / 2]
    return sampler.model.cached(inputs.params, tokens, turns, write_and_attend, pools)


def sample(
    logits: jax.Array, keys: jax.Array, counts: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token a row: temperature, then top-k, then top-p. What is off is not in the program.

    Args:
      logits: f32[B, V]; keys: uint32[B, 2]; counts: i32[B], tokens after the prompt.

    Returns token i32[B]; sampler_logp f32[B], under the distribution drawn from (0 when greedy); model_logp f32[B],
    under softmax(logits / temperature), at the temperature 1 when greedy.
    """

    if "temperature" not in sampling.on:
        token = jnp.argmax(logits, axis=1).astype(jnp.int32)
        return token, jnp.zeros(logits.shape[:1], logits.dtype), token_logp(logits, token)
    filters = {name: getattr(sampling, name) for name in ("top_k", "top_p") if name in sampling.on}
    threshold = filter_threshold(logits, sampling.temperature, **filters)
    token, sampler_logp = draw(logits, sampling.temperature, threshold, token_uniforms(keys, counts))
    return token, sampler_logp, token_logp(logits / sampling.temperature, token) if filters else sampler_logp


def decode_step(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Every running slot reads one token and draws the next. What idle slots compute beside is not kept."""
    running = state.request >= 0  # [slots]
    request = jnp.maximum(state.request, 0)  # [slots], an index even where idle
    last = state.rows.tokens[request, state.position]
    hidden, pools, routes = extend(
        sampler, inputs, state.pools, state.table[request], last[:, None], state.position, running.astype(jnp.int32)
    )
    logits = sampler.model.logits(inputs.params, hidden[:, 0])  # [slots, V]
    column = state.position + 1
    count = column - state.rows.prompt_length[request]
    token, sampler_logp, model_logp = sample(logits, inputs.key[request], count, inputs.sampling)
    drawn = dict(tokens=token, sampler_logp=sampler_logp, model_logp=model_logp, loss_mask=True, version=inputs.version)
    row = jnp.where(running, request, NOWHERE)
    written = {name: getattr(state.rows, name).at[row, column].set(new, mode="drop") for name, new in drawn.items()}
    if state.rows.routes is not None and routes is not None:
        written["routes"] = state.rows.routes.at[row, state.position].set(routes[:, 0], mode="drop")
    stopped = running & (token[:, None] == inputs.sampling.stop_ids).any(-1)  # [slots]
    matched = state.matched
    if inputs.stops is not None:
        matched = jnp.where(column == state.turn[request], state.turn_matched[request], matched)
        matched = inputs.stops[matched, token]
        stopped |= running & (matched == inputs.stops.shape[0])
    done = running & (stopped | (count + 1 >= state.limit[request]))
    if sampler.conversation:  # a row that began anew may draw what it drew before
        done &= column >= state.turn[request]
    return dataclasses.replace(
        state,
        pools=pools,
        rows=dataclasses.replace(state.rows, **written),
        position=state.position + running,
        done=done,
        stopped=stopped,
        matched=matched,
        step=state.step + 1,
    )
