"""The supervised warm start of a run: its own optimizer, update, order of problems and checkpoints."""

import dataclasses
import time
from functools import partial

import jax

from rpg_jax import data, objectives, parallel
from rpg_jax.parallel import multihost
from rpg_jax.run.build import Run
from rpg_jax.run.states import abstract, initial_params
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.storage.logs import Progress
from rpg_jax.training import warm_start
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.update import init_state, make_update


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The warm start's own optimizer, update and order of problems."""

    optimizer: object
    update: object
    stream: data.ProblemStream
    shapes: object  # its state, abstract
    fresh: object  # () -> its state at the beginning


def build_warm_start(config, run: Run) -> WarmStart:
    warm = config.warm_start
    optimizer = make_optimizer(
        config.optimizer.name,
        learning_rate=warm.learning_rate,
        warmup_steps=warm.warmup_steps,
        beta2=config.optimizer.beta2,
        offload=config.optimizer.offload,
    )
    build = partial(init_state, optimizer, run.mesh)
    shapes = abstract(run, build)
    update = make_update(
        run.model,
        objectives.make("reinforce"),
        optimizer,
        run.mesh,
        shapes,
        rows=warm.microbatch_rows,
        temperature=warm.temperature,
        clip_norm=config.optimizer.clip_norm,
        logprob_chunk=config.learner.logprob_chunk,
    )
    stream = data.ProblemStream(run.data.problems("train"), config.seed)
    return WarmStart(optimizer, update, stream, shapes, lambda: build(initial_params(config, run)))


def warm_started(config, run, path, should_stop):
    """Parameters after learning from worked solutions, and the seconds it took; None and seconds if told to stop."""
    begin, settings = time.perf_counter(), config.warm_start
    if not settings.steps:
        return initial_params(config, run), time.perf_counter() - begin
    warm = build_warm_start(config, run)
    length = run.rollout.max_prompt + run.rollout.max_new
    with Checkpoints(path, keep_last=config.checkpoint.keep_last) as checkpoints:
        start, state, extra = checkpoints.restore(warm.shapes) or (0, warm.fresh(), {"cursor": 0, "seconds": 0.0})
        warm.stream.set_state(extra["cursor"])

        def seconds():
            return extra["seconds"] + time.perf_counter() - begin

        def save(step, state, wait):
            checkpoints.save(step, state, {"cursor": warm.stream.get_state(), "seconds": seconds()}, wait=wait)

        def next_batch():
            problems = warm.stream.next(settings.batch, multihost.row_indices(run.mesh, settings.batch))
            return warm_start.supervised_batch(run.mesh, problems, run.data.tokenizer, length)

        with Progress("warm start", start, settings.steps) as progress:
            state, finished = warm_start.run(
                state, start, settings.steps, update=warm.update, next_batch=next_batch, save=save, progress=progress,
                microbatches=settings.batch // settings.microbatch_rows, save_every=settings.save_every,
                should_stop=should_stop,
            )  # fmt: skip
    if not finished:
        return None, seconds()
    policy = jax.jit(
        warm.optimizer.evaluation_params, donate_argnums=1, out_shardings=parallel.shardings(run.mesh, state.params)
    )
    return policy(state.opt_state, state.params), seconds()
