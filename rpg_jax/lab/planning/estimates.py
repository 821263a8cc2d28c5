"""What the phases of an RL step must take, from shapes alone: operations, bytes moved, and memory, on one device.

Nothing here is compiled. Work is that of rows of max_prompt + max_new tokens; `times` knows what was sampled. D, M, Q
and K are the widths of the residual, the MLP, and all query and all key heads.
"""

import dataclasses
from typing import NamedTuple

from rpg_jax.models import ModelConfig, parameter_count

MASTER = 4  # bytes of a float32: parameters, gradients, moments, logits


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The sizes of a run that cost memory and time. Rows are counted over all devices, lengths in tokens."""

    model: ModelConfig
    remat: str
    item: int  # bytes of a number of the compute dtype
    mesh: dict  # size of each axis
    max_prompt: int
    max_new: int
    prompts: int  # groups a step learns from
    fresh_prompts: int  # groups generated at a time
    samples: int
    slots: int
    minibatch_rows: int
    microbatch_rows: int
    epochs: int
    pack: bool  # several sequences a row
    chunk: int  # columns whose logits are formed at a time
    moments: int  # arrays of the optimizer as large as the parameters
    separate_reference: bool
    offload: bool  # the optimizer's arrays are in the hosts' memory but for its step

    @property
    def length(self) -> int:
        return self.max_prompt + self.max_new

    @property
    def row_shards(self) -> int:
        return self.mesh["data"] * self.mesh["fsdp"]

    @property
    def tensor(self) -> int:
        return self.mesh["tensor"]

    @property
    def devices(self) -> int:
        return self.row_shards * self.tensor


class Cost(NamedTuple):
    """Of one device."""

    flops: float
    bytes: float  # between HBM and the cores
    sent: float  # bytes to other devices

    def times(self, n) -> "Cost":
        return Cost(*(n * x for x in self))

    def seconds(self, topology) -> dict[str, float]:
        """Time at the limit of each resource; a phase takes at least the largest."""
        chip = topology.chip
        return dict(
            compute=self.flops / chip.flops,
            memory=self.bytes / chip.bandwidth,
            interconnect=self.sent / topology.wire(),
        )


# Remat policy -> whether the backward pass computes again a layer's products with weights, all but the last, and its
# attention.
RECOMPUTED = {"none": (0, 0), "dots": (0, 1), "offload": (0, 1), "attention": (1, 0), "full": (1, 1)}


def widths(model: ModelConfig):
    """(D, M, Q, K)."""
    return model.hidden_size, model.mlp_size, model.heads * model.head_dim, model.kv_heads * model.head_dim


def layer_weights(model) -> int:
    """Weights of a layer's products."""
    d, m, q, k = widths(model)
    return d * (2 * q + 2 * k) + 3 * d * m


def saved(model, remat, tensor=1) -> float:
    """Numbers a token that a layer keeps for its backward pass: its input, and what the policy adds to it."""
    d, m, q, k = widths(model)
    split = dict(none=5 * m + 5 * q + 4 * k, dots=2 * m + q + 2 * k, attention=q + 2 * model.heads)
    whole = dict(none=8 * d, dots=2 * d)
    return d + whole.get(remat, 0) + split.get(remat, 0) / tensor


def kv_bytes(recipe) -> float:
    """Keys and values of one token on one of the devices that share its heads."""
    return 2 * recipe.model.layers * widths(recipe.model)[3] * recipe.item / recipe.tensor


def _products(recipe, tokens):
    """Operations of the layers' products with weights over `tokens`, on one device."""
    return 2 * layer_weights(recipe.model) * recipe.model.layers * tokens / recipe.devices


def _attention(recipe, rows, length):
    """Operations of causal attention: each token with those before it, half of all pairs."""
    return 2 * widths(recipe.model)[2] * recipe.model.layers * rows * length**2 / recipe.devices


def _vocabulary(recipe, tokens):
    return 2 * recipe.model.hidden_size * recipe.model.vocab_size * tokens / recipe.devices


def _weights(recipe) -> float:
    """Bytes of all weights in the compute dtype on the devices that share them by tensor."""
    return parameter_count(recipe.model) * recipe.item / recipe.tensor


def _gathered(recipe) -> float:
    """Bytes that a device sends to give every other its shard of the weights once."""
    shards = recipe.mesh["fsdp"]
    return _weights(recipe) * (shards - 1) / shards


def _summed(recipe, rows, length, passes) -> float:
    """Bytes sent to add up the two partial residuals of each layer over the tensor axis."""
    t = recipe.tensor
    local = rows * length / recipe.row_shards * recipe.model.hidden_size * recipe.item
    return 2 * (t - 1) / t * 2 * recipe.model.layers * passes * local


def _moved(recipe, rows, length, passes, logits) -> float:
    """HBM bytes of `passes` over the layers: weights, what each layer writes and reads, `logits` of float32 chunks."""
    tokens = rows * length / recipe.row_shards
    layers = recipe.model.layers * saved(recipe.model, "none", recipe.tensor) * recipe.item * tokens
    chunks = logits * tokens * recipe.model.vocab_size / recipe.tensor * MASTER
    return passes * (_weights(recipe) + 2 * layers) + chunks


def update(recipe) -> Cost:
    """One optimizer update from a minibatch."""
    r, rows = recipe, recipe.minibatch_rows
    products, attention = RECOMPUTED[r.remat]
    again = products * (1 - r.model.hidden_size * r.model.mlp_size / layer_weights(r.model))
    flops = (3 + again) * _products(r, rows * r.length) + (3.5 + attention) * _attention(r, rows, r.length)
    flops += 4 * _vocabulary(r, rows * r.length)  # forward, again in the backward pass, and two gradients
    micro, count = r.microbatch_rows, rows / r.microbatch_rows
    shard = parameter_count(r.model) * MASTER / (r.mesh["fsdp"] * r.tensor)
    moved = _moved(r, micro, r.length, 3 + products, logits=6) + 3 * shard
    sent = (2 + products) * _gathered(r) + _summed(r, micro, r.length, 2 + products)
    across = 2 * (r.mesh["data"] - 1) / r.mesh["data"] * shard
    once = (2 * (1 + r.moments) + 2) * shard
    return Cost(flops, count * moved + once, count * (sent + across))


def experience(recipe) -> Cost:
    """Log-probs of a step's responses under the behavior policy, and under the reference if it is another."""
    r, rows = recipe, recipe.prompts * recipe.samples
    policies, tokens = 1 + recipe.separate_reference, rows * recipe.length
    flops = _products(r, tokens) + _attention(r, rows, r.length) + _vocabulary(r, tokens)
    micro, count = r.microbatch_rows, rows / r.microbatch_rows
    moved = _moved(r, micro, r.length, 1, logits=2)
    sent = _gathered(r) + _summed(r, micro, r.length, 1)
    return Cost(flops, count * moved, count * sent).times(policies)


def prefill(recipe) -> Cost:
    """Keys and values of the prompts of one generation batch."""
    r, rows = recipe, recipe.fresh_prompts
    flops = _products(r, rows * r.max_prompt) + _attention(r, rows, r.max_prompt)
    moved = _moved(r, rows, r.max_prompt, 1, logits=0) + kv_bytes(r) * rows * r.max_prompt / r.row_shards
    return Cost(flops, moved, _summed(r, rows, r.max_prompt, 1))


def decode(recipe) -> Cost:
    """One token for every slot: all weights and the whole cache are read."""
    r, rows = recipe, recipe.slots
    cached = rows * r.length
    flops = _products(r, rows) + _vocabulary(r, rows)
    flops += 4 * widths(r.model)[2] * r.model.layers * cached / r.devices
    logits = 4 * rows / r.row_shards * r.model.vocab_size / r.tensor * MASTER
    return Cost(flops, _weights(r) + kv_bytes(r) * cached / r.row_shards + logits, _summed(r, rows, 1, 1))


def update_needs(recipe) -> dict[str, float]:
    """Bytes of temporaries that an update must hold at once, by what they are for; the sum is the last entry.

    While gradients are taken, the one so far and the layers' saved activations are held, and beside them either a
    layer's backward pass with the microbatch's gradient, or the loss's. After that comes the optimizer's step. The
    largest of the three counts.
    """
    r = recipe
    d, m, q, k = widths(r.model)
    tokens = r.microbatch_rows * r.length / r.row_shards
    shard = parameter_count(r.model) * MASTER / (r.mesh["fsdp"] * r.tensor)
    throughout = {
        "gradient so far": shard,
        f"activations saved (remat {r.remat})": saved(r.model, r.remat, r.tensor) * r.item * tokens * r.model.layers,
    }
    layer = {
        "gradient of a microbatch": shard,
        "one layer, forward and backward": (8 * d + (7 * m + 6 * q + 6 * k) / r.tensor) * r.item * tokens,
        "weights of two layers, gathered": 2 * layer_weights(r.model) * r.item / r.tensor,
    }
    rows = tokens / r.length
    vocabulary = r.model.vocab_size / r.tensor
    loss = {
        "vocabulary matrix, gathered, and its gradient": vocabulary * d * (r.item + MASTER),
        "a chunk's logits and their gradient": 2 * rows * min(r.chunk, r.length) * vocabulary * MASTER,
        "final hidden states and their gradient": 2 * d * r.item * tokens,
    }
    step = {"gradient": shard, "step of the optimizer": shard}
    if r.offload:
        step["arrays of the optimizer, fetched"] = r.moments * shard
    return _with_sum(max(throughout | layer, throughout | loss, step, key=lambda items: sum(items.values())))


def experience_needs(recipe) -> dict[str, float]:
    """As `update_needs`, of the log-prob pass."""
    r = recipe
    d, m, q, k = widths(r.model)
    tokens = r.microbatch_rows * r.length / r.row_shards
    vocabulary = r.model.vocab_size / r.tensor
    layer = {
        "one layer": (4 * d + (3 * m + 2 * q + 3 * k) / r.tensor) * r.item * tokens,
        "weights of two layers, gathered": 2 * layer_weights(r.model) * r.item / r.tensor,
    }
    loss = {
        "vocabulary matrix, gathered": vocabulary * d * r.item,
        "a chunk's logits": 2 * tokens / r.length * min(r.chunk, r.length) * vocabulary * MASTER,
        "final hidden states": d * r.item * tokens,
    }
    return _with_sum(max(layer, loss, key=lambda items: sum(items.values())))


def prefill_needs(recipe, prefill_rows) -> dict[str, float]:
    """As `update_needs`, of the prefill: what it leaves for decoding, and one layer of the prompts run at a time."""
    r = recipe
    d, m, q, k = widths(r.model)
    per_shard = kv_bytes(r) / r.row_shards
    return _with_sum(
        {
            "keys and values of prompts": r.fresh_prompts * r.max_prompt * per_shard,
            "keys and values of slots": r.slots * r.length * per_shard,
            "one layer": (4 * d + (3 * m + 2 * q + 3 * k) / r.tensor)
            * r.item
            * prefill_rows
            * r.max_prompt
            / r.row_shards,
        }
    )


def decode_needs(recipe) -> dict[str, float]:
    """As `update_needs`, of decoding: the rest is the program's argument and is changed in place."""
    logits = recipe.slots / recipe.row_shards * recipe.model.vocab_size / recipe.tensor * MASTER
    return _with_sum({"logits and their weights": 2 * logits})


def _with_sum(items) -> dict[str, float]:
    return items | {"sum": sum(items.values())}


def times(recipe, response_length: float) -> dict[str, float]:
    """Phase -> how often it runs in an RL step at responses of so many tokens on average.

    One generation batch is enough, and slots are never idle. Packed rows are full of sequences with the longest prompt.
    """
    r = recipe
    rows = (r.max_prompt + response_length) / r.length if r.pack else 1.0
    return {
        "prefill": 1.0,
        "decode": max(r.fresh_prompts * r.samples / r.slots, 1.0) * response_length,
        "experience": rows,
        "update": rows * r.epochs * r.prompts * r.samples / r.minibatch_rows,
    }
