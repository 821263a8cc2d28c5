"""The supervised warm start of a run: its own optimizer, update, order of problems and checkpoints."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from rpg_jax import InputError, data, objectives, parallel
from rpg_jax.parallel import multihost
from rpg_jax.run.build import Run
from rpg_jax.run.states import abstract, initial_params, load_frozen, restore
from rpg_jax.storage.checkpoints import Checkpoints
from rpg_jax.storage.logs import Progress
from rpg_jax.training import packing
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.phases import say
from rpg_jax.training.skipped import MEND, NothingLearned, split_finiteness
from rpg_jax.training.update import Update, init_state, make_update
from rpg_jax.types import Checkpoint, Params, TrainBatch, TrainState


def warm_started(
    config: ConfigDict, run: Run, path: epath.Path, should_stop: Callable[[], bool]
) -> tuple[Params | None, float]:
    """Trained parameters after learning from worked solutions, and the seconds it took; None and seconds if told to
    stop.

    Checkpoints go into the folder `path`, where an interrupted warm start goes on.
    """
    begin, settings, run = time.perf_counter(), config.warm_start, dataclasses.replace(run, teacher=None)
    if not settings.steps:
        return initial_params(config, run), time.perf_counter() - begin
    optimizer = make_optimizer(
        config.optimizer.name,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        beta2=config.optimizer.beta2,
        offload=config.optimizer.offload,
    )

    def build_state(params, **frozen):
        return Checkpoint(init_state(optimizer, run.mesh, params), **frozen)

    shapes = abstract(run, build_state)
    update = make_update(
        run.model, objectives.make("reinforce"), optimizer, run.mesh, shapes.state,
        rows=settings.microbatch_rows, temperature=settings.temperature,
        clip_norm=config.optimizer.clip_norm, logprob_chunk=config.learner.logprob_chunk,
        packed_columns=run.loop.packed_columns, router_balance=config.model.router_balance,
    )  # fmt: skip
    stream = data.ProblemStream(run.data.problems("train"), config.seed)
    length = run.rollout.max_prompt + run.rollout.max_new
    with Checkpoints(path, keep_last=config.checkpoint.keep_last) as checkpoints:
        restored = restore(checkpoints, shapes, partial(load_frozen, config, run))
        if restored is None:
            fresh = build_state(initial_params(config, run), **load_frozen(config, run))
            restored = 0, fresh, {"cursor": 0, "seconds": 0.0}
        start, checkpoint, extra = restored
        if start:
            say(f"goes on at update {start} of the warm start")
        stream.cursor = extra["cursor"]

        def seconds():
            return extra["seconds"] + time.perf_counter() - begin

        def save(step, state, wait):
            if checkpoints.latest_step() != step:  # else told to stop just after it was saved
                extra = {"cursor": stream.cursor, "seconds": seconds()}
                checkpoints.save(step, Checkpoint(state, checksums=checkpoint.checksums), extra, wait=wait)

        def next_batch():
            problems = stream.next(settings.batch, multihost.row_indices(run.mesh, settings.batch))
            tokens, lengths, mask = data.supervised_rows(problems, run.data.tokenizer, length)
            zeros = np.zeros(tokens.shape, np.float32)  # with advantages of 1, REINFORCE is maximum likelihood
            batch = TrainBatch(tokens, lengths, mask, zeros, zeros, zeros[:, :1] + 1.0, zeros + 1.0)
            batch = parallel.to_global(run.mesh, parallel.ROWS, batch)
            lengths = packing.on_host(batch.length)  # of all processes
            return batch, run.loop.plan(lengths, settings.microbatch_rows), checkpoint.frozen

        with Progress("warm start", start, settings.steps) as progress:
            state, finished = learn(
                checkpoint.state, start, settings.steps, update=update, next_batch=next_batch, save=save,
                progress=progress, save_every=settings.save_every, should_stop=should_stop,
                most_skipped=config.checkpoint.most_skipped,
            )  # fmt: skip
    if not finished:
        return None, seconds()
    shardings = parallel.shardings(run.mesh, state.params)
    policy = jax.jit(optimizer.evaluation_params, donate_argnums=1, out_shardings=shardings)
    return policy(state.opt_state, state.params), seconds()


def learn(
    state: TrainState, start: int, steps: int, *, update: Update, next_batch: Callable[[], tuple],
    save: Callable[[int, TrainState, bool], None], save_every: int, progress: Callable[..., None],
    should_stop: Callable[[], bool], most_skipped: int,
) -> tuple[TrainState, bool]:  # fmt: skip
    """Trains from update `start` to `steps`; returns (state, whether it came to its end).

    `next_batch()` gives what `update` takes beside the state: a TrainBatch, its `packing.plan` and the frozen policies.
    `save(step, state, wait)` is called every `save_every` updates and at the end. Raises InputError after
    `most_skipped` non-finite updates in a row, and NothingLearned when none of all updates was finite.
    """
    has_skipped = False
    for step in range(start, steps):
        if should_stop():
            save(step, state, True)
            say(f"saved update {step} of the warm start; the same command goes on")
            return state, False
        if step == start:
            say("compiling: warm start")
        state, metrics = update(state, *next_batch())
        metrics, reason = split_finiteness(jax.device_get(metrics))
        if reason and not has_skipped:
            has_skipped = True
            say(f"warning: warm start, update {step + 1} was skipped: {reason}")
        if int(state.skipped[1]) >= most_skipped:
            raise InputError(
                f"warm start, update {step + 1}: the last {most_skipped} updates had a non-finite loss, gradient or "
                f"step and were skipped, so parameters are unchanged; lower warm_start.learning_rate"
            )
        progress(step + 1, loss=float(metrics["loss"].value()))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save(step + 1, state, step + 1 == steps)
    if steps and not int(state.step):
        raise NothingLearned(f"no update of the warm start was applied, {steps} were not finite; {MEND}")
    return state, True
