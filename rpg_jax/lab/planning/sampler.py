"""The sampler's jitted programs and the shapes that `generate` calls them with, to compile them without weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rpg_jax import parallel
from rpg_jax.models import Model
from rpg_jax.sampling import batching, decode
from rpg_jax.sampling.generate import PAGE_SIZE, layouts, make_sampler, pool_pages, segment_on, shard_slots, start
from rpg_jax.types import Params, Prompts


@partial(jax.jit, static_argnames=("sampler", "mesh"), donate_argnames=("state",))
def prefill(
    sampler: decode.Sampler, mesh: Mesh, inputs: decode.Inputs, state: decode.DecodeState
) -> decode.DecodeState:
    """As many prompts as the sampler prefills at a time; `decode_segment` does it between its decode steps."""

    def load(inputs, state):
        inputs = decode.prepared(sampler, inputs, state)
        return batching.load_prompts(sampler, inputs, state, ~state.prompt_ready)

    inputs_spec, state_spec = layouts(sampler.kernel.rows)
    return parallel.over_rows(mesh, load, (inputs_spec, state_spec), state_spec)(inputs, state)


def sampler_programs(
    model: Model, mesh: Mesh, params: Params, *, prompts: int, max_prompt: int, samples: int, max_new: int, slots: int,
    page_size: int = PAGE_SIZE, cache_pages: int | None = None, cache_dtype: str | None = None,
) -> dict[str, tuple[Any, tuple]]:  # fmt: skip
    """Prefill and decode as (jitted function, its arguments), ready for `function.lower(*arguments)`.

    Args:
      params: shapes of the unstacked tree, with shardings; the others as `generate` takes them, `prompts` a count.
    """

    def shape(dimensions, dtype, spec):
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=NamedSharding(mesh, spec))

    def scalar(dtype):
        return shape((), dtype, parallel.REPLICATED)

    def laid_out(tree, specs):
        return jax.tree.map(lambda spec, part: jax.tree.map(lambda x: shape(x.shape, x.dtype, spec), part), specs, tree)

    by_rows, shards = parallel.ROWS, parallel.row_shards(mesh)
    queue = Prompts(
        shape((prompts, max_prompt), jnp.int32, by_rows),
        shape((prompts, max_prompt), bool, by_rows),
        shape((prompts,), jnp.int32, by_rows),
    )
    key = scalar(jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype)
    sampler = make_sampler(model, mesh, max_prompt, max_new, page_size, cache_dtype=cache_dtype)
    slots = shard_slots(slots, prompts * samples, shards)
    pool = pool_pages(sampler.page_size, max_prompt, max_new, slots, cache_pages, shards)
    arrays = queue, key, scalar(jnp.int32), shape((prompts,), jnp.int32, by_rows)
    begin = partial(start, sampler, mesh, samples=samples, max_new=max_new, slots=slots, cache_pages=pool)
    requests, state = jax.eval_shape(begin, *arrays)
    state = laid_out(state, layouts(sampler.kernel.spec)[1])
    sampling = laid_out(jax.eval_shape(decode.Sampling.make), parallel.REPLICATED)
    until, must = scalar(jnp.int32), shape((prompts,), bool, by_rows)
    inputs = decode.Inputs(params, queue, laid_out(requests, by_rows), sampling, scalar(jnp.float32), until, must)
    return {
        "prefill": (prefill, (sampler, mesh, inputs, state)),
        "decode": (segment_on(mesh.devices.flat[0].platform), (sampler, mesh, inputs, state, scalar(jnp.int32))),
    }
