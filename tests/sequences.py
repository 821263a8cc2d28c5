"""Sequences for tests, from tokens and a mask of one stretch of response tokens a row."""

import numpy as np

from rpg_jax.types import Sequences


def sequences(tokens, mask, sampler_logp=None, model_logp=None, problem=None, sample=None, finished=None, version=None):
    """i32[B, T], bool[B, T], and whatever else is not zero; a row's response is contiguous, or nothing is drawn."""
    tokens, mask = np.asarray(tokens, np.int32), np.asarray(mask)
    ids, nothing = np.zeros(len(mask), np.int32), np.zeros(mask.shape, np.float32)
    columns = np.arange(mask.shape[1])
    length = np.where(mask, columns + 1, 0).max(1).astype(np.int32)

    def given(x, default):
        return default if x is None else x

    return Sequences(
        tokens=tokens, length=length, prompt_length=length - mask.sum(1, dtype=np.int32), loss_mask=mask,
        sampler_logp=given(sampler_logp, nothing), model_logp=given(model_logp, nothing),
        version=given(version, np.zeros(mask.shape, np.int32)), problem=given(problem, ids), sample=given(sample, ids),
        complete=ids > 0, finished=given(finished, ids > 0),
    )  # fmt: skip
