"""`generate`: sequences in, the same sequences with responses out; the one function that the rest of the code calls."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax import InputError, parallel
from rpg_jax.models import Model, with_head
from rpg_jax.parallel import REPLICATED, ROWS, multihost
from rpg_jax.sampling import batching, decode, paged_attention, running_softmax, turns
from rpg_jax.sampling.draw import request_key
from rpg_jax.types import Params, Sequences

SEGMENT_SECONDS = 1.0  # between two calls of should_stop and watch, unless Decoding has a number of steps
FIRST_STEPS, MOST_STEPS = 16, 1024  # decode steps of the first segment, and of any
FIXED_STEPS = 64  # of every segment, where which rows are complete first must not depend on time
PREFILL_TOKENS = 512  # prefilled at once on each shard


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How much is decoded at a time, and how keys and values are kept. Counts are those over all data shards."""

    slots: int  # responses decoded at once; at least two on each shard
    page_size: int = 128  # tokens of a page of the KV cache, a power of two up to 128
    cache_pages: int | None = None  # of the KV cache; None is what the slots, in conversations the rows, need at most
    cache_dtype: str | None = None  # of keys and values, "int8" or "float8_e4m3fn"; None is the model's
    segment: int | None = None  # decode steps between two looks of the host; None is what takes SEGMENT_SECONDS


Watch = Callable[[list[turns.Row]], None]  # called between segments with this process's rows that became complete


def no_sequences(rows: int, columns: int, routes: int) -> Sequences:
    """Rows without a token, i32[rows, columns], and `routes` numbers of each, which `settings.recorded` gives."""
    tokens, mask, logp = (jnp.zeros((rows, columns), dtype) for dtype in (jnp.int32, bool, jnp.float32))
    ids, none = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool)
    recorded = jnp.zeros((rows, columns, routes), jnp.uint8) if routes else None
    return Sequences(tokens, ids, ids, mask, logp, logp, tokens, ids, ids, none, none, recorded)


@partial(jax.jit, static_argnames=("mesh", "samples", "max_new", "routes"))
def to_answer(
    mesh: Mesh, tokens: jax.Array, length: jax.Array, problem: jax.Array, samples: int, max_new: int, routes: int = 0
) -> Sequences:
    """`prompts_to_answer` on a mesh, jitted."""
    tokens = jnp.repeat(jnp.pad(tokens, ((0, 0), (0, max_new))), samples, axis=0)
    length, problem = jnp.repeat(length, samples), jnp.repeat(problem, samples)
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], tokens, 0)
    named = dict(tokens=tokens, length=length, prompt_length=length, problem=problem)
    named["sample"] = jnp.arange(length.size, dtype=jnp.int32) % samples
    sequences = dataclasses.replace(no_sequences(length.size, tokens.shape[1], routes), **named)
    return jax.lax.with_sharding_constraint(sequences, NamedSharding(mesh, ROWS))


def prompts_to_answer(
    tokens: jax.Array, length: jax.Array, problem: jax.Array, *, samples: int, max_new: int, routes: int = 0
) -> Sequences:
    """The rows that `generate` answers: `samples` responses to each of P prompts, problem-major.

    Args:
      tokens: i32[P, Tp], padded on the right, split along `parallel.ROWS` of a mesh, or on one device.
      length: i32[P], at least 1; problem: i32[P], laid out likewise.
      routes: numbers of a token's routes (`models.routes.width`), which are recorded then; 0 records none.

    Returns Sequences of P * samples rows, T = Tp + max_new.
    """
    tokens, length, problem = (jnp.asarray(x, jnp.int32) for x in (tokens, length, problem))
    return to_answer(parallel.mesh_of(tokens), tokens, length, problem, samples, max_new, routes)


def generate(
    model: Model, params: Params, sequences: Sequences, *, key: jax.Array, step: int | np.ndarray | jax.Array,
    samples: int, max_new: int, decoding: Decoding, sampling: decode.Sampling,
    limits: jax.Array | np.ndarray | None = None, version: int | jax.Array = 0,
    until: int | None = None, must: np.ndarray | None = None, should_stop: Callable[[], bool] = lambda: False,
    watch: Watch | None = None, conversation: turns.Conversation | None = None,
) -> Sequences:  # fmt: skip
    """Goes on with all sequences until each has its stop token or as many tokens as it may have.

    A row's tokens depend on (key, step, problem, sample), on the parameters and, where rounding decides, on the number
    of slots and on the mesh. They depend neither on pages nor on segments, nor on what else is in the queue. Each data
    shard works through its own rows in its own slots.

    Args:
      params: the model's tree with layers unstacked (`models.unstack_layers`), best cast to model.dtype; its matrices
        may be in 8 bits (`models.quantize_params`).
      sequences: P * samples rows, problem-major (`prompts_to_answer`), of which the responses to a problem share their
        prompt. What a row has beyond it stays, and the row goes on with the noise of its next tokens; its keys and
        values are computed anew, under params.
      key: threefry2x32 key of the run.
      step: i32[], so that every step draws anew; or i32[P] on the host, the step of each prompt's noise.
      max_new: most tokens after a prompt: T is the columns of prompts and these.
      sampling: the distribution to draw from.
      limits: i32[P], each prompt's own limit of at most max_new; 0 marks padding, which is not run. None is max_new.
      version: optimizer updates of the parameters, written beside each token.
      until: return as soon as all rows are complete of so many prompts, over all shards, padding included. Others hold
        what they have drawn, which then depends on slots, pages and the mesh. None is all prompts.
      must: bool[P] on the host: with `until`, prompts whose rows have to be complete, too.
      should_stop: called after each segment; once it is true, complete rows are returned, and the others as they came.
      watch: called between segments, and at the end, with this process's rows that have become complete, if any. The
        first call has those that were so before, padding included.
      conversation: what answers when a stop token, a stop string or the limit of a turn ends it, and says when a row is
        complete. `max_new` counts what it appends, too.

    Returns the sequences. The token that stopped a response is part of it. Rows are split as they came.

    Raises:
      InputError: rows longer than the model's max_length, or that the mesh does not divide, stacked layers, or a key of
        another kind than threefry2x32.
    """
    rows, columns = sequences.tokens.shape
    count = rows // samples
    if columns > model.config.max_length:
        raise InputError(
            f"prompts of {columns - max_new} columns and {max_new} new tokens exceed the model's max_length "
            f"{model.config.max_length}; shorten either"
        )
    limits = np.full(count, max_new, np.int32) if limits is None else jnp.asarray(limits, jnp.int32)
    if str(jax.random.key_impl(key)) != "threefry2x32":  # noise of rbg keys would depend on the batch
        raise InputError(f"generate: key is of {jax.random.key_impl(key)}; make it with impl='threefry2x32'")
    mesh = parallel.mesh_of(sequences.tokens)
    parallel.check_rows(mesh, {"generate: prompts": count, "generate: slots": decoding.slots})
    if not isinstance(params["layers"], list):
        raise InputError("generate: params['layers'] is stacked; pass models.unstack_layers(params)")
    sampler, slots, pages = make_sampler(
        model, mesh, decoding, columns - max_new, max_new, rows, conversation is not None
    )
    keys, state = start(sampler, mesh, sequences, key, np.asarray(step, np.int32), limits, samples, slots, pages)
    # On CPU a product with tied embeddings would transpose their table at each step.
    params = with_head(params) if mesh.devices.flat[0].platform == "cpu" else params
    inputs = decode.Inputs(
        params=params,
        key=keys,
        sampling=sampling,
        # Laid out as a training state's: rollouts and evaluations share one program.
        version=version if isinstance(version, jax.Array) else parallel.to_global(mesh, REPLICATED, np.int32(version)),
        until=jnp.int32(count if until is None else until),
        must=jnp.asarray(np.repeat(np.zeros(count, bool) if must is None else must, samples)),
        stops=jnp.asarray(conversation.stops) if conversation and conversation.stops is not None else None,
    )
    waits_for_all = conversation is not None and until is not None
    fixed = decoding.segment or (FIXED_STEPS if waits_for_all else None)
    seen, steps = np.zeros_like(parallel.local_rows(state.status), bool), fixed or FIRST_STEPS
    goes_on, missing, done = False, False, 0  # done: decode steps
    while True:
        if conversation is not None:
            patience = turns.PATIENCE if goes_on and not waits_for_all else SEGMENT_SECONDS
            state, missing = turns.exchange(mesh, state, conversation, patience)
            while waits_for_all and missing and not should_stop():
                state, missing = turns.exchange(mesh, state, conversation, patience)
        begin = time.monotonic()
        unfinished, ended, state = decode_segment(sampler, mesh, inputs, state, jnp.int32(steps))
        goes_on = bool(unfinished)  # waits
        taken, done = int(state.step) - done, int(state.step)
        if fixed is None and taken:
            steps = next_steps(taken, time.monotonic() - begin)
        if watch is not None:
            complete = parallel.local_rows(state.status) == decode.COMPLETE
            watch(turns.rows_of(state.rows, np.flatnonzero(complete & ~seen)))
            seen = complete
        is_over = not (goes_on or missing or bool(ended))
        if is_over or should_stop():
            now = state.rows, state.status, state.begin, state.position, state.request
            return _result(mesh, *now, samples=samples, keep_all=until is not None)


def next_steps(steps: int, seconds: float) -> int:
    """Decode steps of the next segment, after one of so many that took so long: as many as take SEGMENT_SECONDS.

    It changes by a factor of at most 4 down, because the first segment compiles, and 2 up. All processes of a job take
    the same number, that of the slowest.
    """
    if jax.process_count() > 1:
        seconds = max(multihost.gather(seconds))
    fitting = round(steps * SEGMENT_SECONDS / max(seconds, 1e-9))
    return max(1, min(max(fitting, steps // 4), 2 * steps, MOST_STEPS))


def make_sampler(
    model: Model, mesh: Mesh, decoding: Decoding, columns: int, max_new: int, rows: int, conversation: bool = False
) -> tuple[decode.Sampler, int, int]:
    """The `Sampler` of a data shard, its slots, and the pages of its pool.

    `columns` are those of the prompts, `rows` of all shards, which in a conversation keep pages between turns. Raises
    InputError for pages or a cache_dtype that the kernel does not take, for pages that do not divide over the shards,
    and for too few for one longest response.
    """
    if mesh.devices.flat[0].platform == "tpu":
        # libtpu merges the Python frames of operations that it inlines. With a tensor axis and tens of layers it took
        # over 20 minutes or crashed; without frames it takes one minute.
        jax.config.update("jax_traceback_in_locations_limit", 0)
    kernel = paged_attention.choose(mesh, model.config, decoding.page_size, decoding.cache_dtype, model.dtype)
    shards = parallel.row_shards(mesh)
    page = math.gcd(decoding.page_size, running_softmax.block_of(columns + max_new))  # whole pages make a block
    chunk = min(max(columns - 1, 1), running_softmax.BLOCK)  # the last token of a prompt is not prefilled
    dtype = jnp.dtype(decoding.cache_dtype or model.dtype)
    slots = max(2, min(decoding.slots, rows) // shards)  # a product of one row would be another kernel's
    longest = -(-(columns + max_new - 1) // page)  # the last token's keys and values are never read
    least, pages = longest + 1, decoding.cache_pages  # beside the last page of its prompt, which is copied
    if pages is None:
        pages = (max(slots, rows // shards) if conversation else slots) * least * shards
    elif pages % shards or pages // shards < least:
        raise InputError(
            f"cache_pages is {pages}; a response of {max_new} tokens to a prompt of {columns} needs {least} "
            f"pages of {page} tokens on each of the {shards} data shards; give a multiple of {shards}, at "
            f"least {least * shards}"
        )
    prefilled = max(1, PREFILL_TOKENS // chunk)
    return decode.Sampler(model, kernel, dtype, page, chunk, prefilled, conversation), slots, pages // shards


def layouts(pools: PartitionSpec, params: Params = REPLICATED) -> tuple[decode.Inputs, decode.DecodeState]:
    """Prefix trees of PartitionSpecs for Inputs and DecodeState; `pools` is that of keys and values."""
    inputs: dict[str, Any] = {field.name: REPLICATED for field in dataclasses.fields(decode.Inputs)}
    inputs |= dict(key=ROWS, must=ROWS, params=parallel.held(params))
    state: dict[str, Any] = {field.name: ROWS for field in dataclasses.fields(decode.DecodeState)}
    state |= dict(pools=pools, step=REPLICATED, samples=REPLICATED)
    return decode.Inputs(**inputs), decode.DecodeState(**state)


def _pin(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Lays the arrays of a jitted program's result out by a prefix tree of PartitionSpecs, the tensor axis included."""
    laid_out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.lax.with_sharding_constraint(tree, laid_out)


@partial(jax.jit, static_argnames=("sampler", "mesh", "samples", "slots", "cache_pages"))
def start(
    sampler: decode.Sampler, mesh: Mesh, sequences: Sequences, key: jax.Array, step: jax.Array, limits: jax.Array,
    samples: int, slots: int, cache_pages: int,
) -> tuple[jax.Array, decode.DecodeState]:  # fmt: skip
    """The keys of all rows, and the state before the first decode step; counts are those of a data shard."""

    def begin(rows, key, step, limits):
        step, limit = (jnp.repeat(jnp.broadcast_to(x, limits.size), samples) for x in (step, limits))
        keys = jax.vmap(partial(request_key, key))(step, rows.problem, rows.sample)
        return keys, decode.start(sampler, rows, samples, limit, slots, cache_pages)

    (_, state_spec), (_, laid_out) = layouts(sampler.kernel.rows), layouts(sampler.kernel.spec)
    in_specs = (ROWS, REPLICATED, ROWS if step.ndim else REPLICATED, ROWS)
    out_specs = (ROWS, state_spec)
    keys, state = parallel.over_rows(mesh, begin, in_specs, out_specs)(sequences, key, step, limits)
    return keys, _pin(mesh, state, laid_out)


@partial(jax.jit, static_argnames=("sampler", "mesh"), donate_argnames="state")
def decode_segment(
    sampler: decode.Sampler, mesh: Mesh, inputs: decode.Inputs, state: decode.DecodeState, max_steps: jax.Array
) -> tuple[jax.Array, jax.Array, decode.DecodeState]:
    """Decodes at most `max_steps` tokens in every slot: (bool[], whether any shard has rows to decode; bool[], whether
    any has rows whose turn is over; state)."""
    inputs_spec, state_spec = layouts(sampler.kernel.rows, inputs.params)
    in_specs = (inputs_spec, state_spec, REPLICATED)
    advance = parallel.over_rows(mesh, partial(batching.advance, sampler), in_specs, (REPLICATED, state_spec))
    unfinished, state = advance(inputs, state, max_steps)
    return unfinished, (state.status == decode.ENDED).any(), _pin(mesh, state, layouts(sampler.kernel.spec)[1])


@partial(jax.jit, static_argnames=("mesh", "samples", "keep_all"))
def _result(mesh, rows, status, begin, position, request, samples, keep_all):
    """The rows as they are now; of those that are not complete, what they began with, unless `keep_all`. All rows of a
    prompt get the routes that its first one has of it."""

    def result(rows, status, begin, position, request):
        if keep_all:
            row = jnp.where(request >= 0, request, decode.NOWHERE)
            length = rows.length.at[row].max(position + 1, mode="drop")
        else:
            length = jnp.where(status == decode.COMPLETE, rows.length, begin)
        exists = jnp.arange(rows.tokens.shape[1]) < length[:, None]  # [N, T]
        names = ("tokens", "loss_mask", "sampler_logp", "model_logp", "version")
        kept = {name: jnp.where(exists, getattr(rows, name), 0).astype(getattr(rows, name).dtype) for name in names}
        if rows.routes is not None:
            prefilled = jnp.arange(rows.tokens.shape[1]) < rows.prompt_length[:, None] - 1
            of_prompts = jnp.repeat(rows.routes[::samples], samples, axis=0)
            routes = jnp.where(prefilled[..., None], of_prompts, rows.routes)
            kept["routes"] = jnp.where(exists[..., None], routes, 0)
        return dataclasses.replace(rows, length=length, complete=status == decode.COMPLETE, **kept)

    over_rows = parallel.over_rows(mesh, result, ROWS, ROWS)
    return _pin(mesh, over_rows(rows, status, begin, position, request), ROWS)
