"""Memory that each phase of an RL step needs beside its arguments on one device, computed from shapes alone.

D, M, Q and K are the widths of `estimates`.
"""

from rpg_jax.lab.planning.estimates import MASTER, Workload, layer_weights, master_shard, saved, widths
from rpg_jax.sampling.generate import PREFILL_TOKENS


def update_needs(w: Workload) -> dict[str, float]:
    """Bytes of temporaries that an update must hold at once, by purpose; the last entry is their sum.

    While gradients are computed, the gradient accumulated so far and the saved activations are held together with
    either one layer's backward pass and the microbatch's gradient, or the loss. The optimizer's step comes after that.
    The largest of the three counts.
    """
    d, m, q, k = widths(w.shape)
    tokens = w.loop.microbatch_rows * w.columns / w.row_shards
    shard = master_shard(w)
    activations = saved(w.shape, w.model.remat, w.tensor) * w.itemsize * tokens * w.shape.layers
    throughout = {"gradient so far": shard, f"activations saved (remat {w.model.remat})": activations}
    layer = {
        "gradient of a microbatch": shard,
        "one layer, forward and backward": (8 * d + (7 * m + 6 * q + 6 * k) / w.tensor) * w.itemsize * tokens,
        "weights of two layers, gathered": 2 * layer_weights(w.shape) * w.itemsize / w.tensor,
    }
    vocabulary = w.shape.vocab_size / w.tensor
    matrix = {"vocabulary matrix, gathered, and its gradient": vocabulary * d * (w.itemsize + MASTER)}
    if w.model.lora:
        matrix = {"vocabulary matrix, gathered": vocabulary * d * w.itemsize}
    loss = matrix | {
        "a chunk's logits and their gradient": 2 * _chunk_tokens(w, w.loop.microbatch_rows) * vocabulary * MASTER,
        "final hidden states and their gradient": 2 * d * w.itemsize * tokens,
    }
    step = {"gradient": shard, "step of the optimizer": shard}
    if w.offload:
        step["arrays of the optimizer, fetched"] = w.moments * shard
    return _with_sum(max(throughout | layer, throughout | loss, step, key=lambda items: sum(items.values())))


def experience_needs(w: Workload) -> dict[str, float]:
    """Bytes of temporaries as in `update_needs`, of the log-prob pass."""
    d = w.shape.hidden_size
    tokens = w.loop.scoring_rows * w.columns / w.row_shards
    vocabulary = w.shape.vocab_size / w.tensor
    layer = {
        "one layer": _layer_forward(w) * tokens,
        "weights of two layers, gathered": 2 * layer_weights(w.shape) * w.itemsize / w.tensor,
    }
    loss = {
        "vocabulary matrix, gathered": vocabulary * d * w.itemsize,
        "a chunk's logits": 2 * _chunk_tokens(w, w.loop.scoring_rows) * vocabulary * MASTER,
        "final hidden states": d * w.itemsize * tokens,
    }
    return _with_sum(max(layer, loss, key=lambda items: sum(items.values())))


def prefill_needs(w: Workload) -> dict[str, float]:
    """Bytes of temporaries as in `update_needs`, of the prefill: the KV cache is an argument and updated in place."""
    return _with_sum({"one layer": _layer_forward(w) * PREFILL_TOKENS})


def decode_needs(w: Workload) -> dict[str, float]:
    """Bytes of temporaries as in `update_needs`, of decoding: the KV cache is an argument and updated in place."""
    logits = w.rollout.slots / w.row_shards * w.shape.vocab_size / w.tensor * MASTER
    return _with_sum({"logits and their weights": 2 * logits})


def _layer_forward(w: Workload) -> float:
    """Bytes of one token's activations inside one layer, without a backward pass."""
    d, m, q, k = widths(w.shape)
    return (4 * d + (3 * m + 2 * q + 3 * k) / w.tensor) * w.itemsize


def _chunk_tokens(w: Workload, rows: int) -> float:
    """Tokens of a microbatch of `rows` on one device whose logits exist at a time."""
    return rows / w.row_shards * min(w.logprob_chunk, w.columns)


def _with_sum(items: dict[str, float]) -> dict[str, float]:
    return items | {"sum": sum(items.values())}


NEEDS = {"prefill": prefill_needs, "decode": decode_needs, "experience": experience_needs, "update": update_needs}
