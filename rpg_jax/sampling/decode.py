"""One step of decoding as a function on explicit state: the queue, the slots, their pages, and what they have drawn.

N requests wait in a queue, and a slot runs one at a time. Keys and values lie in pages (`pages`, `paged_attention`); on
CPU, where copying pages together takes longer than attention, those of short sequences lie together for each slot. On a
mesh these functions see one data shard (`parallel.over_rows`): its own queue, prompts, slots and pages. How requests
come to slots and pages to requests is in `batching`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax import InputError, parallel
from rpg_jax.models import Model
from rpg_jax.sampling import pages
from rpg_jax.sampling.draw import draw, token_logp, token_uniforms
from rpg_jax.sampling.filters import filter_threshold
from rpg_jax.sampling.paged_attention import Kernel, Pool
from rpg_jax.sampling.pages import NOWHERE
from rpg_jax.sampling.running_softmax import table_width
from rpg_jax.types import Params, Prompts, pytree

STOP_IDS = 8  # size of Sampling.stop_ids
WAITING, RUNNING, COMPLETE = 0, 1, 2  # a request's status


@pytree
class Sampling:
    """Settings of the drawn distribution, as traced values: new ones never recompile. Build it with `make`."""

    temperature: jax.Array  # f32[], 0 is greedy
    top_k: jax.Array  # i32[], 0 is off
    top_p: jax.Array  # f32[], 1 is off
    stop_ids: jax.Array  # i32[STOP_IDS], padded with -1

    @staticmethod
    def make(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, stop_ids: Sequence[int] = ()) -> "Sampling":
        """Arrays of these host values; raises ValueError for one that is out of range."""
        if not temperature >= 0:
            raise InputError(f"temperature is {temperature}; it must be at least 0 (0 is greedy)")
        if top_k < 0 or top_k != int(top_k):
            raise InputError(f"top_k is {top_k}; it must be a whole number, 0 to keep every token")
        if not 0 < top_p <= 1:
            raise InputError(f"top_p is {top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if len(stop_ids) > STOP_IDS or any(token < 0 for token in stop_ids):
            raise InputError(f"stop_ids are {tuple(stop_ids)}; give at most {STOP_IDS}, none negative")
        padded = list(stop_ids) + [-1] * (STOP_IDS - len(stop_ids))
        return Sampling(
            jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.asarray(padded, dtype=jnp.int32)
        )


@pytree
class Requests:
    """The queue: one row for each response to make, prompt-major, the same number for each prompt."""

    prompt: jax.Array  # i32[N], row of the prompts
    key: jax.Array  # uint32[N, 2], threefry key of its noise
    max_new: jax.Array  # i32[N], most tokens; 0 marks padding, which is not run
    drawn: jax.Array | None = None  # i32[N], tokens that were drawn before this rollout; None for none


@pytree
class Responses:
    """Tokens and their log-probs, one row a request."""

    tokens: jax.Array  # i32[N, R]
    sampler_logp: jax.Array  # f32[N, R]
    model_logp: jax.Array  # f32[N, R]


@pytree
class DecodeState:
    """What decoding reads and writes. W pages hold the longest sequence; R is the most tokens of a response."""

    pools: list[Pool]  # keys and values of each layer, in pages
    sequences: list[Pool]  # those of short sequences again, one long page a slot, read in place; [] if pages are read
    free: pages.Free
    table: jax.Array  # i32[slots, W], the pages of each slot: full ones of its prompt, then its own
    shared: jax.Array  # i32[slots], entries that are the prompt's
    held: jax.Array  # i32[slots], entries in use
    prompt_table: jax.Array  # i32[P, W]
    prompt_ready: jax.Array  # bool[P], prefilled and held
    token: jax.Array  # i32[slots], next input
    position: jax.Array  # i32[slots], its index in the row
    request: jax.Array  # i32[slots], -1 idle
    count: jax.Array  # i32[slots], tokens drawn for this request: the index of the next one's noise
    done: jax.Array  # bool[slots], the request is complete; it is collected before the next step
    stopped: jax.Array  # bool[slots], a stop token made it complete
    step: jax.Array  # i32[], decode steps taken
    preemptions: jax.Array  # i32[1] on each data shard, requests that went back to the queue
    status: jax.Array  # i32[N]
    responses: Responses
    length: jax.Array  # i32[N], most tokens that were drawn by the time when the request left a slot
    finished: jax.Array  # bool[N], ended by a stop token


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What stays the same during a rollout and is known when it is compiled; counts are those of one data shard."""

    model: Model
    kernel: Kernel
    cache_dtype: Any  # of keys and values
    page_size: int  # tokens of a page
    chunk: int  # tokens of a prompt that are prefilled at a time
    prefill_rows: int  # prompts prefilled at a time
    tiles: tuple[int, ...]  # slots that the model decodes at a time, the largest first; () is all of them
    sequence_tokens: int  # of a page of DecodeState.sequences, for slots that are all in one tile; 0 for none


@pytree
class Inputs:
    """The arrays that a rollout reads."""

    params: Params  # unstacked
    prompts: Prompts
    requests: Requests
    sampling: Sampling
    model_temperature: jax.Array  # f32[]
    until: jax.Array  # i32[], prompts over all shards whose requests are to be complete; the rollout ends with them
    must: jax.Array  # bool[P], prompts that have to be among them
    turns: Any = ()  # `Model.turns` of all positions, which `prepared` adds


def start(
    sampler: Sampler, prompts: Prompts, requests: Requests, slots: int, max_new: int, cache_pages: int
) -> DecodeState:
    """The state before the first step: every slot idle, every request in the queue, every page free."""
    config, (prompt_count, columns) = sampler.model.config, prompts.tokens.shape
    width = table_width(columns + max_new, sampler.page_size)
    rows = requests.prompt.shape[0]
    zeros, none = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, bool)
    in_place = sampler.sequence_tokens > 0 and slots <= sampler.tiles[0]

    def empty(pages, page_size):
        return [sampler.kernel.empty(config, sampler.cache_dtype, pages, page_size) for _ in range(config.layers)]

    return DecodeState(
        pools=empty(cache_pages, sampler.page_size),
        sequences=empty(slots, sampler.sequence_tokens) if in_place else [],
        free=pages.all_free(cache_pages),
        table=jnp.zeros((slots, width), jnp.int32),
        shared=zeros,
        held=zeros,
        prompt_table=jnp.zeros((prompt_count, width), jnp.int32),
        prompt_ready=jnp.zeros(prompt_count, bool),
        token=zeros,
        position=zeros,
        request=zeros - 1,
        count=zeros,
        done=none,
        stopped=none,
        step=jnp.int32(0),
        preemptions=jnp.zeros(1, jnp.int32),
        status=jnp.where(requests.max_new > 0, WAITING, COMPLETE),
        responses=Responses(*(jnp.zeros((rows, max_new), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32))),
        length=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
    )


def prepared(sampler: Sampler, inputs: Inputs, state: DecodeState) -> Inputs:
    """The inputs with what every step needs alike, to be called outside of loops."""
    positions = jnp.arange(state.table.shape[1] * sampler.page_size)
    turns = jax.tree.map(lambda x: x[0], sampler.model.turns(positions[None]))  # [positions, head_dim / 2] each
    return dataclasses.replace(inputs, turns=turns)


def extend(
    sampler: Sampler, inputs: Inputs, pools: list[Pool], table: jax.Array | None, tokens: jax.Array, first: jax.Array,
    count: jax.Array, page_size: int,
) -> tuple[jax.Array, list[Pool]]:  # fmt: skip
    """Runs C more tokens of each row through the model, and keeps their keys and values.

    Args:
      pools: of pages of `page_size` tokens; tokens: i32[R, C].
      table: i32[R, W], pages of each row; None where they are [[0], [1], ...], which the kernel then reads in place.
      first: i32[R], position of tokens[:, 0]; count: i32[R], how many of the C are meant, 0 for an idle row.

    Returns:
      final hidden states [R, C, hidden] and the pools.
    """
    steps = jnp.arange(tokens.shape[1])
    position = first[:, None] + steps  # [R, C]
    if table is None:
        page = jnp.broadcast_to(jnp.arange(tokens.shape[0])[:, None], tokens.shape)
    else:
        page = jnp.take_along_axis(table, jnp.minimum(position // page_size, table.shape[1] - 1), axis=1)
    page = jnp.where(steps < count[:, None], page, NOWHERE).reshape(-1)
    offset = (position % page_size).reshape(-1)
    start = jnp.where(count > 0, first, -1)

    def write_and_attend(layer, q, k, v):  # each [R, C, heads, head_dim]
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        pool = sampler.kernel.write(pools[layer], k, v, page, offset)
        return sampler.kernel.attend(q, pool, table, start, page_size), pool

    turns = jax.tree.map(lambda x: jnp.take(x, position, axis=0, mode="clip"), inputs.turns)  # [R, C, head_dim / 2]
    return sampler.model.cached(inputs.params, tokens, turns, write_and_attend)


def sample(
    logits: jax.Array, keys: jax.Array, counts: jax.Array, sampling: Sampling, model_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token a row: temperature, then top-k, then top-p.

    Args:
      logits: f32[B, V]; keys: uint32[B, 2]; counts: i32[B], tokens drawn before; model_temperature: f32[].

    Returns:
      token i32[B]; sampler_logp f32[B], under the distribution drawn from (0 when greedy); model_logp f32[B], under
      softmax(logits / model_temperature).
    """

    def drawn(logits):
        threshold = filter_threshold(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        return draw(logits, sampling.temperature, threshold, token_uniforms(keys, counts))

    def greedy(logits):
        return jnp.argmax(logits, axis=1).astype(jnp.int32), jnp.zeros(logits.shape[:1], logits.dtype)

    token, sampler_logp = jax.lax.cond(sampling.temperature > 0, drawn, greedy, logits)
    unfiltered = (sampling.top_k == 0) & (sampling.top_p == 1) & (sampling.temperature == model_temperature)
    with jax.named_scope("filters"):
        model_logp = jax.lax.cond(
            unfiltered,
            lambda logits: sampler_logp,
            lambda logits: token_logp(logits / model_temperature, token),
            logits,
        )
    return token, sampler_logp, model_logp


def first_true(mask: jax.Array, count: int) -> jax.Array:
    """i32[count], the first indices at which bool[n] is true, in ascending order; n where there are no more."""
    order = jnp.sort(jnp.where(mask, jnp.arange(mask.size), mask.size))
    return jnp.take(order, jnp.arange(count), mode="fill", fill_value=mask.size)


def in_tiles(
    function: Callable, carry: Any, rows: Any, live: jax.Array, results: Any, sizes: Sequence[int]
) -> tuple[Any, Any]:
    """`function(carry, rows) -> (carry, results)` in tiles of the rows that are live, so that others cost nothing.

    Args:
      rows: a tree of [R, ...]; live: bool[R]; results: a tree of [R, ...], what the rows of no tile keep.
      sizes: rows of a tile, the largest first; smaller tiles do what would leave more than half of a larger one empty.
        None of them is all rows at once, live or not, and so are rows of which the smallest tile is half or more:
        each size is compiled for itself, which takes longer than they would save.
    """
    count = live.size
    if not sizes or count <= min(2 * sizes[-1], sizes[0]):
        return function(carry, rows)
    source = first_true(live, count + sizes[0])  # live rows; beyond them R, where nothing is read or kept
    total = jax.lax.pmax(live.sum(), parallel.ROW_AXES)  # the model's collectives want the same turns on all shards

    def goes_on(size, state):
        return total - state[0] > (0 if size == sizes[-1] else size // 2)

    def turn(size, state):
        begin, carry, results = state
        part = jax.lax.dynamic_slice_in_dim(source, begin, size)  # [T]
        carry, new = function(carry, jax.tree.map(lambda x: jnp.take(x, part, axis=0, mode="fill", fill_value=0), rows))
        results = jax.tree.map(lambda x, y: x.at[part].set(y, mode="drop"), results, new)
        return begin + size, carry, results

    def single_turn(state):  # of all rows in their order, so that what they read need not be gathered
        return (total, *function(state[1], rows))

    state = jnp.int32(0), carry, results
    for size in sizes:
        body = single_turn if size >= count else partial(turn, size)
        state = jax.lax.while_loop(partial(goes_on, size), body, state)
    return state[1:]


def decode_step(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Every running slot reads one token and draws the next. What idle slots compute beside is not kept."""
    running = state.request >= 0  # [slots]
    request = jnp.maximum(state.request, 0)  # [slots], an index even where idle
    keys = inputs.requests.key[request]
    if state.sequences:
        field, table, page_size = "sequences", jnp.arange(running.size)[:, None], sampler.sequence_tokens
    else:
        field, table, page_size = "pools", state.table, sampler.page_size

    def draw_next(pools, rows):
        table, token, position, running, key, count = rows
        in_place = state.sequences and token.size == state.token.size
        hidden, pools = extend(
            sampler, inputs, pools, None if in_place else table, token[:, None], position, running, page_size
        )
        logits = sampler.model.logits(inputs.params, hidden[:, 0])  # [T, V]
        return pools, Responses(*sample(logits, key, count, inputs.sampling, inputs.model_temperature))

    rows = table, state.token, state.position, running.astype(jnp.int32), keys, state.count
    nothing = jnp.zeros(running.shape, jnp.float32)
    drawn = Responses(state.token, nothing, nothing)
    pools, drawn = in_tiles(draw_next, getattr(state, field), rows, running, drawn, sampler.tiles)
    row = jnp.where(running, request, NOWHERE)
    responses = jax.tree.map(lambda rows, new: rows.at[row, state.count].set(new, mode="drop"), state.responses, drawn)
    token, count = drawn.tokens, state.count + running
    stopped = running & (token[:, None] == inputs.sampling.stop_ids).any(-1)  # [slots]
    return dataclasses.replace(
        state,
        **{field: pools},
        responses=responses,
        token=token,
        position=state.position + running,
        count=count,
        done=running & (stopped | (count >= inputs.requests.max_new[request])),
        stopped=stopped,
        step=state.step + 1,
    )
