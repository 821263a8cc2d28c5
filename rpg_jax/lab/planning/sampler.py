"""The sampler's jitted programs and the shapes that `generate` calls them with, to compile them without weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rpg_jax import parallel
from rpg_jax.models import Model
from rpg_jax.sampling.decode import Sampling
from rpg_jax.sampling.generate import LAYOUTS, PREFILL_ROWS, decode_segment, prefill_and_start
from rpg_jax.types import Params, Prompts


def sampler_programs(
    model: Model, mesh: Mesh, params: Params, *, prompts: int, max_prompt: int, samples: int, max_new: int, slots: int
) -> dict[str, tuple[Any, tuple]]:
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
    sizes = samples, max_new, min(slots, prompts * samples) // shards, -(-PREFILL_ROWS // shards)
    start = model, mesh, params, queue, key, scalar(jnp.int32), shape((prompts,), jnp.int32, by_rows), *sizes
    traced = jax.eval_shape(lambda *arrays: prefill_and_start(model, mesh, *arrays, *sizes), *start[2:-4])
    requests, prefix, state = laid_out(traced, LAYOUTS)
    sampling = laid_out(jax.eval_shape(Sampling.make), parallel.REPLICATED)
    decode = model, mesh, params, requests, prefix, sampling, scalar(jnp.float32), state, scalar(jnp.int32)
    return {"prefill": (prefill_and_start, start), "decode": (decode_segment, decode)}
