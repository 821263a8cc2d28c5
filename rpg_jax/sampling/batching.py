"""Continuous batching: complete rows leave, pages change hands, waiting rows start, inside the jitted loop.

A prompt is prefilled once, and its full pages are shared by its rows. A row takes a page when it writes the first
token there, and keeps its pages while its environment answers. When none is free, the youngest row between two turns
gives its own back, or else the youngest that runs, which waits again. It begins anew: its noise is keyed by its own
number and by token indices, so it draws the same tokens again, and what was observed is prefilled as before. What a row
draws therefore does not depend on pages.

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


def release(sampler: Sampler, state: DecodeState, row: jax.Array) -> DecodeState:
    """These rows, i32[n], give their own pages back; NOWHERE is none."""
    at = jnp.minimum(row, state.status.size - 1)
    held = jnp.where(row < state.status.size, state.held[at], 0)
    first = jnp.minimum(full_pages(sampler, state, at), held)
    return dataclasses.replace(
        state,
        free=pages.give_back(state.free, state.table[at], first, held),
        held=state.held.at[row].set(0, mode="drop"),
        cached=state.cached.at[row].set(0, mode="drop"),
    )


def leave(state: DecodeState, slots: jax.Array, status: int | jax.Array) -> DecodeState:
    """The slots that are true in bool[slots] are idle; their rows get `status`, and keep what they have drawn."""
    row = jnp.where(slots, state.request, NOWHERE)
    length = state.rows.length.at[row].max(state.position + 1, mode="drop")
    return dataclasses.replace(
        state,
        status=state.status.at[row].set(status, mode="drop"),
        rows=dataclasses.replace(state.rows, length=length),
        request=jnp.where(slots, -1, state.request),
        done=state.done & ~slots,
    )


def prompt_tokens(state: DecodeState) -> jax.Array:
    """i32[P], prompt tokens whose keys and values are prefilled: all but the last, which is the first decode input."""
    return state.prompt_length - 1


def full_pages(sampler: Sampler, state: DecodeState, row: jax.Array) -> jax.Array:
    """The pages of each of some rows that are its prompt's: those that the prompt fills."""
    return (state.rows.prompt_length[row] - 1) // sampler.page_size


def drop_prompts(sampler: Sampler, state: DecodeState, drop: jax.Array) -> DecodeState:
    """The prompts that are true in bool[P] give their pages back."""
    drop &= state.prompt_ready
    held = jnp.where(drop, -(-prompt_tokens(state) // sampler.page_size), 0)  # [P]
    free = pages.give_back(state.free, state.prompt_table, jnp.zeros_like(held), held)
    return dataclasses.replace(state, free=free, prompt_ready=state.prompt_ready & ~drop)


def collect(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Rows that are done leave their slots, and pages of what is complete are free again."""
    complete = state.done & (inputs.left == COMPLETE)
    row = jnp.where(complete, state.request, NOWHERE)
    finished = state.rows.finished.at[row].set(state.stopped, mode="drop")
    state = dataclasses.replace(state, rows=dataclasses.replace(state.rows, finished=finished))
    state = release(sampler, leave(state, state.done, inputs.left), row)
    needed = (state.status != COMPLETE).reshape(state.prompt_ready.size, -1).any(1)  # [P]
    return drop_prompts(sampler, state, ~needed)


def needs_pages(sampler: Sampler, state: DecodeState) -> jax.Array:
    """i32[slots], pages up to the next input that the row does not hold yet."""
    needs = state.position // sampler.page_size + 1 - state.held[state.request]
    return jnp.where(state.request >= 0, jnp.maximum(needs, 0), 0)


def observes(state: DecodeState) -> jax.Array:
    """bool[slots], whether the token after the next input is there already, and was not drawn."""
    column = jnp.minimum(state.position + 1, state.rows.tokens.shape[1] - 1)
    there = (column < state.turn[state.request]) & ~state.rows.loss_mask[state.request, column]
    return (state.request >= 0) & there


def next_input(state: DecodeState, row: jax.Array, column: jax.Array) -> jax.Array:
    """The first column from i32[n] on, in each of some rows, i32[n], after which a token is to be drawn."""
    columns = jnp.arange(state.rows.tokens.shape[1])
    drawn = state.rows.loss_mask[row] | (columns >= state.turn[row][:, None])  # [n, T]
    return jnp.argmax(drawn & (columns > column[:, None]), axis=1) - 1


def first_input(state: DecodeState, row: jax.Array) -> jax.Array:
    """The column of the first input of each of some rows, i32[n], when it comes into a slot."""
    return next_input(state, row, jnp.where(state.held[row] > 0, state.cached[row], state.begin[row] - 1))


def read_observations(state: DecodeState) -> DecodeState:
    """Rows that draw again what they once drew pass over what they observed, which is prefilled next."""
    position = next_input(state, state.request, state.position)
    return dataclasses.replace(state, position=jnp.where(observes(state), position, state.position))


def first_waiting(state: DecodeState) -> jax.Array:
    """i32[], the first row that waits, or 0."""
    return jnp.argmax(state.status == WAITING)


def idle_prompts(state: DecodeState) -> jax.Array:
    """bool[P], ready prompts of which no row runs or holds pages, except that of the first row that waits."""
    used = (state.status == RUNNING) | (state.held > 0) | (jnp.arange(state.status.size) == first_waiting(state))
    return state.prompt_ready & ~used.reshape(state.prompt_ready.size, -1).any(1)


def idle_rows(state: DecodeState) -> jax.Array:
    """bool[N], rows that hold pages and do not run."""
    return (state.held > 0) & (state.status != RUNNING)


def evict(sampler: Sampler, state: DecodeState, rows: jax.Array) -> DecodeState:
    """The last of these rows, bool[N], gives its pages back; one that runs waits again."""
    row = jnp.max(jnp.where(rows, jnp.arange(rows.size), -1))
    slots = (state.request == row) & (row >= 0)
    state = dataclasses.replace(leave(state, slots, WAITING), preemptions=state.preemptions + slots.any())
    state = release(sampler, state, jnp.where(row < 0, NOWHERE, row)[None])
    return drop_prompts(sampler, state, idle_prompts(state) & (row >= 0))


def grant(sampler: Sampler, state: DecodeState) -> DecodeState:
    """Every running slot gets the pages that it needs; the youngest rows give theirs back where none is left."""

    def short(state):
        return needs_pages(sampler, state).sum() > state.free.count[0]

    def make_room(state):
        idle = idle_rows(state)
        return evict(sampler, state, jnp.where(idle.any(), idle, state.status == RUNNING))

    state = drop_prompts(sampler, state, idle_prompts(state) & short(state))
    state = jax.lax.while_loop(short, make_room, state)
    return hold(state, state.request, needs_pages(sampler, state))


def hold(state: DecodeState, row: jax.Array, more: jax.Array) -> DecodeState:
    """These rows, i32[n], get so many more pages, i32[n], which there must be."""
    held = state.held[row]
    free, table = pages.take(state.free, state.table[row], held, held + more)
    row = jnp.where(more > 0, row, NOWHERE)
    table, held = (old.at[row].set(new, mode="drop") for old, new in ((state.table, table), (state.held, held + more)))
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
    running = state.request >= 0  # [slots]
    rank = jnp.arange(running.size)
    candidate = first_true(state.status == WAITING, rank.size)  # [slots]
    valid = (rank < (~running).sum()) & (candidate < state.status.size)
    request = jnp.minimum(candidate, state.status.size - 1)
    prompt = state.prompt_of(request)

    def more_pages(row, position):  # up to an input, beside those that a row holds, or that are its prompt's
        return position // size + 1 - jnp.maximum(state.held[row], full_pages(sampler, state, row))

    def most(row):  # the last token's keys and values are never read
        return more_pages(row, state.rows.prompt_length[row] + state.limit[row] - 2)

    prompt_pages = -(-prompt_tokens(state) // size)  # [P]
    leads = jnp.concatenate([jnp.ones(1, bool), prompt[1:] != prompt[:-1]])  # the first of its prompt
    load = jnp.where(leads & ~state.prompt_ready[prompt], prompt_pages[prompt], 0)
    may_grow = running & (most(jnp.maximum(state.request, 0)) > 0)
    budget = state.free.count[0] - may_grow.sum()
    least = more_pages(request, first_input(state, request))
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


def occupy(sampler: Sampler, state: DecodeState, request: jax.Array, count: jax.Array) -> DecodeState:
    """Idle slots take the first `count` of these rows, i32[slots].

    A row without pages shares those that its prompt fills. A page of its own takes what a prompt has on its last one.
    """
    idle = state.request < 0
    rank = jnp.cumsum(idle) - 1
    takes = idle & (rank < count)  # [slots]
    request = jnp.where(takes, request[rank], NOWHERE)
    at = jnp.minimum(request, state.status.size - 1)
    new, full, position = takes & (state.held[at] == 0), full_pages(sampler, state, at), first_input(state, at)
    state = dataclasses.replace(
        state,
        position=jnp.where(takes, position, state.position),
        request=jnp.where(takes, request, state.request),
        status=state.status.at[request].set(RUNNING, mode="drop"),
    )
    fresh = jnp.where(new, request, NOWHERE)
    source = state.prompt_table[state.prompt_of(at)]  # [slots, W]
    state = dataclasses.replace(
        state,
        table=state.table.at[fresh].set(source, mode="drop"),
        held=state.held.at[fresh].set(full, mode="drop"),
        cached=state.cached.at[fresh].set(state.rows.prompt_length[at] - 1, mode="drop"),
    )
    state = hold(state, state.request, jnp.where(takes, needs_pages(sampler, state), 0))
    copied = new & (state.cached[at] % sampler.page_size > 0)
    order = first_true(copied, copied.size)

    def copy(n, pools):
        slot = order[n]
        pair = source[slot, full[slot]], state.table[at[slot], full[slot]]
        return [sampler.kernel.copy(pool, *pair) for pool in pools]

    return dataclasses.replace(state, pools=jax.lax.fori_loop(0, copied.sum(), copy, state.pools))


def prefill(sampler: Sampler, inputs: Inputs, state: DecodeState, prompts: jax.Array) -> DecodeState:
    """Computes the keys and values of prompts, bool[P], and of what rows in slots have before their next input.

    A chunk of `prefill_rows` prompts or rows at a time, each from its own beginning, so that results depend on neither
    their order nor each other.
    """
    count, request = prompts.size, jnp.maximum(state.request, 0)
    end = jnp.concatenate([jnp.where(prompts, prompt_tokens(state), 0), state.position])  # [P + slots]
    cached = jnp.where(state.request >= 0, state.cached[request], state.position)
    first = jnp.concatenate([jnp.zeros(count, jnp.int32), cached])
    row = jnp.concatenate([jnp.arange(count) * (state.status.size // count), request])
    table = jnp.concatenate([state.prompt_table, state.table[request]])

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
    runs = jnp.where(state.request >= 0, state.request, NOWHERE)
    return dataclasses.replace(state, pools=pools, cached=state.cached.at[runs].set(state.position, mode="drop"))


def admit(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Idle slots take the next rows of the queue, as far as pages suffice; what they have is prefilled before."""

    def turn(carry):
        _, state = carry
        following = admission(sampler, state)
        # Prompts and rows that do not run make room where nothing else could start.
        rows = idle_rows(state) & (jnp.arange(state.status.size) != first_waiting(state))
        idle = (state.request < 0).all() & (following.count == 0) & (state.status == WAITING).any()
        stuck = idle & (idle_prompts(state).any() | rows.any())
        waits = following.waits | stuck
        load = following.load & ~stuck
        state = drop_prompts(sampler, state, idle_prompts(state) & stuck)
        state = evict(sampler, state, rows & stuck)
        state = occupy(sampler, state, following.request, jnp.where(waits, 0, following.count))
        state = hold_prompts(sampler, state, load & waits)
        return agreed(waits)[0], prefill(sampler, inputs, state, load & waits)

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
    """Whether on all shards together some slot runs, and none is done, needs a page or reads an observation: bool[]."""
    disturbed = state.done | (needs_pages(sampler, state) > 0) | observes(state)
    running, disturbed = agreed((state.request >= 0).any(), disturbed.any())
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
    over = (state.status == COMPLETE) & (state.held > 0)  # ended by their environments
    state = release(sampler, state, jnp.where(over, jnp.arange(over.size), NOWHERE))

    def goes_on(carry):
        return carry[0] & (carry[1].step < end)

    def decode(carry):
        state = decode_step(sampler, inputs, carry[1])
        return undisturbed(sampler, state), state

    def turn_over(carry):
        state = admit(sampler, inputs, grant(sampler, read_observations(carry[1])))
        _, state = jax.lax.while_loop(goes_on, decode, (undisturbed(sampler, state), state))
        state = collect(sampler, inputs, state)
        return unfinished(inputs, state), state

    return jax.lax.while_loop(goes_on, turn_over, (unfinished(inputs, state), state))
