"""`generate`: prompts in, a Rollout out; the one function that the rest of the code calls."""

import dataclasses
import math
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax import InputError, parallel
from rpg_jax.models import Model, ModelConfig, with_head
from rpg_jax.parallel import REPLICATED, ROWS, multihost
from rpg_jax.sampling import batching, decode, paged_attention, pages, running_softmax
from rpg_jax.sampling.draw import request_key
from rpg_jax.types import Params, Prompts, Rollout

PAGE_SIZE = 128  # tokens of a page, unless the caller says otherwise
# The order in which XLA adds a row's numbers on CPU depends on what is fused, and on how many rows a product has: 64
# rows of 128 numbers are added in another order than 48. Each product of decoding is alone, with 32 rows at most. Where
# that changes no bit it has 4 when few responses run, a rollout's last and longest: a quarter of the time.
SAME_SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
CPU_TILES = 32, 4
SEGMENT_SECONDS = 1.0  # between two calls of should_stop and progress, unless the caller gives a number of steps
FIRST_STEPS, MOST_STEPS = 16, 1024  # decode steps of the first segment, and of any
PREFILL_TOKENS = 512  # prefilled at once on each shard, unless the caller says otherwise


def generate(
    model: Model,
    params: Params,
    prompts: Prompts,
    *,
    key: jax.Array,
    step: int | np.ndarray | jax.Array,
    samples: int,
    max_new: int,
    sampling: decode.Sampling,
    slots: int,
    limits: jax.Array | np.ndarray | None = None,
    temperature_model: float | jax.Array | None = None,
    segment: int | None = None,
    prefill_rows: int | None = None,
    page_size: int = PAGE_SIZE,
    cache_pages: int | None = None,
    cache_dtype: str | None = None,
    should_stop: Callable[[], bool] | None = None,
    progress: Callable[[int], None] | None = None,
    resume: Rollout | None = None,
    until: int | None = None,
    must: np.ndarray | None = None,
) -> Rollout:
    """Samples `samples` responses to each prompt.

    A response's tokens depend on (key, step, prompts.problem, sample) and on the parameters, but not on slots, pages,
    segments, the order of prompts or their layout on a mesh. Each data shard works through its own prompts in its own
    slots.

    Args:
      params: the model's tree with layers unstacked (`models.unstack_layers`), best cast to model.dtype; its matrices
        may be in 8 bits (`models.quantize_params`).
      prompts: P rows, split along `parallel.ROWS` of the mesh to work on, or on one device.
      key: threefry2x32 key of the run.
      step: i32[], so that every step draws anew; or i32[P] on the host, the step of each prompt's noise.
      max_new: most tokens a response may have; a shape, so another value compiles anew.
      sampling: the distribution to draw from.
      slots: responses decoded at once, over all shards; at least two on each.
      limits: i32[P], laid out as prompts are, each prompt's own limit of at most max_new; 0 marks padding, which is not
        run. None is max_new for all.
      temperature_model: temperature of `model_logp`; None is the sampling temperature, or 1 when that is 0.
      segment: most decode steps between two calls of should_stop; None is as many as take SEGMENT_SECONDS.
      prefill_rows: prompts prefilled at once, over all shards; None is as many as make PREFILL_TOKENS on each.
      page_size: tokens of a page of the KV cache, a power of two up to 128.
      cache_pages: pages of the KV cache, over all shards; None is what the slots can need at most. With fewer,
        responses wait for pages, and the youngest are drawn again where none is left.
      cache_dtype: of keys and values, "int8" or "float8_e4m3fn"; None is the model's. Another type makes the sampler
        another policy.
      should_stop: called after each segment; once it is true, complete responses are returned and all others are empty.
      progress: called between segments with the number of this process's complete responses, padding included.
      resume: what an earlier call returned for the same prompts, or rows without tokens. Its complete responses stay,
        and the others go on with the noise of their next tokens; their keys and values are computed anew, under params.
      until: return as soon as all responses are complete to so many prompts, over all shards, padding included. Others
        hold what they have drawn, which then depends on slots, pages and the mesh. None is all prompts.
      must: bool[P] on the host: with `until`, prompts whose responses have to be complete, too.

    Returns:
      Rollout of P * samples rows, problem-major: row p * samples + s is prompt ++ response ++ zeros, T = Tp + max_new.
      The token that stopped a response is part of it. Rows are split as the prompts are.

    Raises:
      ValueError: sizes below 1 or beyond the model's max_length, limits out of range, rows that the mesh does not
        divide, stacked layers, or a key of another kind than threefry2x32.
    """
    prompts = jax.tree.map(jnp.asarray, prompts)
    count, columns = prompts.tokens.shape
    if columns + max_new > model.config.max_length:
        raise InputError(
            f"prompts of {columns} columns and {max_new} new tokens exceed the model's max_length "
            f"{model.config.max_length}; shorten either"
        )
    sizes = dict(samples=samples, max_new=max_new, slots=slots, segment=segment, prefill_rows=prefill_rows)
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise InputError(f"generate: {name} is {value}; it must be at least 1")
    if limits is None:
        limits = np.full(count, max_new, np.int32)
    else:
        limits = jnp.asarray(limits, jnp.int32)
        here = parallel.local_rows(limits)
        if limits.shape != (count,) or here.min() < 0 or here.max() > max_new:
            raise InputError(f"generate: limits {limits.shape} must be [{count}] values from 0 to max_new, {max_new}")
    mesh = parallel.mesh_of(prompts.tokens)
    parallel.check_rows(mesh, {"generate: prompts": count, "generate: slots": slots})
    if not isinstance(params["layers"], list):
        raise InputError("generate: params['layers'] is stacked; pass models.unstack_layers(params)")
    if temperature_model is None:
        temperature_model = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    temperature_model = jnp.asarray(temperature_model, jnp.float32)

    shards = parallel.row_shards(mesh)
    prefill_rows = prefill_rows and -(-prefill_rows // shards)
    sampler = make_sampler(model, mesh, columns, max_new, page_size, prefill_rows, cache_dtype)
    slots = shard_slots(slots, count * samples, shards)
    pool = pool_pages(sampler.page_size, columns, max_new, slots, cache_pages, shards)
    step = np.asarray(step, np.int32)
    requests, state = start(sampler, mesh, prompts, _threefry(key), step, limits, samples, max_new, slots, pool, resume)
    must_finish = jnp.zeros(count, bool) if must is None else jnp.asarray(must)
    goal = jnp.int32(count if until is None else until)
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":  # a product with tied embeddings would transpose their table at each step
        params = transposed_head(params)
    inputs = decode.Inputs(params, prompts, requests, sampling, temperature_model, goal, must_finish)
    decode_segment, steps = segment_on(platform), segment or FIRST_STEPS
    while True:
        begin = time.monotonic()
        unfinished, state = decode_segment(sampler, mesh, inputs, state, jnp.int32(steps))
        goes_on = bool(unfinished)  # waits
        if segment is None:
            steps = next_steps(steps, time.monotonic() - begin)
        if goes_on and progress is not None:
            progress(int((parallel.local_rows(state.status) == decode.COMPLETE).sum()))
        if not goes_on or (should_stop is not None and should_stop()):
            drawn = state.length, state.finished, state.status, state.request, state.count
            return _rollout(mesh, prompts, state.responses, drawn, samples, keep_all=until is not None)


def next_steps(steps: int, seconds: float) -> int:
    """Decode steps of the next segment, after one of so many that took so long: as many as take SEGMENT_SECONDS.

    It changes by a factor of at most 4 down, because the first segment compiles, and 2 up. All processes of a job take
    the same number, that of the slowest.
    """
    if jax.process_count() > 1:
        seconds = max(multihost.gather(seconds))
    fitting = round(steps * SEGMENT_SECONDS / max(seconds, 1e-9))
    return max(1, min(max(fitting, steps // 4), 2 * steps, MOST_STEPS))


transposed_head = jax.jit(with_head)


def make_sampler(
    model: Model, mesh: Mesh, columns: int, max_new: int, page_size: int, prefill_rows: int | None = None,
    cache_dtype: str | None = None,
) -> decode.Sampler:  # fmt: skip
    """The `Sampler` of a data shard; raises ValueError for pages or a cache_dtype that the kernel does not take."""
    page = page_tokens(page_size, columns + max_new)
    kernel = paged_attention.choose(mesh, model.config, page_size, cache_dtype)
    chunk = min(max(columns - 1, 1), running_softmax.BLOCK)  # the last token of a prompt is not prefilled
    rows = prefill_rows or max(1, PREFILL_TOKENS // chunk)
    cpu = mesh.devices.flat[0].platform == "cpu"
    few = cpu and mesh.shape["tensor"] == 1 and same_bits(model.config, jnp.dtype(model.dtype), *CPU_TILES)
    tiles = CPU_TILES if few else CPU_TILES[:1] if cpu else ()
    short = cpu and kernel.joined and columns + max_new <= running_softmax.SHORT
    sequence = running_softmax.block_of(columns + max_new) if short else 0
    dtype = jnp.dtype(cache_dtype or model.dtype)
    return decode.Sampler(model, kernel, dtype, page, chunk, rows, tiles, sequence)


@cache
def same_bits(config: ModelConfig, dtype: Any, many: int, few: int) -> bool:
    """Whether all products of a model give a row, on this CPU, the same bits among `few` rows as among `many`."""
    hidden, mlp = config.hidden_size, config.mlp_size
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inner = {(hidden, heads), (hidden, kv_heads), (heads, hidden), (hidden, mlp), (mlp, hidden)}
    kinds = [(shape, dtype) for shape in sorted(inner)]
    kinds.append(((hidden, config.vocab_size), jnp.promote_types(dtype, jnp.float32)))  # logits
    numbers = np.random.default_rng(0).standard_normal(65_537)  # repeated, because each sum is tried for itself

    @partial(jax.jit, compiler_options=SAME_SUMS)
    def products(rows, matrices):
        return [
            jnp.dot(*pair, preferred_element_type=kind) for *pair, (_, kind) in zip(rows, matrices, kinds, strict=True)
        ]

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        matrices = [np.resize(numbers, shape).astype(dtype) for shape, _ in kinds]
        rows = [np.resize(numbers[::-1], (many, shape[0])).astype(dtype) for shape, _ in kinds]
        of_many, of_few = (products([x[:count] for x in rows], matrices) for count in (many, few))
        return all(np.array_equal(np.asarray(x)[:few], y) for x, y in zip(of_many, of_few, strict=True))


def shard_slots(slots: int, requests: int, shards: int) -> int:
    """Slots of one data shard: at least two, because a product of one row sums in another order."""
    return max(2, min(slots, requests) // shards)


def check_cache(
    model: Model, mesh: Mesh, *, max_prompt: int, max_new: int, slots: int, page_size: int, cache_pages: int | None,
    cache_dtype: str | None = None,
) -> None:  # fmt: skip
    """Raises ValueError, as `generate` does, for a page size, a number of pages or a cache_dtype that cannot be."""
    shards = parallel.row_shards(mesh)
    paged_attention.choose(mesh, model.config, page_size, cache_dtype)
    page = page_tokens(page_size, max_prompt + max_new)
    pool_pages(page, max_prompt, max_new, shard_slots(slots, slots, shards), cache_pages, shards)


def page_tokens(page_size: int, capacity: int) -> int:
    """Tokens of a page for sequences of at most `capacity`: whole pages make a block of them."""
    return math.gcd(page_size, running_softmax.block_of(capacity))


def pool_pages(page_size: int, columns: int, max_new: int, slots: int, cache_pages: int | None, shards: int) -> int:
    """Pages of one data shard's pool, of `page_tokens` each.

    Raises:
      ValueError: cache_pages do not divide over the shards, or cannot hold one longest response.
    """
    longest = -(-(columns + max_new - 1) // page_size)  # the last token's keys and values are never read
    least = longest + 1  # beside the last page of its prompt, which is copied
    if cache_pages is None:
        return slots * least
    if cache_pages % shards or cache_pages // shards < least:
        raise InputError(
            f"cache_pages is {cache_pages}; a response of {max_new} tokens to a prompt of {columns} needs {least} "
            f"pages of {page_size} tokens on each of the {shards} data shards; give a multiple of {shards}, at "
            f"least {least * shards}"
        )
    return cache_pages // shards


def _threefry(key: jax.Array) -> jax.Array:
    """A typed threefry2x32 key, raw ones included; noise of rbg keys would depend on the batch."""
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(key, impl="threefry2x32")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise InputError(f"generate: key is of {jax.random.key_impl(key)}; make it with impl='threefry2x32'")
    return key


def layouts(pools: PartitionSpec) -> tuple[decode.Inputs, decode.DecodeState]:
    """Prefix trees of PartitionSpecs for Inputs and DecodeState; `pools` is that of keys and values."""
    fields: dict[str, Any] = {field.name: ROWS for field in dataclasses.fields(decode.DecodeState)}
    inputs = decode.Inputs(REPLICATED, *(ROWS,) * 2, *(REPLICATED,) * 3, ROWS)  # type: ignore[arg-type]
    return inputs, decode.DecodeState(**fields | dict(pools=pools, sequences=pools, step=REPLICATED))


def _pin(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """Lays the arrays of a jitted program's result out by a prefix tree of PartitionSpecs, the tensor axis included."""
    laid_out = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.lax.with_sharding_constraint(tree, laid_out)


@partial(jax.jit, static_argnames=("sampler", "mesh", "samples", "max_new", "slots", "cache_pages"))
def start(
    sampler: decode.Sampler, mesh: Mesh, prompts: Prompts, key: jax.Array, step: jax.Array, limits: jax.Array,
    samples: int, max_new: int, slots: int, cache_pages: int, resume: Rollout | None = None,
) -> tuple[decode.Requests, decode.DecodeState]:  # fmt: skip
    """The queue and the state before the first decode step; `slots` and `cache_pages` are those of one data shard."""

    def begin(prompts, key, step, limits, resume):
        row = jnp.arange(prompts.tokens.shape[0] * samples)  # [N], problem-major
        prompt = row // samples
        step = jnp.broadcast_to(step, limits.shape)[prompt]
        keys = jax.vmap(partial(request_key, key))(step, prompts.problem[prompt], row % samples)
        requests = decode.Requests(prompt, keys, limits[prompt])
        state = decode.start(sampler, prompts, requests, slots, max_new, cache_pages)
        return (requests, state) if resume is None else resumed(prompts, requests, state, resume)

    (_, state_spec), (_, laid_out) = layouts(sampler.kernel.rows), layouts(sampler.kernel.spec)
    in_specs = (ROWS, REPLICATED, ROWS if step.ndim else REPLICATED, ROWS, ROWS)
    requests, state = parallel.over_rows(mesh, begin, in_specs, (ROWS, state_spec))(prompts, key, step, limits, resume)
    return requests, _pin(mesh, state, laid_out)


def resumed(
    prompts: Prompts, requests: decode.Requests, state: decode.DecodeState, resume: Rollout
) -> tuple[decode.Requests, decode.DecodeState]:
    """The queue and the state of `start`, with what its requests have drawn already."""
    drawn = resume.response_mask.sum(-1, dtype=jnp.int32)  # [N]
    first = prompts.mask.sum(-1)[requests.prompt]  # [N], column of the first response token
    columns = first[:, None] + jnp.arange(state.responses.tokens.shape[1])  # [N, R]
    rows = decode.Responses(resume.tokens, resume.sampler_logp, resume.model_logp)  # each [N, T]
    responses = jax.tree.map(lambda values: jnp.take_along_axis(values, columns, axis=1), rows)
    status = jnp.where(resume.finished | (drawn >= requests.max_new), decode.COMPLETE, decode.WAITING)
    changed = dict(responses=responses, status=status, length=drawn, finished=resume.finished)
    return dataclasses.replace(requests, drawn=drawn), dataclasses.replace(state, **changed)


@cache
def segment_on(platform: str) -> Any:
    """`decode_segment`, jitted for a platform; the state is donated."""

    def decode_segment(
        sampler: decode.Sampler, mesh: Mesh, inputs: decode.Inputs, state: decode.DecodeState, max_steps: jax.Array
    ) -> tuple[jax.Array, decode.DecodeState]:
        """Decodes at most `max_steps` tokens in every slot: (bool[], whether any shard has requests left; state)."""
        inputs_spec, state_spec = layouts(sampler.kernel.rows)
        in_specs = (inputs_spec, state_spec, REPLICATED)
        advance = parallel.over_rows(mesh, partial(batching.advance, sampler), in_specs, (REPLICATED, state_spec))
        unfinished, state = advance(inputs, state, max_steps)
        return unfinished, _pin(mesh, state, layouts(sampler.kernel.spec)[1])

    options = SAME_SUMS if platform == "cpu" else None
    if platform == "tpu":
        # libtpu merges the Python frames of operations that it inlines. With a tensor axis and tens of layers it
        # took over 20 minutes or crashed; without frames it takes one minute.
        jax.config.update("jax_traceback_in_locations_limit", 0)
    static, donated = ("sampler", "mesh"), ("state",)
    return jax.jit(decode_segment, static_argnames=static, donate_argnames=donated, compiler_options=options)


@partial(jax.jit, static_argnames=("mesh", "samples", "keep_all"))
def _rollout(mesh, prompts, responses, progress, samples, keep_all):
    """Rows of prompt ++ response ++ zeros, from responses in the order of the queue.

    `progress` are fields of the state; responses that are not complete are empty unless `keep_all`.
    """

    def rollout(prompts, responses, progress):
        length, finished, status, request, drawn = progress
        if keep_all:
            length = length.at[jnp.where(request >= 0, request, pages.NOWHERE)].max(drawn, mode="drop")
        else:
            length = jnp.where(status == decode.COMPLETE, length, 0)
        count, columns = prompts.tokens.shape
        row, longest = jnp.arange(count * samples), responses.tokens.shape[1]
        prompt = jnp.repeat(jnp.where(prompts.mask, prompts.tokens, 0), samples, axis=0)  # [N, Tp]
        start = jnp.repeat(prompts.mask.sum(-1), samples)  # [N], column of the first response token
        index = jnp.arange(columns + longest) - start[:, None]  # [N, T], index within the response
        mask = (index >= 0) & (index < length[:, None])

        def shifted(values):  # [N, R] -> [N, T]
            return jnp.where(mask, jnp.take_along_axis(values, jnp.clip(index, 0, longest - 1), axis=1), 0)

        drawn = jax.tree.map(shifted, responses)
        return Rollout(
            tokens=jnp.pad(prompt, ((0, 0), (0, longest))) + drawn.tokens,
            response_mask=mask,
            sampler_logp=drawn.sampler_logp,
            model_logp=drawn.model_logp,
            problem=jnp.repeat(prompts.problem, samples),
            sample=row % samples,
            finished=finished,
        )

    rows = parallel.over_rows(mesh, rollout, ROWS, ROWS)(prompts, responses, progress)
    return _pin(mesh, rows, ROWS)
