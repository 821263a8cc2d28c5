"""Continuous batching: complete rows leave, waiting rows start, inside the jitted loop; pages change hands (`holding`).

Data shards agree on nothing but the conditions of loops that compute with the model, so that all of them take the same
number of steps.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax import parallel
from rpg_jax.sampling import holding
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
from rpg_jax.sampling.paged_attention import copy_page
from rpg_jax.sampling.pages import NOWHERE
from rpg_jax.types import pytree


def first_true(mask: jax.Array, count: int) -> jax.Array:
    """i32[count], the first indices at which bool[n] is true, in ascending order; n where there are no more."""
    order = jnp.sort(jnp.where(mask, jnp.arange(mask.size), mask.size))
    return jnp.take(order, jnp.arange(count), mode="fill", fill_value=mask.size)


def collect(sampler: Sampler, state: DecodeState) -> DecodeState:
    """Rows that are done leave their slots, and pages of what is complete are free again."""
    running = jnp.where(state.request >= 0, state.request, NOWHERE)
    state = dataclasses.replace(state, cached=state.cached.at[running].set(state.position, mode="drop"))
    left = holding.leave(state, state.done, ENDED if sampler.conversation else COMPLETE)
    if not sampler.conversation:  # it says when a row is complete
        row = jnp.where(state.done, state.request, NOWHERE)
        finished = left.rows.finished.at[row].set(state.stopped, mode="drop")
        left = dataclasses.replace(left, rows=dataclasses.replace(left.rows, finished=finished))
        left = holding.release(sampler, left, row)
    return holding.drop_prompts(sampler, left, ~left.has(left.status != COMPLETE))


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


def first_input(sampler: Sampler, state: DecodeState, row: jax.Array) -> jax.Array:
    """The column of the first input of each of some rows, i32[n], when it comes into a slot."""
    if not sampler.conversation:  # nothing is observed, and a row that waits holds no pages
        return state.begin[row] - 1
    return next_input(state, row, jnp.where(state.held[row] > 0, state.cached[row], state.begin[row] - 1))


def read_observations(state: DecodeState) -> DecodeState:
    """Rows that draw again what they once drew pass over what they observed, which is prefilled next."""
    position = next_input(state, state.request, state.position)
    return dataclasses.replace(state, position=jnp.where(observes(state), position, state.position))


@pytree
class Admission:
    """Which rows idle slots take next, and which prompts are prefilled before."""

    request: jax.Array  # i32[slots]; the first `count` are meant, in the order of the queue
    count: jax.Array  # i32[]
    load: jax.Array  # bool[N], prompts to prefill: those that these rows need, and others that fit beside
    waits: jax.Array  # bool[], whether one of these rows needs a prompt that is not ready


def admission(sampler: Sampler, state: DecodeState) -> Admission:
    """The longest run of waiting rows, in order, for which idle slots and free pages suffice.

    A row starts with pages for the tokens that it has, and only if another page is left for every row that may still
    need one, so that it is not sent back at once; if nothing runs, it starts anyway.
    """
    size = sampler.page_size
    running = state.request >= 0  # [slots]
    rank = jnp.arange(running.size)
    candidate = first_true(state.status == WAITING, rank.size)  # [slots]
    valid = (rank < (~running).sum()) & (candidate < state.status.size)
    request = jnp.minimum(candidate, state.status.size - 1)
    prompt = state.prompt_of(request)

    def more_pages(row, position):  # up to an input, beside those that a row holds, or that are its prompt's
        return position // size + 1 - jnp.maximum(state.held[row], holding.full_pages(sampler, state, row))

    def most(row):
        return more_pages(row, holding.last_input(state, row))

    of_prompts = holding.prompt_pages(sampler, state)
    leads = jnp.concatenate([jnp.ones(1, bool), prompt[1:] != prompt[:-1]])  # the first of its prompt
    load = jnp.where(leads & ~state.prompt_ready[prompt], of_prompts[prompt], 0)
    may_grow = running & (most(jnp.maximum(state.request, 0)) > 0)
    budget = state.free.count[0] - may_grow.sum()
    least = more_pages(request, first_input(sampler, state, request))
    total = jnp.cumsum(jnp.where(valid, least + (most(request) > least) + load, 0))  # [slots], with a page to grow
    alone = ~running.any() & (rank == 0) & (least + load <= state.free.count[0])
    starts = valid & ((total <= budget) | alone)
    starting = jnp.zeros_like(state.prompt_ready).at[jnp.where(starts, prompt, NOWHERE)].set(True, mode="drop")
    needed = starting & ~state.prompt_ready
    beside = state.has(state.status == WAITING) & ~state.prompt_ready & ~needed
    left = budget - jnp.max(jnp.where(starts, total, 0))
    beside &= jnp.cumsum(jnp.where(beside, of_prompts, 0)) <= left
    beside &= jnp.cumsum(beside) <= -needed.sum() % sampler.prefill_rows  # what a batch of prefill has room for
    return Admission(request, starts.sum(), needed | beside, needed.any())


def occupy(sampler: Sampler, state: DecodeState, request: jax.Array, count: jax.Array) -> DecodeState:
    """Idle slots take the first `count` of these rows, i32[slots].

    A row without pages shares those that its prompt fills. A page of its own takes what a prompt has on its last one.
    """
    idle = state.request < 0
    rank = jnp.cumsum(idle) - 1
    takes = idle & (rank < count)  # [slots]
    request = jnp.where(takes, request[rank], NOWHERE)
    at = jnp.minimum(request, state.status.size - 1)
    new, full = takes & (state.held[at] == 0), holding.full_pages(sampler, state, at)
    state = dataclasses.replace(
        state,
        position=jnp.where(takes, first_input(sampler, state, at), state.position),
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
    state = holding.hold(state, state.request, jnp.where(takes, holding.needs_pages(sampler, state), 0))
    copied = new & (state.cached[at] % sampler.page_size > 0)
    order = first_true(copied, copied.size)

    def copy(n, pools):
        slot = order[n]
        pair = source[slot, full[slot]], state.table[at[slot], full[slot]]
        return [copy_page(pool, *pair) for pool in pools]

    return dataclasses.replace(state, pools=jax.lax.fori_loop(0, copied.sum(), copy, state.pools))


def prefill(sampler: Sampler, inputs: Inputs, state: DecodeState, prompts: jax.Array) -> DecodeState:
    """Computes the keys and values of prompts, bool[N], and of what rows in slots have before their next input.

    A chunk of `prefill_rows` prompts or rows at a time, each from its own beginning, so that results depend on neither
    their order nor each other. Of routes those of a prompt are written into its first row, and what is recorded stays:
    it is what the next token was drawn after.
    """
    request = jnp.maximum(state.request, 0)
    end = jnp.concatenate([jnp.where(prompts, holding.prompt_tokens(state), 0), state.position])  # [N + slots]
    cached = jnp.where(state.request >= 0, state.cached[request], state.position)
    first = jnp.concatenate([jnp.zeros(prompts.size, jnp.int32), cached])
    row = jnp.concatenate([state.first_row, request])
    table = jnp.concatenate([state.prompt_table, state.table[request]])

    def chunk(carry):
        _, done, pools, routes = carry
        target = first_true(done < end, sampler.prefill_rows)  # [R]
        job = jnp.minimum(target, done.size - 1)
        meant = jnp.where(target < done.size, jnp.minimum(end - done, sampler.chunk)[job], 0)
        columns = jnp.minimum(done[job, None] + jnp.arange(sampler.chunk), state.rows.tokens.shape[1] - 1)  # [R, C]
        part = state.rows.tokens[row[job, None], columns]
        _, pools, chosen = extend(sampler, inputs, pools, table[job], part, done[job], meant)
        if routes is not None:
            into = row[job, None]
            new = (jnp.arange(sampler.chunk) < meant[:, None]) & (routes[into, columns, 0] == 0)
            routes = routes.at[jnp.where(new, into, NOWHERE), columns].set(chosen, mode="drop")
        done = done.at[target].add(meant, mode="drop")
        return agreed((done < end).any())[0], done, pools, routes

    with jax.named_scope("prefill"):  # by which plans tell it from decoding
        start = agreed((first < end).any())[0], first, state.pools, state.rows.routes
        _, _, pools, routes = jax.lax.while_loop(lambda carry: carry[0], chunk, start)
    runs = jnp.where(state.request >= 0, state.request, NOWHERE)
    return dataclasses.replace(
        state,
        pools=pools,
        rows=dataclasses.replace(state.rows, routes=routes),
        cached=state.cached.at[runs].set(state.position, mode="drop"),
    )


def admit(sampler: Sampler, inputs: Inputs, state: DecodeState) -> DecodeState:
    """Idle slots take the next rows of the queue, as far as pages suffice; what they have is prefilled before."""

    def turn(carry):
        _, state = carry
        following = admission(sampler, state)
        # Prompts and rows that do not run make room where nothing else could start.
        rows = holding.idle_rows(state) & (jnp.arange(state.status.size) != holding.first_waiting(state))
        idle = (state.request < 0).all() & (following.count == 0) & (state.status == WAITING).any()
        stuck = idle & (holding.idle_prompts(state).any() | rows.any())
        waits = following.waits | stuck
        load = following.load & ~stuck
        state = holding.drop_prompts(sampler, state, holding.idle_prompts(state) & stuck)
        if sampler.conversation:  # else no row that does not run holds pages
            state = holding.evict(sampler, state, rows & stuck)
        state = occupy(sampler, state, following.request, jnp.where(waits, 0, following.count))
        state = holding.hold_prompts(sampler, state, load & waits)
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
    left = state.status != COMPLETE
    complete = ~state.has(left) & (jnp.arange(left.size) < left.size // state.samples)
    here = [complete, inputs.must & left, *(state.status == x for x in (WAITING, RUNNING, ENDED))]
    count, missing, waiting, running, ended = jax.lax.psum(jnp.stack([x.sum() for x in here]), parallel.ROW_AXES)
    slots = state.request.size * jax.lax.psum(1, parallel.ROW_AXES)
    tells = (ended > 0) & (waiting == 0) & (4 * (slots - running) >= slots)
    return ((count < inputs.until) | (missing > 0)) & (waiting + running > 0) & ~tells


def undisturbed(sampler: Sampler, state: DecodeState) -> jax.Array:
    """Whether on all shards together some slot runs, and none is done, needs a page or reads an observation: bool[]."""
    disturbed = state.done | (holding.needs_pages(sampler, state) > 0)
    if sampler.conversation:
        disturbed |= observes(state)
    running, disturbed = agreed((state.request >= 0).any(), disturbed.any())
    return running & ~disturbed


def decode(sampler: Sampler, inputs: Inputs, state: DecodeState, end: jax.Array) -> DecodeState:
    """Decode steps until slots are to change, or until that of a number, i32[]. They are one loop, whose condition is
    all that the host of a GPU waits for."""

    def turn(carry):
        state = decode_step(sampler, inputs, carry[1])
        return undisturbed(sampler, state), state

    def goes_on(carry):
        return carry[0] & (carry[1].step < end)

    return jax.lax.while_loop(goes_on, turn, (undisturbed(sampler, state), state))[1]


def advance(
    sampler: Sampler, inputs: Inputs, state: DecodeState, max_steps: jax.Array
) -> tuple[jax.Array, DecodeState]:
    """Decodes until enough rows are complete, or for at most `max_steps` steps (i32[], traced).

    The outer loop grants pages, refills slots and collects complete rows; the inner one decodes until some row is
    complete or needs a page. Both carry whether to go on beside the state: in a loop's condition, the
    collective that decides it would not be ordered with those of the body.

    Returns whether rows are left, bool[], and the state.
    """
    end, inputs = state.step + max_steps, prepared(sampler, inputs, state)
    if sampler.conversation:
        over = (state.status == COMPLETE) & (state.held > 0)  # ended by their environments
        state = holding.release(sampler, state, jnp.where(over, jnp.arange(over.size), NOWHERE))

    def goes_on(carry):
        return carry[0] & (carry[1].step < end)

    def turn_over(carry):
        state = read_observations(carry[1]) if sampler.conversation else carry[1]
        state = admit(sampler, inputs, holding.grant(sampler, state))
        state = collect(sampler, decode(sampler, inputs, state, end))
        return unfinished(inputs, state), state

    return jax.lax.while_loop(goes_on, turn_over, (unfinished(inputs, state), state))
