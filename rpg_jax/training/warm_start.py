"""Supervised warm start on worked solutions: the policy update with the plain log-likelihood as its objective."""

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import parallel
from rpg_jax.data import supervised_rows
from rpg_jax.types import TrainBatch


def supervised_batch(mesh, problems, tokenizer, length) -> TrainBatch:
    """Worked solutions as a TrainBatch of advantage one: REINFORCE on it is maximum likelihood."""
    tokens, mask = supervised_rows(problems, tokenizer, length, key="rollout.max_prompt + rollout.max_new")
    zeros = np.zeros(tokens.shape, np.float32)
    batch = TrainBatch(tokens, mask, zeros, zeros, np.ones((len(tokens), 1), np.float32), zeros + 1.0)
    return parallel.to_global(mesh, parallel.ROWS, batch)


def run(state, start, steps, *, update, next_batch, microbatches, save, save_every, progress, should_stop):
    """Trains from update `start` to `steps`; returns (state, whether it came to its end).

    `next_batch() -> TrainBatch`; `save(step, state, wait)` is called every `save_every` updates and at the end.
    """
    for step in range(start, steps):
        if should_stop():
            save(step, state, True)
            return state, False
        state, metrics = update(state, next_batch(), jnp.int32(microbatches))
        progress(step + 1, loss=float(jax.device_get(metrics["loss"]).value()))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            save(step + 1, state, step + 1 == steps)
    return state, True
