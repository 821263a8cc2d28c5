"""The programs that learn, from shapes alone: compiled on a thread while the first responses are drawn, or planned.

JAX keeps what it has compiled for the shapes and shardings of a program's arguments, and a call with such arrays uses
it. So nothing waits for these programs that has the first evaluation and rollout to compile and to run.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from rpg_jax import parallel
from rpg_jax.sampling import no_sequences
from rpg_jax.training.loop import Parts
from rpg_jax.training.phases import phase
from rpg_jax.training.policies import held, scored
from rpg_jax.training.settings import LoopSettings, RolloutSettings
from rpg_jax.types import Checkpoint


def learning(
    parts: Parts, settings: LoopSettings, rollout: RolloutSettings, checkpoint: Checkpoint
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """The jitted functions of the phases "experience" and "update", and the arguments that a step calls them with; the
    checkpoint may be shapes with shardings, as the responses and batches of the result are."""
    state, rows = checkpoint.state, settings.prompts * settings.samples
    spread = NamedSharding(parallel.mesh_of(state.step), parallel.ROWS)

    def by_rows(tree, count):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=spread), tree)

    current = jax.eval_shape(parts.policies.current, state)
    current = dataclasses.replace(current, params=state.params, version=state.step)  # laid out
    policies = scored(parts.policies._replace(current=lambda _: current), checkpoint, parts.source)
    sizes = rows, rollout.max_prompt + rollout.max_new, rollout.recorded(current.model.config)
    responses = by_rows(jax.eval_shape(lambda: no_sequences(*sizes)), rows)
    score = policies, responses, settings.plan(np.ones(rows, int), settings.scoring_rows)
    rewards = jax.ShapeDtypeStruct((settings.prompts, settings.samples), jnp.float32)
    scores = jax.eval_shape(parts.score, *score)
    batch, _ = jax.eval_shape(parts.experience, responses, (rewards, None), scores, state.step)
    rows = settings.minibatch_prompts * settings.samples
    plan = settings.plan(np.ones(rows, int), settings.microbatch_rows)
    update = state, by_rows(batch, rows), plan, held(checkpoint)
    return {"experience": (parts.score, score), "update": (parts.update, update)}


@contextlib.contextmanager
def compiled_ahead(
    parts: Parts, settings: LoopSettings, rollout: RolloutSettings, checkpoint: Checkpoint
) -> Iterator[Parts]:
    """Compiles the programs of `learning` and of looks on a thread; gives parts whose first step waits for them."""

    def compile_all():
        learn = learning(parts, settings, rollout, checkpoint)
        looks = [] if parts.look is None else [parts.look.program(checkpoint, *learn["update"][1][1:3])]
        for name, (function, arguments) in [*learn.items(), *(("update", program) for program in looks)]:
            if left.is_set():
                return
            with phase(name):
                function.lower(*arguments).compile()

    thread, left = ThreadPoolExecutor(1, "compiling"), threading.Event()
    done = thread.submit(compile_all)

    def score(*arguments):
        done.result()
        return parts.score(*arguments)

    try:
        yield dataclasses.replace(parts, score=score)
    finally:  # what stops a run is told at once, and the process ends with the program that is being compiled
        left.set()
        thread.shutdown(wait=False)
