"""The phases of a run: their names in a trace, and what to lower when one of them runs out of memory."""

import contextlib

import jax

SHARD = "spread it over more devices (mesh.fsdp)"
ROWS = "lower learner.microbatch_rows or learner.logprob_chunk"
# What to do, for each phase, when the device's memory is too small for it.
REMEDIES = {
    "state": SHARD,
    "warm start": "lower warm_start.microbatch_rows or learner.logprob_chunk, or set model.remat=full",
    "reference": f"use reference.mode=iterative, which keeps no second policy, or {SHARD}",
    "rollout": "lower rollout.slots",
    "experience": ROWS,
    "update": f"{ROWS}, or set model.remat=full",
    "evaluation": "lower rollout.slots (--slots of evaluate)",
}


class OutOfMemory(RuntimeError):
    """A device's memory was too small for a phase; says which, and what to lower."""


@contextlib.contextmanager
def phase(name: str):
    """Runs a phase, one of `REMEDIES`, under its name in a trace; JAX's out-of-memory error becomes `OutOfMemory`.

    Programs run asynchronously: results are to be waited for inside.
    """
    try:
        with jax.profiler.TraceAnnotation(name):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = " ".join(str(error).splitlines()[0].split())[:200].rstrip(" .")
        raise OutOfMemory(
            f"out of memory in phase {name!r} ({reason}): {REMEDIES[name]}; "
            f"python -m rpg_jax.plan says what each phase takes"
        ) from error
