"""What cuDNN is documented to compute from the arguments that JAX gives it, in JAX's own operations and float32.

In place of JAX's wrapper (`rpg_jax.models.cudnn.wrapper`), whose kernel runs on GPUs alone. Offsets count numbers, and
packed rows are as many sequences as they have places, wherever a row ends (openxla/xla, cuda_dnn.cc;
NVIDIA/cudnn-frontend, on attention).
"""

import jax
import jax.numpy as jnp

from rpg_jax.models.cudnn import wrapper


def softmax_of(query, key, value, visible, scale):
    """query [S, T, N, H]; key, value [S, U, K, H]; visible bool[S, T, U]; a query that sees nothing is not a number."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2).astype(jnp.float32) for x in (key, value))
    scores = jnp.einsum("stnh,sunh->sntu", query.astype(jnp.float32), key) * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("sntu,sunh->stnh", weights, value).astype(query.dtype)


def dot_product_attention(
    query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length
):
    """Packed rows. What lies in no sequence is not a number."""
    assert mask_type is wrapper.MaskType.PADDING_CAUSAL and q_offsets.shape[1] == q_seqlen.shape[1] + 1 > 2
    given = wrapper._fix_seqlen_offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, query, key)
    length, _, *begin = (x.reshape(-1, 1)[: q_seqlen.size] for x in given)  # [places, 1]
    token = jnp.arange(query.shape[1])  # [T]

    def taken(array, begin):
        """[places, T, N, H], from `begin` numbers on."""
        index = begin + jnp.arange(array[0].size)
        return jnp.take(array, index, mode="fill", fill_value=0).reshape(-1, *array.shape[1:])

    real, near = token < length, token[:, None] - token < (sliding_window_length or token.size)
    visible = (token <= token[:, None]) & near & real[:, None] | ~real[:, :, None]
    out = softmax_of(taken(query, begin[0]), *(taken(x, begin[1]) for x in (key, value)), visible, scale)
    target = jnp.where(real, begin[0] // query[0, 0].size + token, query.shape[0] * token.size)
    rows = jnp.full((query.shape[0] * token.size, *query.shape[2:]), jnp.nan, query.dtype)
    return rows.at[target].set(out, mode="drop").reshape(query.shape)


def paged_attention(query, key, value, q_seqlen, kv_seqlen, page_table_k, page_table_v, *, scale, mask_type):
    """Pages, of which a table names those of a sequence in order; without causality."""
    rows, count = query.shape[:2]
    assert mask_type is wrapper.MaskType.PADDING and query.dtype == key.dtype == value.dtype and key.dtype.itemsize == 2
    assert q_seqlen.shape == kv_seqlen.shape == (rows,) and count == 1
    tables = [table.reshape(rows, table.shape[2]) for table in (page_table_k, page_table_v)]
    k, v = (x[table].reshape(rows, -1, *x.shape[2:]) for x, table in zip((key, value), tables, strict=True))
    return softmax_of(query, k, v, (jnp.arange(k.shape[1]) < kv_seqlen[:, None])[:, None], scale)
