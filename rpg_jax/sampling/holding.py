"""Who holds which pages of the KV cache: prompts and rows, with a row in a slot, between two turns or waiting.

A prompt is prefilled once, and its full pages are shared by its rows. A row takes a page when it writes the first
token there, and keeps its pages while its environment answers. When none is free, the youngest row between two turns
gives its own back, or else the youngest that runs, which waits again. It begins anew: its noise is keyed by its own
number and by token indices, so it draws the same tokens again, and what was observed is prefilled as before. What a row
draws therefore does not depend on pages.
"""

import dataclasses

import jax
import jax.numpy as jnp

from rpg_jax.sampling import pages
from rpg_jax.sampling.decode import RUNNING, WAITING, DecodeState, Sampler
from rpg_jax.sampling.pages import NOWHERE


def prompt_tokens(state: DecodeState) -> jax.Array:
    """i32[N], prompt tokens whose keys and values are prefilled: all but the last, which is the first decode input."""
    return state.rows.prompt_length[state.first_row] - 1


def prompt_pages(sampler: Sampler, state: DecodeState) -> jax.Array:
    """i32[N], the pages that hold these tokens."""
    return -(-prompt_tokens(state) // sampler.page_size)


def full_pages(sampler: Sampler, state: DecodeState, row: jax.Array) -> jax.Array:
    """The pages of each of some rows that are its prompt's: those that the prompt fills."""
    return (state.rows.prompt_length[row] - 1) // sampler.page_size


def last_input(state: DecodeState, row: jax.Array) -> jax.Array:
    """The column of the last input of each of some rows: the last token's keys and values are never read."""
    return state.rows.prompt_length[row] + state.limit[row] - 2


def needs_pages(sampler: Sampler, state: DecodeState, ahead: int = 0) -> jax.Array:
    """i32[slots], pages that the row does not hold yet, up to the next input, or `ahead` tokens beyond it."""
    request, reach = state.request, state.position
    if ahead:
        reach = jnp.maximum(reach, jnp.minimum(reach + ahead, last_input(state, request)))
    needs = reach // sampler.page_size + 1 - state.held[request]
    return jnp.where(request >= 0, jnp.maximum(needs, 0), 0)


def hold(state: DecodeState, row: jax.Array, more: jax.Array) -> DecodeState:
    """These rows, i32[n], get so many more pages, i32[n], which there must be."""
    held = state.held[row]
    free, table = pages.take(state.free, state.table[row], held, held + more)
    row = jnp.where(more > 0, row, NOWHERE)
    table, held = (old.at[row].set(new, mode="drop") for old, new in ((state.table, table), (state.held, held + more)))
    return dataclasses.replace(state, free=free, table=table, held=held)


def hold_prompts(sampler: Sampler, state: DecodeState, load: jax.Array) -> DecodeState:
    """The prompts that are true in bool[N] get pages, which there must be; they are to be prefilled next."""
    held = jnp.where(load, prompt_pages(sampler, state), 0)
    free, table = pages.take(state.free, state.prompt_table, jnp.zeros_like(held), held)
    return dataclasses.replace(state, free=free, prompt_table=table, prompt_ready=state.prompt_ready | load)


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


def drop_prompts(sampler: Sampler, state: DecodeState, drop: jax.Array) -> DecodeState:
    """The prompts that are true in bool[N] give their pages back."""
    drop &= state.prompt_ready
    held = jnp.where(drop, prompt_pages(sampler, state), 0)
    free = pages.give_back(state.free, state.prompt_table, jnp.zeros_like(held), held)
    return dataclasses.replace(state, free=free, prompt_ready=state.prompt_ready & ~drop)


def leave(state: DecodeState, slots: jax.Array, status: int) -> DecodeState:
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


def first_waiting(state: DecodeState) -> jax.Array:
    """i32[], the first row that waits, or 0."""
    return jnp.argmax(state.status == WAITING)


def idle_prompts(state: DecodeState) -> jax.Array:
    """bool[N], ready prompts of which no row runs or holds pages, except that of the first row that waits."""
    used = (state.status == RUNNING) | (state.held > 0) | (jnp.arange(state.status.size) == first_waiting(state))
    return state.prompt_ready & ~state.has(used)


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
    """Every running slot gets the pages that it needs; the youngest rows give theirs back where none is left.

    When one does, all get the page that they need next, too, as long as one for every slot is left: rows at different
    places of their pages would else end the loop of decode steps one after the other. It happens at no other time,
    such as the begin of a segment, so that what is preempted does not depend on segments.
    """

    def short(state):
        return needs_pages(sampler, state).sum() > state.free.count[0]

    def make_room(state):
        idle = idle_rows(state)
        return evict(sampler, state, jnp.where(idle.any(), idle, state.status == RUNNING))

    state = drop_prompts(sampler, state, idle_prompts(state) & short(state))
    state = jax.lax.while_loop(short, make_room, state)
    needs, more = needs_pages(sampler, state), needs_pages(sampler, state, sampler.page_size)
    enough = needs.any() & (more.sum() + more.size <= state.free.count[0])
    return hold(state, state.request, jnp.where(enough, more, needs))
