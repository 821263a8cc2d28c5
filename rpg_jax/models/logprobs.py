"""Log-probabilities of given tokens without a [B, T, V] array: the one place that shifts tokens against predictions.

The vocabulary projection, log-softmax and gather go chunk by chunk along T and are recomputed in the backward pass, so
the largest temporary is [B, chunk, V]. Chunks in which no row has a response token are skipped.
"""

from functools import partial

import jax
import jax.numpy as jnp


def token_logprobs(model, params, tokens, mask, *, temperature=1.0, chunk=64):
    """log p(tokens[b, t] | tokens[b, :t]) at a temperature, where `mask` is true; 0 elsewhere.

    Args:
      model: a `Model`; params: its tree.
      tokens: i32[B, T]; mask: bool[B, T] (column 0 has no context and gives 0).
      temperature: logits are divided by it; a traced scalar is fine, and a constant to gradients.
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
    batch, length, _ = hidden.shape
    mask = mask & (jnp.arange(length) > 0)
    # Column t is predicted by the hidden state of column t - 1.
    hidden = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    chunk = min(chunk, length)
    count = -(-length // chunk)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, count * chunk - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    table = "embed" if model.config.tied_embeddings else "head"
    head = {table: params[table]}
    values = _scan_chunks(model, measure, head, split(hidden), (split(tokens), split(mask), temperature))
    return tuple(jnp.moveaxis(v, 0, 1).reshape(batch, -1)[:, :length] for v in values)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scan_chunks(model, measure, head, hidden, constants):
    """Measures hidden [count, B, chunk, D] chunk by chunk, skipping those without a token; values [count, B, chunk].

    The backward pass is written out because autodiff of a `cond` in a `scan` keeps one copy of the vocabulary matrix a
    chunk. It recomputes a chunk's logits and adds to one gradient of the matrix, which skipped chunks leave alone.
    """
    tokens, mask, temperature = constants

    def step(_, chunk):
        hidden, tokens, mask = chunk
        measured = partial(_measured, model, measure, tokens, mask, temperature)
        skipped = lambda *args: _zeros_of(measured, *args)  # noqa: E731
        return None, jax.lax.cond(mask.any(), measured, skipped, head, hidden)

    return jax.lax.scan(step, None, (hidden, tokens, mask))[1]


def _scan_forward(model, measure, head, hidden, constants):
    return _scan_chunks(model, measure, head, hidden, constants), (head, hidden, constants)


def _scan_backward(model, measure, saved, d_values):
    head, hidden, (tokens, mask, temperature) = saved

    def step(d_head, chunk):
        hidden, tokens, mask, d_values = chunk

        def measured(d_head):
            _, back = jax.vjp(partial(_measured, model, measure, tokens, mask, temperature), head, hidden)
            more, d_hidden = back(d_values)
            return jax.tree.map(jnp.add, d_head, more), d_hidden

        return jax.lax.cond(mask.any(), measured, lambda d_head: (d_head, jnp.zeros_like(hidden)), d_head)

    start = jax.tree.map(jnp.zeros_like, head)
    d_head, d_hidden = jax.lax.scan(step, start, (hidden, tokens, mask, d_values))
    return d_head, d_hidden, None


_scan_chunks.defvjp(_scan_forward, _scan_backward)


def _measured(model, measure, tokens, mask, temperature, head, hidden):
    values = measure(model.logits(head, hidden) / temperature, tokens)
    return tuple(jnp.where(mask, value, 0.0) for value in values)


def _zeros_of(function, *args):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
