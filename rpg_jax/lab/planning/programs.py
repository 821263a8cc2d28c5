"""The programs of an RL step as shapes: what each is called with, what lies beside it, and what compiling it tells."""

import math
import re
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from rpg_jax import parallel
from rpg_jax.lab.planning import hlo
from rpg_jax.lab.planning.chips import GIB
from rpg_jax.sampling import ahead
from rpg_jax.types import Rollout

PHASES = ("prefill", "decode", "experience", "update")


class Program(NamedTuple):
    """A jitted function with abstract arguments."""

    function: object
    arguments: tuple
    beside: float  # bytes of a device that other arrays take meanwhile
    turns: float  # of its loops with a traced count, for one run as `estimates` counts them

    def argument_bytes(self) -> float:
        return device_bytes(self.arguments)


def device_bytes(tree) -> float:
    """Bytes that the abstract arrays of a tree take in the memory of one device."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.ShapeDtypeStruct)]
    here = [leaf for leaf in leaves if leaf.sharding.memory_kind != "pinned_host"]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in here)


def programs(run, parts, state) -> dict[str, Program]:
    """The programs of a step by phase.

    Args:
      run: the mesh, the model and the settings, as `build.Run`; parts: the step's jitted functions, as `loop.Parts`.
      state: the abstract TrainState, with shardings.
    """
    mesh, rollout, loop = run.mesh, run.rollout, run.loop
    by_rows = NamedSharding(mesh, parallel.ROWS)

    def rows(count, dtype, *columns):
        return jax.ShapeDtypeStruct((count, *columns), dtype, sharding=by_rows)

    def responses(count):
        length = rollout.max_prompt + rollout.max_new
        drawn = [rows(count, dtype, length) for dtype in (jnp.int32, bool, jnp.float32, jnp.float32)]
        return Rollout(*drawn, rows(count, jnp.int32), rows(count, jnp.int32), rows(count, bool))

    def replicated(dimensions, dtype):
        return jax.ShapeDtypeStruct(dimensions, dtype, sharding=NamedSharding(mesh, parallel.REPLICATED))

    def plan_of(count):
        """Of `loop.plan`: the number of microbatches, and where sequences of packed rows start."""
        return replicated((), jnp.int32), replicated((count,), jnp.int32) if loop.pack else None

    def on_mesh(tree, layout):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout)

    weights = jax.eval_shape(parts.sampling_params, state)
    weights = on_mesh(weights, parallel.shardings(mesh, weights, parallel.SAMPLING))
    sampler = ahead.programs(
        run.model, mesh, weights, prompts=rollout.fresh_prompts, max_prompt=rollout.max_prompt,
        samples=rollout.samples, max_new=rollout.max_new, slots=rollout.slots,
    )  # fmt: skip
    collected = responses(loop.prompts * loop.samples)
    reward = replicated((loop.prompts, loop.samples), jnp.float32)
    of_experience = state, collected, reward, *plan_of(loop.prompts * loop.samples)
    batch, _ = jax.eval_shape(parts.experience, *of_experience)
    batch = jax.tree.map(lambda x: rows(x.shape[0], x.dtype, *x.shape[1:]), batch)
    count = loop.minibatch_prompts * loop.samples
    minibatch = jax.tree.map(lambda x: rows(count, x.dtype, *x.shape[1:]), batch)
    of_update = state, minibatch, *plan_of(count)
    held, turns = device_bytes(state), 1 / loop.microbatch_rows
    return {
        "prefill": Program(*sampler["prefill"], beside=held, turns=1),
        "decode": Program(*sampler["decode"], beside=held, turns=1),
        "experience": Program(parts.experience, of_experience, beside=0, turns=loop.prompts * loop.samples * turns),
        "update": Program(parts.update, of_update, beside=device_bytes((batch, collected)), turns=count * turns),
    }


def compiled(program: Program) -> dict:
    """Compiles a program and reports bytes of a device and its collectives; `refused` if the compiler says no.

    Returns:
      arguments, output (what is not written over arguments), temporaries (held at once beside those two), code, beside,
      peak: bytes; collectives: kind -> {count, sent}; sent: bytes in all; seconds: of compiling.
    """
    begin = time.perf_counter()
    try:
        made = program.function.lower(*program.arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _refused(str(error), program) | {"seconds": time.perf_counter() - begin}
    memory, traffic = made.memory_analysis(), hlo.collectives(made.as_text(), program.turns)
    arguments = memory.argument_size_in_bytes
    output = memory.output_size_in_bytes - memory.alias_size_in_bytes
    found = {
        "arguments": arguments,
        # libtpu's temp_size counts buffers that share memory twice: it accepts programs by their peak.
        "temporaries": max(memory.peak_memory_in_bytes - arguments - output, 0),
        "output": output,
        "code": memory.generated_code_size_in_bytes,
        # Arguments that the program never reads are no part of it, and are there all the same.
        "beside": program.beside + max(program.argument_bytes() - arguments, 0),
    }
    return found | {
        "peak": sum(found.values()),
        "collectives": {kind: one._asdict() for kind, one in traffic.items()},
        "sent": sum(one.sent for one in traffic.values()),
        "seconds": time.perf_counter() - begin,
    }


def _refused(words: str, program: Program) -> dict:
    """What is known of a program that is too large for the compiler, from its words."""
    sizes = [float(number) * {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}[unit]
             for number, unit in re.findall(r"([\d.]+)([KMGT])\b", words)]  # fmt: skip
    arguments = program.argument_bytes()
    needed = max(sizes, default=math.inf)
    return {
        "arguments": arguments, "temporaries": None, "output": None, "code": None, "beside": program.beside,
        "peak": max(needed, arguments) + program.beside, "collectives": {}, "sent": None,
        "refused": " ".join(words.split())[:200],
    }  # fmt: skip


def modelled(program: Program, needs: dict, sent: float) -> dict:
    """What `compiled` reports, from shapes alone."""
    arguments = program.argument_bytes()
    return {
        "arguments": arguments, "temporaries": needs["sum"], "output": 0, "code": 0, "beside": program.beside,
        "peak": arguments + needs["sum"] + program.beside, "collectives": {}, "sent": sent, "seconds": 0.0,
    }  # fmt: skip
