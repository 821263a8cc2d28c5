"""The four programs of an RL step with abstract arguments, and the memory that other arrays take while each runs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from rpg_jax import parallel
from rpg_jax.lab.planning.sketch import Sketch
from rpg_jax.models import Model, quantize_params, unstack_layers
from rpg_jax.sampling import batching, decode
from rpg_jax.sampling.generate import decode_segment, layouts, make_sampler, start, to_answer
from rpg_jax.training.ahead import learning
from rpg_jax.training.settings import RolloutSettings
from rpg_jax.types import Params

SEGMENT = 256  # decode steps between two returns to the host; a segment takes about a second


class Program(NamedTuple):
    """A jitted function with abstract arguments."""

    function: Callable
    arguments: tuple
    beside: float  # bytes of a device that arrays take which the program does not read
    turns: float  # of its loops whose trip count is not a constant, in the work that `floor.costs` counts as one
    cache: float = 0.0  # bytes of the KV cache on a device
    apart: tuple[str, ...] = ()  # named scopes whose loops and conditionals are no part of that work
    outside: float = 1.0  # share of what is outside of its loops, in that work
    chunks: float = 1.0  # turns of such a loop within another


def device_bytes(tree: Any) -> float:
    """Bytes that the abstract arrays of a tree take in the memory of one device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
    on_device = [leaf for leaf in leaves if leaf.sharding.memory_kind != "pinned_host"]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in on_device)


def laid_out(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """The shapes of a tree with shardings; `specs` is a PartitionSpec, or a tree of them for parts of the tree."""

    def of_part(spec, part):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

    return jax.tree.map(of_part, specs, tree)


@partial(jax.jit, static_argnames=("sampler", "mesh"), donate_argnames=("state",))
def prefill(
    sampler: decode.Sampler, mesh: Mesh, inputs: decode.Inputs, state: decode.DecodeState
) -> decode.DecodeState:
    """All prompts, as many at a time as the sampler prefills; `decode_segment` does it between its decode steps."""

    def load(inputs, state):
        inputs = decode.prepared(sampler, inputs, state)
        return batching.prefill(sampler, inputs, state, ~state.prompt_ready)

    inputs_spec, state_spec = layouts(sampler.kernel.rows, inputs.params)
    return parallel.over_rows(mesh, load, (inputs_spec, state_spec), state_spec)(inputs, state)


def sampler_programs(
    model: Model, mesh: Mesh, params: Params, rollout: RolloutSettings, conversation: bool = False
) -> dict[str, tuple[Callable, tuple]]:
    """Prefill and decode as (jitted function, its arguments), with the shapes that `generate` calls them with; `params`
    are those of the unstacked tree, with shardings."""
    prompts, sizes = rollout.fresh_prompts, dict(samples=rollout.samples, max_new=rollout.max_new)
    sizes["routes"] = rollout.recorded(model.config)
    every, key = parallel.REPLICATED, jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    scalar = laid_out(mesh, jax.ShapeDtypeStruct((), jnp.int32), every)
    counts = laid_out(mesh, jax.ShapeDtypeStruct((prompts,), jnp.int32), parallel.ROWS)
    tokens = laid_out(mesh, jax.ShapeDtypeStruct((prompts, rollout.max_prompt), jnp.int32), parallel.ROWS)
    rows = laid_out(mesh, jax.eval_shape(partial(to_answer, mesh, **sizes), tokens, counts, counts), parallel.ROWS)
    requests = prompts * rollout.samples
    sampler, slots, pages = make_sampler(
        model, mesh, rollout.decoding, rollout.max_prompt, rollout.max_new, requests, conversation
    )
    counted = dict(samples=rollout.samples, slots=slots, cache_pages=pages)
    begin = partial(start, sampler, mesh, **counted)
    keys, state = jax.eval_shape(begin, rows, laid_out(mesh, key, every), scalar, counts)
    state = laid_out(mesh, state, layouts(sampler.kernel.spec)[1])
    inputs = decode.Inputs(
        params=params,
        key=laid_out(mesh, keys, parallel.ROWS),
        sampling=laid_out(mesh, jax.eval_shape(decode.Sampling.make), every),
        version=scalar,
        until=scalar,
        must=laid_out(mesh, jax.ShapeDtypeStruct((requests,), bool), parallel.ROWS),
        stops=None,
    )
    return {
        "prefill": (prefill, (sampler, mesh, inputs, state)),
        "decode": (decode_segment, (sampler, mesh, inputs, state, scalar)),
    }


def programs(sketch: Sketch) -> dict[str, Program]:
    """The programs of an RL step by phase, in the order of `workload.PHASES`."""
    run, checkpoint, workload = sketch.run, sketch.checkpoint, sketch.workload
    rollout, loop, state = workload.rollout, workload.loop, checkpoint.state
    learn = learning(sketch.parts, loop, rollout, checkpoint)
    responses, minibatch = (learn[phase][1][1] for phase in ("experience", "update"))
    batch = device_bytes(minibatch) * loop.prompts // loop.minibatch_prompts
    cast = partial(jax.tree.map, lambda x: x.astype(run.model.dtype))
    weights = jax.eval_shape(lambda params: unstack_layers(cast(params)), run.model.shapes)
    if rollout.weights_dtype:
        weights = jax.eval_shape(partial(quantize_params, dtype=rollout.weights_dtype), weights)
    layout = parallel.shardings(run.sampler_mesh, weights, parallel.SAMPLING)
    weights = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), weights, layout)
    sampler = sampler_programs(run.sampler_model, run.sampler_mesh, weights, rollout, sketch.conversation)
    drawing = sampler["decode"][1][3]  # the state of decoding
    beside_sampling = device_bytes(checkpoint) if run.sampler_mesh is run.mesh else 0.0
    return {
        "prefill": Program(*sampler["prefill"], beside=beside_sampling, turns=sketch.sides["prefill"].prefill_passes()),
        "decode": Program(
            *sampler["decode"],
            beside=beside_sampling,
            turns=1,
            cache=device_bytes(drawing.pools),
            apart=("prefill",),
            outside=1 / SEGMENT,
        ),
        "experience": Program(
            *learn["experience"],
            beside=device_bytes(state if checkpoint.past else state.opt_state),
            turns=workload.microbatches(workload.step_rows, loop.scoring_rows),
        ),
        "update": Program(
            *learn["update"],
            beside=batch + device_bytes(responses),
            turns=workload.microbatches(workload.minibatch_rows, loop.microbatch_rows),
            chunks=sketch.chunks,
        ),
    }
