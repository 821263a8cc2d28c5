"""`generate`: prompts in, a Rollout out. The only call that the rest of the code makes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.sampling import decode
from rpg_jax.sampling.draw import request_key
from rpg_jax.types import Prompts, Rollout


def generate(
    model,
    params,
    prompts: Prompts,
    *,
    key,
    step,
    samples: int,
    max_new: int,
    sampling: decode.Sampling,
    slots: int,
    limits=None,
    temperature_model=None,
    segment: int = 256,
    prefill_rows: int = 64,
    should_stop: Callable[[], bool] | None = None,
) -> Rollout:
    """Samples `samples` responses to each prompt.

    A response's tokens depend on (key, step, problem, sample) and on the parameters; not on slots, segments or order.

    Args:
      model: a `Model`; params: its tree with layers unstacked (`models.unstack_layers`), best cast to model.dtype.
      prompts: P rows.
      key: threefry2x32 key of the run; step: i32[], so that every step draws anew.
      max_new: most tokens a response may have; a shape.
      sampling: the distribution to draw from.
      slots: responses decoded at once.
      limits: i32[P], a prompt's own limit of at most max_new; 0 is padding, not run. None is max_new for all.
      temperature_model: of `model_logp`; None is the sampling temperature, or 1 when that is 0.
      segment: most decode steps between two looks at should_stop.
      prefill_rows: prompts run at once before decoding.
      should_stop: asked after each segment; when true, what is complete is returned and other responses are empty.

    Returns:
      Rollout of P * samples rows, problem-major: row p * samples + s is prompt ++ response ++ zeros, T = Tp + max_new.
      The token that stopped a response is part of it.

    Raises:
      ValueError for shapes that cannot be run and keys of another kind.
    """
    count, columns = prompts.tokens.shape
    if columns + max_new > model.config.max_length:
        raise ValueError(
            f"prompts of {columns} columns and {max_new} new tokens exceed the model's max_length "
            f"{model.config.max_length}; shorten either"
        )
    for name, value in dict(
        samples=samples, max_new=max_new, slots=slots, segment=segment, prefill_rows=prefill_rows
    ).items():
        if value < 1:
            raise ValueError(f"generate: {name} is {value}; it must be at least 1")
    limits = np.full(count, max_new) if limits is None else np.asarray(limits)
    if limits.shape != (count,) or limits.min() < 0 or limits.max() > max_new:
        raise ValueError(f"generate: limits {limits.shape} must be [{count}] values from 0 to max_new, {max_new}")
    if not isinstance(params["layers"], list):
        raise ValueError("generate: params['layers'] is stacked; pass models.unstack_layers(params)")
    if temperature_model is None:
        temperature_model = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    temperature_model = jnp.asarray(temperature_model, jnp.float32)

    requests, prefix, state = _start(
        model, params, prompts, _threefry(key), jnp.int32(step), limits.astype(np.int32), samples, max_new,
        min(slots, count * samples), prefill_rows,
    )  # fmt: skip
    while True:
        state, unfinished = _advance(
            model, params, requests, prefix, sampling, temperature_model, state, jnp.int32(segment)
        )
        if not unfinished or (should_stop is not None and should_stop()):
            return _rollout(prompts, state, samples)


def _threefry(key):
    """A typed threefry2x32 key: rbg noise would depend on the batch."""
    if not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(key, impl="threefry2x32")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        raise ValueError(f"generate: key is of {jax.random.key_impl(key)}; make it with impl='threefry2x32'")
    return key


@partial(jax.jit, static_argnames=("model", "samples", "max_new", "slots", "prefill_rows"))
def _start(model, params, prompts, key, step, limits, samples, max_new, slots, prefill_rows):
    """Queue, prompts' keys and values, and the state before the first step."""
    count = prompts.tokens.shape[0]
    row = jnp.arange(count * samples)
    keys = jax.vmap(partial(request_key, key, step))(prompts.problem[row // samples], row % samples)
    requests = decode.Requests(row // samples, keys, limits[row // samples])
    prefix = decode.prefill(model, params, prompts, prefill_rows)
    return requests, prefix, decode.start(model, requests, prefix, slots, max_new)


@partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def _advance(model, params, requests, prefix, sampling, temperature_model, state, max_steps):
    state = decode.advance(model, params, requests, prefix, sampling, temperature_model, state, max_steps)
    return state, decode.unfinished(requests, state)


@partial(jax.jit, static_argnames=("samples",))
def _rollout(prompts, state, samples):
    """Rows of prompt ++ response ++ zeros from the queue's responses."""
    count, columns = prompts.tokens.shape
    row, ring = jnp.arange(count * samples), state.responses.tokens.shape[1]
    prompt = jnp.repeat(jnp.where(prompts.mask, prompts.tokens, 0), samples, axis=0)
    start = jnp.repeat(prompts.mask.sum(-1), samples)
    index = jnp.arange(columns + ring) - start[:, None]
    mask = (index >= 0) & (index < state.length[:, None])

    def shifted(values):
        return jnp.where(mask, jnp.take_along_axis(values, jnp.clip(index, 0, ring - 1), axis=1), 0)

    responses = jax.tree.map(shifted, state.responses)
    return Rollout(
        tokens=jnp.pad(prompt, ((0, 0), (0, ring))) + responses.tokens,
        response_mask=mask,
        sampler_logp=responses.sampler_logp,
        model_logp=responses.model_logp,
        problem=jnp.repeat(prompts.problem, samples),
        sample=row % samples,
        finished=state.finished,
    )
