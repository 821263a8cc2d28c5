"""Continuous batching as functions on explicit state: prefill, refill, decode_step, collect, advance.

N requests wait in a queue, a slot runs one at a time, and idle slots are refilled inside the jitted program. On a mesh
these functions see one data shard (`parallel.over_rows`): its own queue, prompts and slots. Shards agree on nothing but
the conditions of loops, so that all of them take the same number of steps.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rpg_jax import parallel
from rpg_jax.models import Model
from rpg_jax.models.attention import causal_attention
from rpg_jax.sampling.cache import KVCache, Prefix, attend, empty_cache, insert, write
from rpg_jax.sampling.draw import draw, token_logp, token_uniforms
from rpg_jax.sampling.filters import filter_threshold
from rpg_jax.types import Params, Prompts, pytree

STOP_IDS = 8  # size of Sampling.stop_ids


@pytree
class Requests:
    """The queue: one row for each response to make."""

    prompt: jax.Array  # i32[N], row of the prompts
    key: jax.Array  # uint32[N, 2], threefry key of its noise
    max_new: jax.Array  # i32[N], most tokens; 0 marks padding, which is not run


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
            raise ValueError(f"temperature is {temperature}; it must be at least 0 (0 is greedy)")
        if top_k < 0 or top_k != int(top_k):
            raise ValueError(f"top_k is {top_k}; it must be a whole number, 0 to keep every token")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1 (1 keeps every token)")
        if len(stop_ids) > STOP_IDS or any(token < 0 for token in stop_ids):
            raise ValueError(f"stop_ids are {tuple(stop_ids)}; give at most {STOP_IDS}, none negative")
        padded = list(stop_ids) + [-1] * (STOP_IDS - len(stop_ids))
        return Sampling(
            jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.asarray(padded, dtype=jnp.int32)
        )


@pytree
class Responses:
    """Tokens and their log-probs; a row is a slot's ring of columns, or a request's finished response."""

    tokens: jax.Array  # i32[rows, R]
    sampler_logp: jax.Array  # f32[rows, R]
    model_logp: jax.Array  # f32[rows, R]


@pytree
class DecodeState:
    """Everything that decoding reads and writes. R, the ring's length, is the most tokens that a response may have."""

    cache: KVCache
    ring: Responses  # [slots, R], what running requests have drawn, at the columns shared with the cache's ring
    token: jax.Array  # i32[slots], next input
    position: jax.Array  # i32[slots], its index in the row
    request: jax.Array  # i32[slots], -1 idle
    count: jax.Array  # i32[slots], tokens drawn for this request: the index of the next one's noise
    done: jax.Array  # bool[slots], the request is complete; it is collected before the next step
    stopped: jax.Array  # bool[slots], a stop token made it complete
    step: jax.Array  # i32[], decode steps taken; the next one writes column step mod R of the ring
    head: jax.Array  # i32[1] on each data shard, the first request of its queue that no slot has taken
    responses: Responses  # [N, R]
    length: jax.Array  # i32[N]
    finished: jax.Array  # bool[N], ended by a stop token


def start(model: Model, requests: Requests, prefix: Prefix, slots: int, ring: int) -> DecodeState:
    """The state before the first step: every slot idle, every request in the queue."""
    rows, prompt_columns = requests.prompt.shape[0], prefix.v[0].shape[2]

    def blank(rows):
        return Responses(*(jnp.zeros((rows, ring), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)))

    zeros = jnp.zeros(slots, jnp.int32)
    return DecodeState(
        cache=empty_cache(model, slots, prompt_columns + ring),
        ring=blank(slots),
        token=zeros,
        position=zeros,
        request=zeros - 1,
        count=zeros,
        done=zeros > 0,
        stopped=zeros > 0,
        step=jnp.int32(0),
        head=jnp.zeros(1, jnp.int32),
        responses=blank(rows),
        length=jnp.zeros(rows, jnp.int32),
        finished=jnp.zeros(rows, bool),
    )


def prefill(model: Model, params: Params, prompts: Prompts, rows: int) -> Prefix:
    """Runs the prompts through the model, at most `rows` of them at a time, with no vocabulary projection.

    Args:
      params: unstacked tree; prompts: P rows.

    Returns:
      P rows.
    """

    def keep(layer, q, k, v):  # each [rows, Tp, heads, head_dim]; k and v are kept in the layout of `Prefix`
        return causal_attention(q, k, v), (jnp.moveaxis(k, 1, 3), jnp.moveaxis(v, 1, 2))

    def chunk(tokens):  # i32[rows, Tp]
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        _, kept = model.cached(params, tokens, positions, keep)
        return [k for k, _ in kept], [v for _, v in kept]

    count, columns = prompts.tokens.shape
    chunks = -(-count // rows)
    rows = -(-count // chunks)  # chunks of nearly equal size: the last one is hardly padded
    tokens = jnp.pad(prompts.tokens, ((0, chunks * rows - count), (0, 0)))
    k, v = jax.lax.map(chunk, tokens.reshape(chunks, rows, columns))  # of each layer [chunks, rows, kv_heads, ...]
    k, v = jax.tree.map(lambda x: x.reshape(chunks * rows, *x.shape[2:])[:count], (k, v))
    length = prompts.mask.sum(-1, dtype=jnp.int32)
    last = jnp.take_along_axis(prompts.tokens, length[:, None] - 1, axis=1)[:, 0]
    return Prefix(k, v, length, last)


def sample(
    logits: jax.Array, keys: jax.Array, counts: jax.Array, sampling: Sampling, model_temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws one token a row: temperature, then top-k, then top-p.

    Args:
      logits: f32[V, B]; keys: uint32[B, 2]; counts: i32[B], tokens drawn before; model_temperature: f32[].

    Returns:
      token i32[B]; sampler_logp f32[B], under the distribution drawn from (0 when greedy); model_logp f32[B], under
      softmax(logits / model_temperature).
    """

    def drawn(logits):
        threshold = filter_threshold(logits, sampling.temperature, sampling.top_k, sampling.top_p)
        return draw(logits, sampling.temperature, threshold, token_uniforms(keys, counts))

    def greedy(logits):
        return jnp.argmax(logits, axis=0).astype(jnp.int32), jnp.zeros(logits.shape[1:], logits.dtype)

    token, sampler_logp = jax.lax.cond(sampling.temperature > 0, drawn, greedy, logits)
    unfiltered = (sampling.top_k == 0) & (sampling.top_p == 1) & (sampling.temperature == model_temperature)
    model_logp = jax.lax.cond(
        unfiltered, lambda logits: sampler_logp, lambda logits: token_logp(logits / model_temperature, token), logits
    )
    return token, sampler_logp, model_logp


def decode_step(
    model: Model,
    params: Params,
    requests: Requests,
    sampling: Sampling,
    model_temperature: jax.Array,
    state: DecodeState,
) -> DecodeState:
    """Every slot reads one token and draws the next. Idle slots compute too, but nothing that they write is read."""
    running = state.request >= 0  # [slots]
    ring_column = state.step % state.ring.tokens.shape[1]
    column = state.cache.position.shape[1] - state.ring.tokens.shape[1] + ring_column
    position = jax.lax.dynamic_update_slice(
        state.cache.position, jnp.where(running, state.position, -1)[:, None], (0, column)
    )
    visible = position >= 0  # [slots, capacity]

    def write_and_attend(layer, q, k, v):  # each [slots, 1, heads, head_dim]
        keys, values = write(state.cache.k[layer], state.cache.v[layer], k, v, column)
        return attend(q, keys, values, visible), (keys, values)

    hidden, kept = model.cached(params, state.token[:, None], state.position[:, None], write_and_attend)
    request = jnp.maximum(state.request, 0)  # [slots], an index even where idle
    logits = model.logits(params, hidden[:, 0]).T  # [V, slots]
    drawn = sample(logits, requests.key[request], state.count, sampling, model_temperature)
    token, count = drawn[0], state.count + running
    ring = jax.tree.map(
        lambda ring, new: jax.lax.dynamic_update_slice(ring, new[:, None], (0, ring_column)),
        state.ring,
        Responses(*drawn),
    )
    stopped = running & (token[:, None] == sampling.stop_ids).any(-1)  # [slots]
    return dataclasses.replace(
        state,
        cache=KVCache([k for k, _ in kept], [v for _, v in kept], position),
        ring=ring,
        token=token,
        position=state.position + running,
        count=count,
        done=running & (stopped | (count >= requests.max_new[request])),
        stopped=stopped,
        step=state.step + 1,
    )


def collect(state: DecodeState) -> DecodeState:
    """Copies every complete response out of its slot's ring, and leaves the slot idle."""
    slots, ring = state.ring.tokens.shape
    order = jnp.argsort(~state.done, stable=True)  # [slots], complete ones first
    offsets = jnp.arange(ring)

    def copy(index, collected):
        responses, length, finished = collected
        slot = order[index]
        request, count = state.request[slot], state.count[slot]
        columns = (state.step - count + offsets) % ring  # [R]: it drew at each of the last `count` steps
        responses = jax.tree.map(
            lambda rows, rings: rows.at[request].set(jnp.where(offsets < count, rings[slot, columns], 0)),
            responses,
            state.ring,
        )
        return responses, length.at[request].set(count), finished.at[request].set(state.stopped[slot])

    responses, length, finished = jax.lax.fori_loop(
        0, state.done.sum(), copy, (state.responses, state.length, state.finished)
    )
    return dataclasses.replace(
        state,
        responses=responses,
        length=length,
        finished=finished,
        request=jnp.where(state.done, -1, state.request),
        done=jnp.zeros(slots, bool),
    )


def refill(requests: Requests, prefix: Prefix, state: DecodeState) -> DecodeState:
    """Every idle slot takes the next request of the queue, if there is one."""
    idle = state.request < 0  # all [slots] from here on
    candidate = state.head + jnp.cumsum(idle) - 1  # the n-th idle slot takes the n-th request that waits
    taken = idle & (candidate < requests.prompt.size)
    request = jnp.where(taken, candidate, state.request)
    prompt = requests.prompt[jnp.maximum(request, 0)]
    order = jnp.argsort(~taken, stable=True)  # refilled slots first
    cache = jax.lax.fori_loop(
        0, taken.sum(), lambda index, cache: insert(cache, prefix, prompt[order[index]], order[index]), state.cache
    )
    return dataclasses.replace(
        state,
        cache=cache,
        token=jnp.where(taken, prefix.last[prompt], state.token),
        position=jnp.where(taken, prefix.length[prompt] - 1, state.position),
        request=request,
        count=jnp.where(taken, 0, state.count),
        done=taken & (requests.max_new[jnp.maximum(request, 0)] == 0),
        stopped=state.stopped & ~taken,
        head=state.head + taken.sum(),
    )


def agreed(*conditions: jax.Array) -> tuple[jax.Array, ...]:
    """Whether each condition, bool[], holds on any data shard; all shards get the same answers."""
    held = jax.lax.pmax(jnp.stack(conditions).astype(jnp.int32), parallel.ROW_AXES)
    return tuple(held > 0)


def unfinished(requests: Requests, state: DecodeState) -> jax.Array:
    """Whether a request waits or runs on any shard: bool[]."""
    return agreed((state.head < requests.prompt.size).any() | (state.request >= 0).any())[0]


def undisturbed(state: DecodeState) -> jax.Array:
    """Whether on all shards together some slot runs and none is complete: bool[]."""
    running, done = agreed((state.request >= 0).any(), state.done.any())
    return running & ~done


def advance(
    model: Model, params: Params, requests: Requests, prefix: Prefix, sampling: Sampling,
    model_temperature: jax.Array, state: DecodeState, max_steps: jax.Array,
) -> tuple[jax.Array, DecodeState]:  # fmt: skip
    """Decodes until all requests are complete, or for at most `max_steps` steps (i32[], traced).

    The outer loop collects complete responses and refills their slots; the inner one decodes until some response is
    complete. Both carry whether to go on beside the state: in a loop's condition, the collective that decides it would
    not be ordered with those of the body.

    Returns:
      whether requests are left, bool[], and the state.
    """
    end = state.step + max_steps

    def goes_on(carry):
        return carry[0] & (carry[1].step < end)

    def decode(carry):
        state = decode_step(model, params, requests, sampling, model_temperature, carry[1])
        return undisturbed(state), state

    def turn_over_and_decode(carry):
        state = refill(requests, prefix, collect(carry[1]))
        _, state = jax.lax.while_loop(goes_on, decode, (undisturbed(state), state))
        return unfinished(requests, state), state

    return jax.lax.while_loop(goes_on, turn_over_and_decode, (unfinished(requests, state), state))
