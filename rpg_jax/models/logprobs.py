"""Log-probabilities of a batch's tokens without a [B, T, V] array: the one place that aligns tokens and predictions.

The vocabulary projection, log-softmax and gather are computed in chunks along T and recomputed in the backward pass, so
the largest temporary is [B, chunk, V]. Chunks in which no row has a response token are skipped.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from rpg_jax.models.quantization import dequantized
from rpg_jax.models.routes import replayed
from rpg_jax.models.transformer import Model


def token_logprobs(model: Model, params: dict, tokens: jax.Array, mask: jax.Array, **settings) -> jax.Array:
    """log p(tokens[b, t] | tokens[b, :t]) at a temperature, where `mask` is true; 0 elsewhere.

    Args:
      model: a `Model`; params: its tree.
      tokens: i32[B, T]; mask: bool[B, T] (column 0 has no context and gives 0).
      positions, segment_ids: i32[B, T], for rows of several sequences; `mask` is false at a sequence's first token.
      routes: u8[B, T, layers * k], recorded ones (`models.routes`), which every policy replays (None).
      temperature: logits are divided by it (1); may be a traced scalar, and gets no gradient.
      chunk: columns per step (64); memory, not values, depend on it.
      auxiliary: beside the result, return the auxiliary numbers of `Model.hidden_and_auxiliary`, whose sums are over
        the tokens of `mask` (False). The other functions take it, too, and return them last.

    Returns [B, T], float32 or wider.
    """
    found = _chunked(((model, params),), _logprob, tokens, mask, **settings)
    return (found[0], found[-1]) if settings.get("auxiliary") else found[0]


def token_logprobs_and_entropy(model: Model, params: dict, tokens, mask, **settings) -> tuple[jax.Array, jax.Array]:
    """As `token_logprobs`, and the entropy [B, T] in nats of each token's distribution."""
    return _chunked(((model, params),), _logprob_and_entropy, tokens, mask, **settings)


def token_logprobs_and_divergence(
    model: Model, params: dict, reference: tuple[Model, dict], divergence: Callable, tokens, mask, **settings
) -> tuple[jax.Array, ...]:
    """As `token_logprobs`, and `divergence(logits, reference_logits)`, [...] from [..., V], of each token's two
    distributions. `reference` is a model of any size, with the same tokens, and its tree, which takes a forward pass of
    its own and gets no gradient."""

    def measure(logits, targets, _):
        return _logprob(logits, targets)[0], divergence(*logits)

    return _chunked(((model, params), reference), measure, tokens, mask, **settings)


def token_logprobs_of_two(
    model: Model, params: dict, other: tuple[Model, dict], tokens, mask, **settings
) -> tuple[jax.Array, ...]:
    """Seven arrays [B, T] of two policies, of which `other` is a model with the same tokens and its tree: log-probs and
    entropy of each, KL(policy, other) and KL(other, policy) of a token's two distributions in nats, and 1 where both
    have the same most likely token. All are of the distributions over the ids that both tables have."""
    return _chunked(((model, params), other), _compared, tokens, mask, **settings)


# What is measured: from the logits [..., V] of each policy, targets i32[...] and, in the backward pass, what was found
# before, to a tuple of [...].


def _logprob(logits, targets, found=None):
    """Log-probs, and the largest logits and the sums of a softmax. With these, a function of the same gradient whose
    value nobody reads, so that it needs no pass over the vocabulary; on GPUs a scatter would write the gradient out."""
    x, at = logits[0], partial(jnp.take_along_axis, indices=targets[..., None], axis=-1)
    top, total = (jax.lax.stop_gradient(x.max(-1)), None) if found is None else found[1:]
    mass = jnp.exp(x - top[..., None])
    if total is None:
        total = mass.sum(-1)
        return at(x)[..., 0] - top - jnp.log(total), top, total
    chosen = targets[..., None] == jnp.arange(x.shape[-1])
    picked = jax.lax.platform_dependent(x, cpu=at, default=lambda x: jnp.where(chosen, x, 0.0).sum(-1, keepdims=True))
    return picked[..., 0] - (mass / total[..., None]).sum(-1), top, total


def _logprob_and_entropy(logits, targets, _=None):
    logp = jax.nn.log_softmax(logits[0], -1)
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(logp > -jnp.inf, logp, 0.0), -1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy


def _compared(logits, targets, _):
    shared = min(x.shape[-1] for x in logits)
    logits = [x[..., :shared] for x in logits]
    log_p, log_q = (jax.nn.log_softmax(x, -1) for x in logits)
    divergences = [jnp.sum(jnp.exp(a) * (a - b), -1) for a, b in ((log_p, log_q), (log_q, log_p))]
    agree = jnp.argmax(log_p, -1) == jnp.argmax(log_q, -1)
    own = [value for x in logits for value in _logprob_and_entropy([x], targets)]
    return *own, *divergences, agree.astype(log_p.dtype)


def _chunked(
    policies, measure, tokens, mask, *, positions=None, segment_ids=None, temperature=1.0, chunk=64,
    auxiliary=False, routes=None,
):  # fmt: skip
    """`policies` are pairs of a model and its tree; the first is trained, the others are constants."""
    heads, hidden, numbers = [], [], []
    for model, params in policies:
        given = None if routes is None else replayed(model.config, routes)
        states, found = model.hidden_and_auxiliary(params, tokens, positions, segment_ids, counted=mask, routes=given)
        numbers.append(found)
        hidden.append(jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0))))  # column t is predicted by column t - 1
        table = "embed" if model.config.tied_embeddings else "head"
        heads.append({table: params[table]})
    mask = mask & (jnp.arange(mask.shape[1]) > 0)
    constants = jax.lax.stop_gradient((heads[1:], hidden[1:])), tokens, mask, temperature
    models = tuple(model for model, _ in policies)
    found = _by_chunks(models, measure, min(chunk, mask.shape[1]), heads[0], hidden[0], constants)
    return (*found, numbers[0]) if auxiliary else found


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _by_chunks(models, measure, chunk, head, hidden, constants):
    """A tuple of [B, T] from hidden [B, T, D], measured chunk by chunk; chunks without a token are skipped.

    The backward pass is written out because autodiff of a `cond` in a `scan` keeps one copy of the vocabulary matrix
    per chunk. It recomputes each chunk's logits and adds to one gradient of the matrix, which skipped chunks leave
    unchanged. On a mesh each data shard computes its own rows: the matrix is gathered once before all chunks, and its
    gradient is summed over the shards once after them. The matrix of a model with adapters is frozen and gets none.
    """
    (fixed, others), tokens, mask, temperature = constants

    def on_shard(heads, shared, rows):
        used, temperature = shared

        def step(_, part):
            used, hidden, tokens, mask = part  # bool[], each [B, chunk, D], [B, chunk], [B, chunk]

            def measured(heads, hidden):
                logits = models[0].logits(heads[0], hidden[0])
                return _measured(models, measure, tokens, mask, temperature, heads[1:], hidden[1:], logits)

            nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(measured, heads, hidden))
            return None, jax.lax.cond(used, measured, lambda *_: nothing, heads, hidden)

        values = jax.lax.scan(step, None, (used, *_split(rows, chunk)))[1]
        return None, _join(values, mask.shape[1])

    shared, rows = (_used(mask, chunk), temperature), ([hidden, *others], tokens, mask)
    return models[0].per_shard(on_shard, _narrow(models, [head, *fixed]), shared, rows)[1]


def _backward(models, measure, chunk, saved, d_values):
    head, hidden, ((fixed, others), tokens, mask, temperature), found = saved

    def on_shard(heads, shared, rows):
        used, temperature = shared
        trained = {} if models[0].lora else heads[0]
        start = jax.tree.map(lambda x, like: jnp.zeros(x.shape, like.dtype), trained, trained and head)
        chunks, order = _split(rows, chunk), jnp.argsort(~used)  # those with a token first

        def step(index, carry):
            (hidden, *others), tokens, mask, found, d_values = jax.tree.map(lambda x: x[order[index]], chunks)
            logits = models[0].logits(heads[0], hidden)
            values = partial(_measured, models, measure, tokens, mask, temperature, heads[1:], others, found=found)
            _, pullback = jax.vjp(values, logits)
            d_matrix, d_hidden = _of_product(models[0], heads[0], hidden, *pullback(d_values))
            d_head = jax.tree.map(lambda total: total + d_matrix.astype(total.dtype), carry[0])
            return d_head, carry[1].at[order[index]].set(d_hidden)

        # A conditional in each turn would copy the matrix's gradient twice.
        d_head, d_hidden = jax.lax.fori_loop(0, used.sum(), step, (start, jnp.zeros_like(chunks[0][0])))
        return d_head, _join(d_hidden, mask.shape[1])

    shared, rows = (_used(mask, chunk), temperature), ([hidden, *others], tokens, mask, found, d_values)
    d_head, d_hidden = models[0].per_shard(on_shard, _narrow(models, [head, *fixed]), shared, rows)
    return jax.tree.map(jnp.zeros_like, head) | d_head, d_hidden, None


_by_chunks.defvjp(lambda *given: (found := _by_chunks(*given), (*given[3:], found)), _backward)


def _narrow(models, heads):
    """The vocabulary matrices in the compute dtype, in which they are gathered and multiplied."""
    heads = [dequantized(head, m.dtype) for m, head in zip(models, heads, strict=True)]
    return [jax.tree.map(lambda x: x.astype(m.dtype), head) for m, head in zip(models, heads, strict=True)]  # noqa: B023


def _used(mask, chunk):
    """bool[chunks], whether any row of any shard has a token in a chunk, so that all shards skip the same chunks."""
    return _split(mask, chunk).any((1, 2))


def _split(tree, chunk):
    """Leaves [B, T, ...] as [chunks, B, chunk, ...]."""

    def split(x):
        count = -(-x.shape[1] // chunk)
        x = jnp.pad(x, ((0, 0), (0, count * chunk - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _join(tree, length):
    """The inverse of `_split`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length], tree)


def _measured(models, measure, tokens, mask, temperature, heads, hidden, logits, found=None):
    """From the logits [B, chunk, V] of the first model, and the heads and hidden states of the others."""
    found = jax.tree.map(lambda x: jnp.where(mask, x, jnp.inf), found)  # exp(x - inf) is 0, exp(x - 0) may overflow
    every = [logits, *(model.logits(*pair) for model, *pair in zip(models[1:], heads, hidden, strict=True))]
    return tuple(jnp.where(mask, value, 0.0) for value in measure([x / temperature for x in every], tokens, found))


def _of_product(model, head, hidden, d_logits):
    """What `Model.logits` makes of a gradient of its result: the matrix's [V, D] or [D, V], wide, and that of `hidden`.

    In bfloat16 both are products of bfloat16 numbers, to which the gradient of the logits is rounded, with sums in
    float32: products of float32 numbers would take several times as long. float16 has not their range.
    """
    wide, tied, matrix = d_logits.dtype, "embed" in head, jax.tree.leaves(head)[0]
    d_logits = d_logits.astype(model.dtype) if model.dtype == jnp.bfloat16 else d_logits
    product = partial(jax.lax.dot_general, preferred_element_type=wide)
    d_hidden = product(d_logits, matrix, (((2,), (0 if tied else 1,)), ((), ()))).astype(hidden.dtype)
    if tied:
        return product(d_logits, hidden, (((0, 1), (0, 1)), ((), ()))), d_hidden
    # Of two axes: XLA's CPU compiler merges the transposition into a product with three, which it then refuses.
    flat = (x.reshape(-1, x.shape[-1]) for x in (d_logits, hidden))
    return product(*flat, (((0,), (0,)), ((), ()))).T, d_hidden
