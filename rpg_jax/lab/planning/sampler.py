"""The sampler's jitted programs and the shapes that `generate` calls them with, to compile them without weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rpg_jax import parallel
from rpg_jax.models import Model
from rpg_jax.sampling import Decoding, batching, decode
from rpg_jax.sampling.generate import decode_segment, layouts, make_sampler, start, to_answer
from rpg_jax.types import Params


@partial(jax.jit, static_argnames=("sampler", "mesh"), donate_argnames=("state",))
def prefill(
    sampler: decode.Sampler, mesh: Mesh, inputs: decode.Inputs, state: decode.DecodeState
) -> decode.DecodeState:
    """All prompts, as many at a time as the sampler prefills; `decode_segment` does it between its decode steps."""

    def load(inputs, state):
        inputs = decode.prepared(sampler, inputs, state)
        return batching.prefill(sampler, inputs, state, ~state.prompt_ready, state.done)

    inputs_spec, state_spec = layouts(sampler.kernel.rows)
    return parallel.over_rows(mesh, load, (inputs_spec, state_spec), state_spec)(inputs, state)


def sampler_programs(
    model: Model, mesh: Mesh, params: Params, *, prompts: int, max_prompt: int, samples: int, max_new: int,
    decoding: Decoding,
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

    by_rows = parallel.ROWS
    counts = shape((prompts,), jnp.int32, by_rows)
    tokens = shape((prompts, max_prompt), jnp.int32, by_rows)
    rows = jax.eval_shape(partial(to_answer, mesh, samples=samples, max_new=max_new), tokens, counts, counts)
    rows = laid_out(rows, by_rows)
    key = scalar(jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype)
    sampler, slots, pages = make_sampler(model, mesh, decoding, max_prompt, max_new, prompts * samples)
    begin = partial(start, sampler, mesh, samples=samples, slots=slots, cache_pages=pages)
    inputs, state = jax.eval_shape(begin, rows, key, scalar(jnp.int32), counts)
    state = laid_out(state, layouts(sampler.kernel.spec)[1])
    inputs = decode.Inputs(
        params=params,
        key=laid_out(inputs.key, by_rows),
        limit=laid_out(inputs.limit, by_rows),
        sampling=laid_out(jax.eval_shape(decode.Sampling.make), parallel.REPLICATED),
        model_temperature=scalar(jnp.float32),
        version=scalar(jnp.int32),
        until=scalar(jnp.int32),
        must=shape((prompts,), bool, by_rows),
    )
    return {
        "prefill": (prefill, (sampler, mesh, inputs, state)),
        "decode": (decode_segment, (sampler, mesh, inputs, state, scalar(jnp.int32))),
    }
