"""Continuous batching: complete rows leave, pages change hands, waiting rows start, inside the jitted loop.

A prompt is prefilled once, and its full pages are shared by its rows. A row takes a page when it writes the first
token there. When none is free, the youngest row gives its pages back and waits again; its noise is keyed by its own
number and by token indices, so it draws the same tokens later. What a row draws therefore does not depend on pages.

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
    ENDED,
    RUNNING,
    WAITING,
    DecodeState,
    Inputs,
    Sampler,
    decode_step,
    extend,
    prepared,
)
from rpg_jax.sampling.pages import NOWHERE
from rpg_jax.types import pytree


def first_true(mask: jax.Array, count: int) -> jax.Array:
    """i32[count], the first indices at which bool[n] is true, in ascending order; n where there are no more."""
    order = jnp.sort(jnp.where(mask, jnp.arange(mask.size), mask.size))
    return jnp.take(order, jnp.arange(count), mode="fill", fill_value=mask.size)


def leave(state: DecodeState, slots: jax.Array, status: int | jax.Array) -> DecodeState:
    """The slots that are true in bool[slots] give their own pages back and are idle; their rows get `status`.

    What they have drawn stays, also of a row that will draw the same tokens once more.
    """
    free = pages.give_back(state.free, state.table, state.shared, jnp.where(slots, state.held, state.shared))
    row = jnp.where(slots, state.request, NOWHERE)
    length = state.rows.length.at[row].max(state.position + 1, mode="drop")
    return dataclasses.replace(
        state,
        free=free,
        status=state.status.at[row].set(status, mode="drop"),
        rows=dataclasses.replace(state.rows, length=length),
        request=jnp.where(slots, -1, state.request),
        done=state.done & ~slots,
    )


def prompt_tokens(state: DecodeState) -> jax.Array:
    """i32[P], prompt tokens whose keys and values are prefilled: all but the last, which is the first decode input."""
    return state.prompt_length - 1


def drop_prompts(sampler: Sampler, state: DecodeState, drop: jax.Array) -> DecodeState:
    """The prompts that are true in bool[P] give their pages back."""
    drop &= state.prompt_ready
    held = jnp.where(drop, -(-prompt_tokens(state) // sampler.page_size), 0)  # [P]
    free = pages.give_back(state.free, state.prompt_table, jnp.zeros_like(held), held)
    return dataclasses.replace(state, free=free, prompt_ready=state.prompt_ready & ~drop)


def collect(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Rows that are done leave their slots, and prompts that no row needs any more leave the cache."""
    row = jnp.where(state.done, state.request, NOWHERE)
    finished = state.rows.finished.at[row].set(state.stopped & (inputs.left == COMPLETE), mode="drop")
    state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, finished=finished))
    state = leave(state, state.done, inputs.left)
    needed = (state.status != COMPLETE).reshape(state.prompt_ready.size, -1).any(1)  # [P]
    return drop_prompts(sampler, state, ~needed)


def needs_page(sampler: Sampler, state: DecodeState) -> jax.Array:
    """bool[slots], whether the next token begins a page that the slot does not hold yet."""
    return (state.request >= 0) & (state.position >= state.held * sampler.page_size)


def idle_prompts(state: DecodeState) -> jax.Array:
    """bool[P], ready prompts of which no row runs, except that of the first row that waits."""
    by_prompt = state.status.reshape(state.prompt_ready.size, -1)  # [P, rows of each]
    first = jnp.arange(state.prompt_ready.size) == jnp.argmax((by_prompt == WAITING).any(1))
    return state.prompt_ready & ~first & ~(by_prompt == RUNNING).any(1)


def grant(sampler: Sampler, state: DecodeState) -> DecodeState:
    """Every running slot gets the page that it needs; the youngest rows go back to the queue where none is left."""

    def short(state):
        return needs_page(sampler, state).sum() > state.free.count[0]

    def preempt(state):
        youngest = jnp.arange(state.request.size) == jnp.argmax(state.request)
        return dataclasses.replace(leave(state, youngest, WAITING), preemptions=state.preemptions + 1)

    state = drop_prompts(sampler, state, idle_prompts(state) & short(state))
    state = jax.lax.while_loop(short, preempt, state)
    needs = needs_page(sampler, state)
    held = state.held + needs
    free, table = pages.take(state.free, state.table, state.held, held)
    return dataclasses.replace(state, free=free, table=table, held=held)


@pytree
class Admission:
    """Which rows idle slots take next, and which prompts are prefilled before."""

    request: jax.Array  # i32[slots]; the first `count` are meant, in the order of the queue
    count: jax.Array  # i32[]
    load: jax.Array  # bool[P], prompts to prefill: those that these rows need, and others that fit beside
    waits: jax.Array  # bool[], whether one of these rows needs a prompt that is not ready


def admission(sampler: Sampler, state: DecodeState) -> Admission:
    """The longest run of waiting rows, in order, for which idle slots and free pages suffice.

    A row starts with pages for the tokens that it has, and only if another page is left for every row that may still
    need one, so that it is not sent back at once; if nothing runs, it starts anyway.
    """
    size, prompts = sampler.page_size, state.prompt_ready.size
    tokens = prompt_tokens(state)  # [P]
    running = state.request >= 0  # [slots]
    rank = jnp.arange(running.size)
    candidate = first_true(state.status == WAITING, rank.size)  # [slots]
    valid = (rank < (~running).sum()) & (candidate < state.status.size)
    request = jnp.minimum(candidate, state.status.size - 1)
    prompt = state.prompt_of(request)

    def own_pages(row, length):  # of a row of so many tokens, beside full ones of its prompt
        return (length - 1) // size + 1 - tokens[state.prompt_of(row)] // size

    def most(row):  # the last token's keys and values are never read
        return own_pages(row, state.rows.prompt_length[row] + state.limit[row] - 1)

    prompt_pages = -(-tokens // size)  # [P]
    leads = jnp.concatenate([jnp.ones(1, bool), prompt[1:] != prompt[:-1]])  # the first of its prompt
    load = jnp.where(leads & ~state.prompt_ready[prompt], prompt_pages[prompt], 0)
    own = state.held - state.shared
    may_grow = running & (own < most(jnp.maximum(state.request, 0)))
    budget = state.free.count[0] - may_grow.sum()
    least = own_pages(request, state.begin[request])
    total = jnp.cumsum(jnp.where(valid, least + (most(request) > least) + load, 0))  # [slots], with a page to grow
    alone = ~running.any() & (rank == 0) & (least + load <= state.free.count[0])
    starts = valid & ((total <= budget) | alone)
    starting = jnp.zeros(prompts, bool).at[jnp.where(starts, prompt, NOWHERE)].set(True, mode="drop")
    needed = starting & ~state.prompt_ready
    beside = (state.status == WAITING).reshape(prompts, -1).any(1) & ~state.prompt_ready & ~needed
    left = budget - jnp.max(jnp.where(starts, total, 0))
    beside &= jnp.cumsum(jnp.where(beside, prompt_pages, 0)) <= left
    beside &= jnp.cumsum(beside) <= -needed.sum() % sampler.prefill_rows  # what a batch of prefill has room for
    return Admission(request, starts.sum(), needed | beside, needed.any())


def hold_prompts(sampler: Sampler, state: DecodeState, load: jax.Array) -> DecodeState:
    """The prompts that are true in bool[P] get pages, which there must be; they are to be prefilled next."""
    held = jnp.where(load, -(-prompt_tokens(state) // sampler.page_size), 0)
    free, table = pages.take(state.free, state.prompt_table, jnp.zeros_like(held), held)
    return dataclasses.replace(state, free=free, prompt_table=table, prompt_ready=state.prompt_ready | load)


def occupy(sampler: Sampler, state: DecodeState, request: jax.Array, count: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Idle slots take the first `count` of these rows, i32[slots]; returns the slots that do, too: bool[slots].

    The pages that their prompts fill are shared. A page of their own takes what a prompt has on its last one.
    """
    size, idle = sampler.page_size, state.request < 0
    rank = jnp.cumsum(idle) - 1
    takes = idle & (rank < count)  # [slots]
    request = request[rank]
    prompt, length = state.prompt_of(request), state.begin[request]
    tokens = prompt_tokens(state)[prompt]  # [slots]
    full = tokens // size
    held = (length - 1) // size + 1
    table = jnp.where(takes[:, None], state.prompt_table[prompt], state.table)
    source = jnp.take_along_axis(table, full[:, None], axis=1)[:, 0]
    free, table = pages.take(state.free, table, full, jnp.where(takes, held, full))
    target = jnp.take_along_axis(table, full[:, None], axis=1)[:, 0]
    copied = takes & (tokens % size > 0)
    order = first_true(copied, copied.size)

    def copy(n, pools):
        return [sampler.kernel.copy(pool, source[order[n]], target[order[n]]) for pool in pools]

    def put(new, old):
        return jnp.where(takes, new, old)

    token = jnp.take_along_axis(state.rows.tokens[request], length[:, None] - 1, axis=1)[:, 0]  # the next input
    state = dataclasses.replace(
        state,
        pools=jax.lax.fori_loop(0, copied.sum(), copy, state.pools),
        free=free,
        table=table,
        shared=put(full, state.shared),
        held=put(held, state.held),
        token=put(token, state.token),
        position=put(length - 1, state.position),
        request=put(request, state.request),
        stopped=put(False, state.stopped),
        matched=put(state.begin_matched[request], state.matched),
        status=state.status.at[jnp.where(takes, request, NOWHERE)].set(RUNNING, mode="drop"),
    )
    return state, takes


def prefill(sampler: Sampler, inputs: Inputs, state: DecodeState, prompts: jax.Array, slots: jax.Array) -> DecodeState:
    """Computes the keys and values of prompts, bool[P], and of what the rows in slots, bool[slots], have beyond theirs.

    A chunk of `prefill_rows` prompts or rows at a time, each from its own beginning, so that results depend on neither
    their order nor each other.
    """
    tokens, count = prompt_tokens(state), prompts.size
    request = jnp.maximum(state.request, 0)
    first = jnp.concatenate([jnp.zeros(count, jnp.int32), tokens[state.prompt_of(request)]])  # [P + slots]
    end = jnp.concatenate([tokens, state.position])
    first = jnp.where(jnp.concatenate([prompts, slots]), first, end)
    row = jnp.concatenate([jnp.arange(count) * (state.status.size // count), request])
    table = jnp.concatenate([state.prompt_table, state.table])

    def chunk(carry):
        _, done, pools = carry
        target = first_true(done < end, sampler.prefill_rows)  # [R]
        job = jnp.minimum(target, done.size - 1)
        meant = jnp.where(target < done.size, jnp.minimum(end - done, sampler.chunk)[job], 0)
        columns = jnp.minimum(done[job, None] + jnp.arange(sampler.chunk), state.rows.tokens.shape[1] - 1)  # [R, C]
        part = state.rows.tokens[row[job, None], columns]
        _, pools = extend(sampler, inputs, pools, table[job], part, done[job], meant)
        done = done.at[target].add(meant, mode="drop")
        return agreed((done < end).any())[0], done, pools

    with jax.named_scope("prefill"):  # by which plans tell it from decoding
        start = agreed((first < end).any())[0], first, state.pools
        _, _, pools = jax.lax.while_loop(lambda carry: carry[0], chunk, start)
    return dataclasses.replace(state, pools=pools)


def admit(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Idle slots take the next rows of the queue, as far as pages suffice; their prompts are prefilled before."""

    def turn(carry):
        _, state = carry
        following = admission(sampler, state)
        # Prompts that nobody runs make room where nothing else could start.
        stuck = (state.request < 0).all() & (following.count == 0) & idle_prompts(state).any()
        waits = following.waits | stuck
        load = following.load & ~stuck
        state = drop_prompts(sampler, state, idle_prompts(state) & stuck)
        state, taken = occupy(sampler, state, following.request, jnp.where(waits, 0, following.count))
        state = hold_prompts(sampler, state, load & waits)
        return agreed(waits)[0], prefill(sampler, inputs, state, load & waits, taken)

    return jax.lax.while_loop(lambda carry: carry[0], turn, (jnp.array(True), state))[1]


def agreed(*conditions: jax.Array) -> tuple[jax.Array, ...]:
    """Whether each condition, bool[], holds on any data shard; all shards get the same answers."""
    held = jax.lax.pmax(jnp.stack(conditions).astype(jnp.int32), parallel.ROW_AXES)
    return tuple(held > 0)


def unfinished(inputs: Inputs, state: DecodeState) -> jax.Array:
    """Whether to go on, over all shards: bool[].

    Too few prompts have all of their rows complete, or one that must is not, and there are rows to decode; but where
    turns are over and a quarter of the slots is idle for want of rows, environments are told first.
    """
    complete = (state.status == COMPLETE).reshape(state.prompt_ready.size, -1).all(1)  # [P]
    here = [complete, inputs.must & ~complete, *(state.status == x for x in (WAITING, RUNNING, ENDED))]
    count, missing, waiting, running, ended = jax.lax.psum(jnp.stack([x.sum() for x in here]), parallel.ROW_AXES)
    slots = state.request.size * jax.lax.psum(1, parallel.ROW_AXES)
    tells = (ended > 0) & (waiting == 0) & (4 * (slots - running) >= slots)
    return ((count < inputs.until) | (missing > 0)) & (waiting + running > 0) & ~tells


def undisturbed(sampler: Sampler, state: DecodeState) -> jax.Array:
    """Whether on all shards together some slot runs, and none is complete or needs a page: bool[]."""
    running, disturbed = agreed((state.request >= 0).any(), (state.done | needs_page(sampler, state)).any())
    return running & ~disturbed


def advance(
    sampler: Sampler, inputs: Inputs, state: DecodeState, max_steps: jax.Array
) -> tuple[jax.Array, DecodeState]:
    """Decodes until enough rows are complete, or for at most `max_steps` steps (i32[], traced).

    The outer loop grants pages, refills slots and collects complete rows; the inner one decodes until some row is
    complete or needs a page. Both carry whether to go on beside the state: in a loop's condition, the
    collective that decides it would not be ordered with those of the body.

    Returns:
      whether rows are left, bool[], and the state.
    """
    end, inputs = state.step + max_steps, prepared(sampler, inputs, state)

    def goes_on(carry):
        return carry[0] & (carry[1].step < end)

    def decode(carry):
        state = decode_step(sampler, inputs, carry[1])
        return undisturbed(sampler, state), state

    def turn_over(carry):
        state = admit(sampler, inputs, grant(sampler, carry[1]))
        _, state = jax.lax.while_loop(goes_on, decode, (undisturbed(sampler, state), state))
        state = collect(sampler, inputs, state)
        return unfinished(inputs, state), state

    return jax.lax.while_loop(goes_on, turn_over, (unfinished(inputs, state), state))
