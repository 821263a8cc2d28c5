"""Supervised warm start on worked solutions: the policy's update with the log-likelihood as its objective."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rpg_jax import InputError, parallel
from rpg_jax.data import Problem, Tokenizer, supervised_rows
from rpg_jax.training.phases import say
from rpg_jax.training.skipped import MEND, NothingLearned, split_finiteness
from rpg_jax.training.update import Update
from rpg_jax.types import TrainBatch, TrainState


def supervised_batch(mesh: Mesh, problems: Sequence[Problem], tokenizer: Tokenizer, length: int) -> TrainBatch:
    """Worked solutions as a TrainBatch whose advantages are 1: REINFORCE on it is maximum likelihood."""
    tokens, lengths, mask = supervised_rows(problems, tokenizer, length, key="rollout.max_prompt + rollout.max_new")
    zeros: Any = np.zeros(tokens.shape, np.float32)
    batch = TrainBatch(tokens, lengths, mask, zeros, zeros, zeros[:, :1] + 1.0, zeros + 1.0)
    return parallel.to_global(mesh, parallel.ROWS, batch)


def run(
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
