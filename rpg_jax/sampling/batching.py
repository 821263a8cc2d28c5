"""Continuous batching: complete responses leave, pages change hands, waiting requests start, inside the jitted loop.

A prompt is prefilled once, and its full pages are shared by its responses. A response takes a page when it writes the
first token there. When none is free, the youngest request gives its pages back and waits again; its noise is keyed by
its own number and by token indices, so it draws the same tokens later. What a request draws therefore depends neither
on slots nor on pages.

Data shards agree on nothing but the conditions of loops that compute with the model, so that all of them take the same
number of steps.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax import parallel
from rpg_jax.sampling import pages
from rpg_jax.sampling.decode import (
    COMPLETE,
    RUNNING,
    WAITING,
    DecodeState,
    Inputs,
    Requests,
    Sampler,
    decode_step,
    extend,
    first_true,
    prepared,
)
from rpg_jax.sampling.paged_attention import Pool
from rpg_jax.sampling.pages import NOWHERE
from rpg_jax.types import Prompts, pytree


def leave(state: DecodeState, slots: jax.Array, status: int) -> DecodeState:
    """The slots that are true in bool[slots] give their own pages back and are idle; their requests get `status`.

    What they have drawn stays, also of a request that will draw the same tokens once more.
    """
    free = pages.give_back(state.free, state.table, state.shared, jnp.where(slots, state.held, state.shared))
    row = jnp.where(slots, state.request, NOWHERE)
    return dataclasses.replace(
        state,
        free=free,
        status=state.status.at[row].set(status, mode="drop"),
        length=state.length.at[row].max(state.count, mode="drop"),
        request=jnp.where(slots, -1, state.request),
        done=state.done & ~slots,
    )


def prompt_tokens(prompts: Prompts) -> jax.Array:
    """i32[P], prompt tokens whose keys and values are prefilled: all but the last, which is the first decode input."""
    return prompts.mask.sum(-1, dtype=jnp.int32) - 1


def drop_prompts(sampler: Sampler, prompts: Prompts, state: DecodeState, drop: jax.Array) -> DecodeState:
    """The prompts that are true in bool[P] give their pages back."""
    drop &= state.prompt_ready
    held = jnp.where(drop, -(-prompt_tokens(prompts) // sampler.page_size), 0)  # [P]
    free = pages.give_back(state.free, state.prompt_table, jnp.zeros_like(held), held)
    return dataclasses.replace(state, free=free, prompt_ready=state.prompt_ready & ~drop)


def collect(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Complete responses leave their slots, and prompts that no request needs any more leave the cache."""
    row = jnp.where(state.done, state.request, NOWHERE)
    state = dataclasses.replace(state, finished=state.finished.at[row].set(state.stopped, mode="drop"))
    state = leave(state, state.done, COMPLETE)
    needed = (state.status != COMPLETE).reshape(state.prompt_ready.size, -1).any(1)  # [P]
    return drop_prompts(sampler, inputs.prompts, state, ~needed)


def needs_page(sampler: Sampler, state: DecodeState) -> jax.Array:
    """bool[slots], whether the next token begins a page that the slot does not hold yet."""
    return (state.request >= 0) & (state.position >= state.held * sampler.page_size)


def idle_prompts(state: DecodeState) -> jax.Array:
    """bool[P], ready prompts of which no response runs, except that of the first request that waits."""
    by_prompt = state.status.reshape(state.prompt_ready.size, -1)  # [P, samples]
    first = jnp.arange(state.prompt_ready.size) == jnp.argmax((by_prompt == WAITING).any(1))
    return state.prompt_ready & ~first & ~(by_prompt == RUNNING).any(1)


def grant(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Every running slot gets the page that it needs; the youngest requests go back to the queue where none is left."""

    def short(state):
        return needs_page(sampler, state).sum() > state.free.count[0]

    def preempt(state):
        youngest = jnp.arange(state.request.size) == jnp.argmax(state.request)
        return dataclasses.replace(leave(state, youngest, WAITING), preemptions=state.preemptions + 1)

    state = drop_prompts(sampler, inputs.prompts, state, idle_prompts(state) & short(state))
    state = jax.lax.while_loop(short, preempt, state)
    needs = needs_page(sampler, state)
    held = state.held + needs
    free, table = pages.take(state.free, state.table, state.held, held)
    return dataclasses.replace(state, free=free, table=table, held=held)


@pytree
class Admission:
    """Which requests idle slots take next, and which prompts are prefilled before."""

    request: jax.Array  # i32[slots]; the first `count` are meant, in the order of the queue
    count: jax.Array  # i32[]
    load: jax.Array  # bool[P], prompts to prefill: those that these requests need, and others that fit beside
    waits: jax.Array  # bool[], whether one of these requests needs a prompt that is not ready


def drawn_before(requests: Requests, request: jax.Array) -> jax.Array:
    """Tokens that these requests had drawn before this rollout: i32[n] for i32[n]."""
    return jnp.zeros_like(request) if requests.drawn is None else requests.drawn[request]


def admission(sampler: Sampler, inputs: Inputs, state: DecodeState) -> Admission:
    """The longest run of waiting requests, in order, for which idle slots and free pages suffice.

    A request starts with pages for what it had drawn before this rollout, and only if another page is left for every
    response that may still need one, so that it is not sent back at once; if nothing runs, it starts anyway.
    """
    size, requests, prompts = sampler.page_size, inputs.requests, state.prompt_ready.size
    tokens = prompt_tokens(inputs.prompts)  # [P]
    running = state.request >= 0  # [slots]
    rank = jnp.arange(running.size)
    candidate = first_true(state.status == WAITING, rank.size)  # [slots]
    valid = (rank < (~running).sum()) & (candidate < state.status.size)
    request = jnp.minimum(candidate, state.status.size - 1)
    prompt = requests.prompt[request]

    def own_pages(request, count):  # of a response when `count` tokens are drawn, beside full ones of its prompt
        begin = tokens[requests.prompt[request]]
        return (begin + count) // size + 1 - begin // size

    def most(request):
        return own_pages(request, requests.max_new[request] - 1)

    prompt_pages = -(-tokens // size)  # [P]
    leads = jnp.concatenate([jnp.ones(1, bool), prompt[1:] != prompt[:-1]])  # the first of its prompt
    load = jnp.where(leads & ~state.prompt_ready[prompt], prompt_pages[prompt], 0)
    own = state.held - state.shared
    may_grow = running & (own < most(jnp.maximum(state.request, 0)))
    budget = state.free.count[0] - may_grow.sum()
    least = own_pages(request, drawn_before(requests, request))
    total = jnp.cumsum(jnp.where(valid, least + (most(request) > least) + load, 0))  # [slots], with a page to grow
    alone = ~running.any() & (rank == 0) & (least + load <= state.free.count[0])
    starts = valid & ((total <= budget) | alone)
    starting = jnp.zeros(prompts, bool).at[jnp.where(starts, prompt, NOWHERE)].set(True, mode="drop")
    needed = starting & ~state.prompt_ready
    beside = (state.status == WAITING).reshape(prompts, -1).any(1) & ~state.prompt_ready & ~needed
    left = budget - jnp.max(jnp.where(starts, total, 0))
    beside &= jnp.cumsum(jnp.where(beside, prompt_pages, 0)) <= left
    return Admission(request, starts.sum(), needed | beside, needed.any())


def load_prompts(sampler: Sampler, inputs: Inputs, state: DecodeState, load: jax.Array) -> DecodeState:
    """Prefills the first `prefill_rows` of the prompts that are true in bool[P]; there must be pages for them."""
    columns = inputs.prompts.tokens.shape[1]
    target = first_true(load, sampler.prefill_rows)  # [R]
    load &= jnp.arange(load.size) <= target[-1]
    row = jnp.minimum(target, load.size - 1)
    tokens = jnp.where(load, prompt_tokens(inputs.prompts), 0)  # [P]
    held = -(-tokens // sampler.page_size)
    free, table = pages.take(state.free, state.prompt_table, jnp.zeros_like(held), held)
    tokens = jnp.where(target < load.size, tokens[row], 0)  # [R]
    padding = -columns % sampler.chunk
    text = jnp.pad(inputs.prompts.tokens[row], ((0, 0), (0, padding)))  # [R, columns rounded up]

    def chunk(carry):
        index, pools = carry
        begin = index * sampler.chunk
        part = jax.lax.dynamic_slice_in_dim(text, begin, sampler.chunk, axis=1)
        meant = jnp.clip(tokens - begin, 0, sampler.chunk)
        first = jnp.full_like(tokens, begin)
        _, pools = extend(sampler, inputs, pools, table[row], part, first, meant, sampler.page_size)
        return index + 1, pools

    chunks = jax.lax.pmax(-(-jnp.max(tokens) // sampler.chunk), parallel.ROW_AXES)
    with jax.named_scope("prefill"):  # by which plans tell it from decoding
        _, pools = jax.lax.while_loop(lambda carry: carry[0] < chunks, chunk, (jnp.int32(0), state.pools))
    ready = state.prompt_ready | load
    return dataclasses.replace(state, pools=pools, free=free, prompt_table=table, prompt_ready=ready)


def recompute(
    sampler: Sampler, inputs: Inputs, pools: list[Pool], table: jax.Array, begin: jax.Array, drawn: jax.Array,
    text: jax.Array,
) -> list[Pool]:  # fmt: skip
    """Fills in the keys and values of what requests had drawn before this rollout, under its own parameters.

    Args:
      table: i32[slots, W]; begin: i32[slots], position of the text; drawn: i32[slots], 0 where nothing is to be done.
      text: i32[slots, 1 + R], the last token of the prompt, and the response.
    """

    def chunk(carry):
        """The next chunk of the first `prefill_rows` slots that are not filled in yet."""
        _, done, pools = carry
        target = first_true(done < drawn, sampler.prefill_rows)  # [R]
        slot = jnp.minimum(target, done.size - 1)
        meant = jnp.where(target < done.size, jnp.minimum(drawn - done, sampler.chunk)[slot], 0)
        columns = jnp.minimum(done[slot, None] + jnp.arange(sampler.chunk), text.shape[1] - 1)  # [R, C]
        part = jnp.take_along_axis(text[slot], columns, axis=1)
        _, pools = extend(sampler, inputs, pools, table[slot], part, (begin + done)[slot], meant, sampler.page_size)
        done = done.at[target].add(meant, mode="drop")
        return agreed((done < drawn).any())[0], done, pools

    first = agreed((drawn > 0).any())[0], jnp.zeros_like(drawn), pools
    with jax.named_scope("prefill"):
        return jax.lax.while_loop(lambda carry: carry[0], chunk, first)[2]


def read_pages(
    sampler: Sampler, sequences: list[Pool], pools: list[Pool], table: jax.Array, slots: jax.Array
) -> list[Pool]:
    """`DecodeState.sequences`, with those of the slots that are true in bool[slots] read from pages, i32[slots, W]."""
    order = first_true(slots, slots.size)

    def read(n, sequences):
        slot = order[n]
        new = [sampler.kernel.joined(pool, table[slot][None]) for pool in pools]
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, 0), sequences, new)

    return jax.lax.fori_loop(0, slots.sum(), read, sequences)


def admit(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Idle slots take the next requests of the queue, as far as pages suffice; their prompts are prefilled before."""
    size, requests = sampler.page_size, inputs.requests

    def plan(state):
        """(whether some shard prefills first, what to admit, whether prompts that nobody runs must make room)."""
        next_ones = admission(sampler, inputs, state)
        stuck = (state.request < 0).all() & (next_ones.count == 0) & idle_prompts(state).any()
        return agreed(next_ones.waits | stuck)[0], next_ones, stuck

    def load(carry):
        (_, next_ones, stuck), state = carry
        state = drop_prompts(sampler, inputs.prompts, state, idle_prompts(state) & stuck)
        state = load_prompts(sampler, inputs, state, next_ones.load & ~stuck)
        return plan(state), state

    (_, admitted, _), state = jax.lax.while_loop(lambda carry: carry[0][0], load, (plan(state), state))
    idle = state.request < 0
    rank = jnp.cumsum(idle) - 1
    takes = idle & (rank < admitted.count)  # [slots]
    request = admitted.request[rank]
    row = jnp.where(takes, request, NOWHERE)
    prompt, drawn = requests.prompt[request], drawn_before(requests, request)
    tokens = prompt_tokens(inputs.prompts)[prompt]  # [slots]
    full = tokens // size  # pages that it shares with its prompt; a page of its own takes what the last one holds
    held = (tokens + drawn) // size + 1
    table = jnp.where(takes[:, None], state.prompt_table[prompt], state.table)
    source = jnp.take_along_axis(table, full[:, None], axis=1)[:, 0]
    free, table = pages.take(state.free, table, full, jnp.where(takes, held, full))
    target = jnp.take_along_axis(table, full[:, None], axis=1)[:, 0]
    copied = takes & (tokens % size > 0)
    order = first_true(copied, copied.size)

    def copy(n, pools):
        return [sampler.kernel.copy(pool, source[order[n]], target[order[n]]) for pool in pools]

    pools = jax.lax.fori_loop(0, copied.sum(), copy, state.pools)
    token = jnp.take_along_axis(inputs.prompts.tokens[prompt], tokens[:, None], axis=1)  # [slots, 1], the next input
    if requests.drawn is not None:
        text = jnp.concatenate([token, state.responses.tokens[request]], axis=1)  # [slots, 1 + R]
        pools = recompute(sampler, inputs, pools, table, tokens, jnp.where(takes, drawn, 0), text)
        token = jnp.take_along_axis(text, drawn[:, None], axis=1)
    sequences = read_pages(sampler, state.sequences, pools, table, takes) if state.sequences else []

    def put(new, old):
        return jnp.where(takes, new, old)

    return dataclasses.replace(
        state,
        pools=pools,
        sequences=sequences,
        free=free,
        table=table,
        shared=put(full, state.shared),
        held=put(held, state.held),
        token=put(token[:, 0], state.token),
        position=put(tokens + drawn, state.position),
        request=put(request, state.request),
        count=put(drawn, state.count),
        stopped=put(False, state.stopped),
        status=state.status.at[row].set(RUNNING, mode="drop"),
    )


def agreed(*conditions: jax.Array) -> tuple[jax.Array, ...]:
    """Whether each condition, bool[], holds on any data shard; all shards get the same answers."""
    held = jax.lax.pmax(jnp.stack(conditions).astype(jnp.int32), parallel.ROW_AXES)
    return tuple(held > 0)


def unfinished(inputs: Inputs, state: DecodeState) -> jax.Array:
    """Whether too few prompts have all of their requests complete, over all shards, or one that must is not: bool[]."""
    complete = (state.status == COMPLETE).reshape(state.prompt_ready.size, -1).all(1)  # [P]
    counts = jnp.stack([complete.sum(), (inputs.must & ~complete).sum()])
    count, missing = jax.lax.psum(counts, parallel.ROW_AXES)
    return (count < inputs.until) | (missing > 0)


def undisturbed(sampler: Sampler, state: DecodeState) -> jax.Array:
    """Whether on all shards together some slot runs, and none is complete or needs a page: bool[]."""
    running, disturbed = agreed((state.request >= 0).any(), (state.done | needs_page(sampler, state)).any())
    return running & ~disturbed


def advance(
    sampler: Sampler, inputs: Inputs, state: DecodeState, max_steps: jax.Array
) -> tuple[jax.Array, DecodeState]:
    """Decodes until enough requests are complete, or for at most `max_steps` steps (i32[], traced).

    The outer loop grants pages, refills slots and collects complete responses; the inner one decodes until some
    response is complete or needs a page. Both carry whether to go on beside the state: in a loop's condition, the
    collective that decides it would not be ordered with those of the body.

    Returns:
      whether requests are left, bool[], and the state.
    """
    end, inputs = state.step + max_steps, prepared(sampler, inputs, state)

    def goes_on(carry):
        return carry[0] & (carry[1].step < end)

    def decode(carry):
        state = decode_step(sampler, inputs, carry[1])
        return undisturbed(sampler, state), state

    def turn_over(carry):
        state = admit(sampler, inputs, grant(sampler, inputs, carry[1]))
        _, state = jax.lax.while_loop(goes_on, decode, (undisturbed(sampler, state), state))
        state = collect(sampler, inputs, state)
        return unfinished(inputs, state), state

    return jax.lax.while_loop(goes_on, turn_over, (unfinished(inputs, state), state))
