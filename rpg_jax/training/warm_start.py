"""Supervised warm start on worked solutions: the policy update with the plain log-likelihood as its objective."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import parallel
from rpg_jax.data import supervised_rows
from rpg_jax.types import TrainBatch


def supervised_batch(mesh, problems, tokenizer, length) -> TrainBatch:
    """Worked solutions as a TrainBatch of advantage one: REINFORCE on it is maximum likelihood."""
    tokens, mask = supervised_rows(problems, tokenizer, length)
    zeros = np.zeros(tokens.shape, np.float32)
    batch = TrainBatch(tokens, mask, zeros, zeros, np.ones((len(tokens), 1), np.float32), zeros + 1.0)
    return parallel.to_global(mesh, parallel.ROWS, batch)


def run(state, update, stream, tokenizer, mesh, *, steps, batch, length, count, checkpoints, log, save_every, should_stop):
    """Trains from where the newest checkpoint left off to `steps`; returns (state, whether it was told to stop)."""
    found = checkpoints.restore(state)
    start, state, extra = found or (0, state, {"cursor": 0})
    stream.set_state(extra["cursor"])
    with log.progress("warm start", start, steps) as progress:
        for step in itertools.count(start):
            done, stop = step == steps, should_stop()
            if step > start and (done or stop or step % save_every == 0):
                checkpoints.save(step, state, {"cursor": stream.get_state()}, wait=done or stop)
            if done or stop:
                return state, not done
            rows = supervised_batch(mesh, stream.next(batch), tokenizer, length)
            state, metrics = update(state, rows, jnp.int32(count))
            loss = float(jax.device_get(metrics["loss"].value()))
            progress(step + 1, loss=loss)
