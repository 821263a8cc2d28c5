"""Attention over pages in a few lines, to hold every kernel against."""

import jax
import jax.numpy as jnp

from rpg_jax.models.attention import PLAIN, AttentionKind
from rpg_jax.sampling.running_softmax import capped, sees


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, first: jax.Array, kind: AttentionKind = PLAIN
) -> jax.Array:
    """What every kernel computes, in a few lines: the whole sequence of each row is gathered.

    Args:
      q: [R, C, heads, head_dim]; k, v: [pages, page_size, kv_heads, head_dim]; table: i32[R, W]; first: i32[R].

    Returns:
      [R, C, heads, head_dim].
    """
    rows, count, _, dim = q.shape
    k, v = (x[table].reshape(rows, -1, *x.shape[2:]) for x in (k, v))  # [R, W * page_size, kv_heads, head_dim]
    position = first[:, None] + jnp.arange(count)  # [R, C]
    grouped = q.reshape(rows, count, k.shape[2], -1, dim)
    scores = capped(jnp.einsum("rckgd,rtkd->rckgt", grouped, k), dim, kind)
    visible = sees(position[..., None], jnp.arange(k.shape[1]), kind)  # [R, C, W * page_size]
    weights = jax.nn.softmax(jnp.where(visible[:, :, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("rckgt,rtkd->rckgd", weights, v).reshape(q.shape)
