"""Log-probabilities of a batch's tokens without a [B, T, V] array: the one place that aligns tokens and predictions.

The vocabulary projection, log-softmax and gather are computed in chunks along T and recomputed in the backward pass, so
the largest temporary is [B, chunk, V]. Chunks in which no row has a response token are skipped.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from rpg_jax.models.transformer import Model


def token_logprobs(
    model: Model, params: dict, tokens, mask, *, positions=None, segment_ids=None, temperature=1.0, chunk: int = 64
) -> jax.Array:
    """log p(tokens[b, t] | tokens[b, :t]) at a temperature, where `mask` is true; 0 elsewhere.

    Args:
      model: a `Model`; params: its tree.
      tokens: i32[B, T]; mask: bool[B, T] (column 0 has no context and gives 0).
      positions, segment_ids: i32[B, T], for rows of several sequences; `mask` is false at a sequence's first token.
      temperature: logits are divided by it; may be a traced scalar, and gets no gradient.
      chunk: columns per step; memory, not values, depend on it.

    Returns:
      [B, T], float32 or wider.
    """
    return _chunked(model, params, tokens, mask, positions, segment_ids, temperature, chunk, _logprob)[0]


def token_logprobs_and_entropy(
    model: Model, params: dict, tokens, mask, *, positions=None, segment_ids=None, temperature=1.0, chunk: int = 64
) -> tuple[jax.Array, jax.Array]:
    """As `token_logprobs`, and the entropy [B, T] in nats of each token's distribution."""
    return _chunked(model, params, tokens, mask, positions, segment_ids, temperature, chunk, _logprob_and_entropy)


def token_logprobs_and_divergence(
    model: Model, params: dict, reference: dict, divergence: Callable, tokens, mask, *,
    positions=None, segment_ids=None, temperature=1.0, chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """As `token_logprobs`, and `divergence(logits, reference_logits)`, [...] from [..., V], of each token's two
    distributions. `reference` is a tree like `params` and gets no gradient; it takes a forward pass of its own."""
    both = params, jax.lax.stop_gradient(reference)
    measure = partial(_logprob_and_divergence, divergence)
    return _chunked(model, both, tokens, mask, positions, segment_ids, temperature, chunk, measure)


def _logprob_and_divergence(divergence, logits, targets):  # a pair of [..., V], [...] -> [...], [...]
    return *_logprob(logits[0], targets), divergence(logits[0], jax.lax.stop_gradient(logits[1]))


def _logprob(logits, targets):  # [..., V], [...] -> [...]
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (picked - jax.nn.logsumexp(logits, -1),)


def _logprob_and_entropy(logits, targets):
    logp = jax.nn.log_softmax(logits, -1)
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(logp > -jnp.inf, logp, 0.0), -1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy


def _chunked(model, params, tokens, mask, positions, segment_ids, temperature, chunk, measure):
    trees = params if isinstance(params, tuple) else (params,)
    hidden = jnp.concatenate([model.hidden(tree, tokens, positions, segment_ids) for tree in trees], axis=-1)
    length = hidden.shape[1]
    mask = mask & (jnp.arange(length) > 0)
    # Column t is predicted by the hidden state of column t - 1.
    hidden = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
    table = "embed" if model.config.tied_embeddings else "head"
    head = {name: {table: tree[table]} for name, tree in zip(("policy", "reference"), trees, strict=False)}
    return _by_chunks(model, measure, min(chunk, length), head, hidden, (tokens, mask, temperature))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_chunks(model, measure, chunk, head, hidden, constants):
    """A tuple of [B, T] from hidden [B, T, D], measured chunk by chunk; chunks without a token are skipped.

    The backward pass is written out because autodiff of a `cond` in a `scan` keeps one copy of the vocabulary matrix
    per chunk. It recomputes each chunk's logits and adds to one gradient of the matrix, which skipped chunks leave
    unchanged. On a mesh each data shard computes its own rows: the matrix is gathered once before all chunks, and its
    gradient is summed over the shards once after them. The matrix of a model with adapters is frozen and gets none.
    """
    tokens, mask, temperature = constants

    def on_shard(head, shared, rows):
        used, temperature = shared

        def step(_, part):
            used, hidden, tokens, mask = part  # bool[], [B, chunk, D], [B, chunk], [B, chunk]
            measured = partial(_measured, model, measure, tokens, mask, temperature)
            skipped = lambda *args: _zeros_of(measured, *args)  # noqa: E731
            return None, jax.lax.cond(used, measured, skipped, head, hidden)

        values = jax.lax.scan(step, None, (used, *_split(rows, chunk)))[1]
        return None, _join(values, hidden.shape[1])

    return model.per_shard(
        on_shard, _narrow(model, head), (_used(mask, chunk), temperature), (hidden, tokens, mask)
    )[1]  # fmt: skip


def _forward(model, measure, chunk, head, hidden, constants):
    return _by_chunks(model, measure, chunk, head, hidden, constants), (head, hidden, constants)


def _backward(model, measure, chunk, saved, d_values):
    head, hidden, (tokens, mask, temperature) = saved

    def on_shard(narrow, shared, rows):
        used, temperature = shared
        trained = {} if model.lora else narrow

        def step(d_head, part):
            used, hidden, tokens, mask, d_values = part

            def values(trained, hidden):
                return _measured(model, measure, tokens, mask, temperature, narrow | trained, hidden)

            def measured(d_head):
                _, pullback = jax.vjp(values, trained, hidden)
                d_chunk, d_hidden = pullback(d_values)
                return jax.tree.map(lambda total, d: total + d.astype(total.dtype), d_head, d_chunk), d_hidden

            return jax.lax.cond(used, measured, lambda d_head: (d_head, jnp.zeros_like(hidden)), d_head)

        dtypes = {name: head[name] for name in trained}
        start = jax.tree.map(lambda x, like: jnp.zeros(x.shape, like.dtype), trained, dtypes)
        d_head, d_hidden = jax.lax.scan(step, start, (used, *_split(rows, chunk)))
        return d_head, _join(d_hidden, hidden.shape[1])

    shared, rows = (_used(mask, chunk), temperature), (hidden, tokens, mask, d_values)
    d_head, d_hidden = model.per_shard(on_shard, _narrow(model, head), shared, rows)
    return jax.tree.map(jnp.zeros_like, head) | d_head, d_hidden, None


_by_chunks.defvjp(_forward, _backward)


def _narrow(model, head):
    """The vocabulary matrix in the compute dtype, in which it is gathered and multiplied."""
    return jax.tree.map(lambda x: x.astype(model.dtype), head)


def _used(mask, chunk):
    """bool[chunks], whether any row of any shard has a token in a chunk, so that all shards skip the same chunks."""
    return _split(mask, chunk).any((1, 2))


def _split(tree, chunk):
    """Leaves [B, T, ...] as [chunks, B, chunk, ...]."""

    def split(x):
        batch, length = x.shape[:2]
        count = -(-length // chunk)
        x = jnp.pad(x, ((0, 0), (0, count * chunk - length)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _join(tree, length):
    """The inverse of `_split`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], tree)


def _measured(model, measure, tokens, mask, temperature, head, hidden):
    parts = jnp.split(hidden, len(head), axis=-1)
    logits = tuple(model.logits(matrix, part) / temperature for matrix, part in zip(head.values(), parts, strict=True))
    values = measure(logits if len(logits) > 1 else logits[0], tokens)
    return tuple(jnp.where(mask, value, 0.0) for value in values)


def _zeros_of(function, *args):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))
