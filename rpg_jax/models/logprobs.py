"""Log-probabilities of given tokens without a [B, T, V] array: the one place that shifts tokens against predictions.

The vocabulary projection, log-softmax and gather go chunk by chunk along T and are recomputed in the backward pass, so
the largest temporary is [B, chunk, V]. Chunks in which no row has a response token are skipped.
"""

import jax
import jax.numpy as jnp


def token_logprobs(model, params, tokens, mask, *, temperature=1.0, chunk=64):
    """log p(tokens[b, t] | tokens[b, :t]) at a temperature, where `mask` is true; 0 elsewhere.

    Args:
      model: a `Model`; params: its tree.
      tokens: i32[B, T]; mask: bool[B, T] (column 0 has no context and gives 0).
      temperature: logits are divided by it; a traced scalar is fine.
      chunk: columns per step; memory, not values, depend on it.

    Returns:
      [B, T], float32 or wider.
    """
    return _chunked(model, params, tokens, mask, temperature, chunk, _logprob)[0]


def token_logprobs_and_entropy(model, params, tokens, mask, *, temperature=1.0, chunk=64):
    """As `token_logprobs`, with the entropy [B, T] in nats of each position's distribution."""
    return _chunked(model, params, tokens, mask, temperature, chunk, _logprob_and_entropy)


def _logprob(logits, targets):
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (picked - jax.nn.logsumexp(logits, -1),)


def _logprob_and_entropy(logits, targets):
    logp = jax.nn.log_softmax(logits, -1)
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(logp > -jnp.inf, logp, 0.0), -1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy


def _chunked(model, params, tokens, mask, temperature, chunk, measure):
    hidden = model.hidden(params, tokens)
    batch, length, dim = hidden.shape
    mask = mask & (jnp.arange(length) > 0)
    # Column t is predicted by the hidden state of column t - 1.
    hidden = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    chunk = min(chunk, length)
    count = -(-length // chunk)
    pad = ((0, 0), (0, count * chunk - length))

    def split(x):
        x = jnp.pad(x, pad + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def measured(hidden, targets, mask):
        values = measure(model.logits(params, hidden) / temperature, targets)
        return tuple(jnp.where(mask, value, 0.0) for value in values)

    def skipped(hidden, targets, mask):
        shapes = jax.eval_shape(measured, hidden, targets, mask)
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)

    def step(_, xs):
        return None, jax.lax.cond(xs[2].any(), measured, skipped, *xs)

    _, values = jax.lax.scan(step, None, (split(hidden), split(tokens), split(mask)))
    return tuple(jnp.moveaxis(v, 0, 1).reshape(batch, -1)[:, :length] for v in values)
