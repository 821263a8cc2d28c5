"""FLOPs and bytes moved of each phase of an RL step on one device, computed from shapes alone.

Nothing here is compiled. Rows of updates and log-prob passes count as max_prompt + max_new tokens long; how full packed
ones are is in `times`. Prefill and decoding count the tokens that are there on average. D, M, Q and K are the widths of
the residual stream, the MLP, all query heads and all key heads.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax.lab.planning import decoding
from rpg_jax.lab.planning.chips import Topology
from rpg_jax.models import Model, ModelConfig, parameter_count
from rpg_jax.sampling.generate import PREFILL_TOKENS
from rpg_jax.training.loop import LoopSettings
from rpg_jax.training.rollout import RolloutSettings

MASTER = 4  # bytes of a float32: parameters, gradients, moments, logits


@dataclasses.dataclass(frozen=True)
class Workload:
    """What determines the memory and time of a run. Rows are counted over all devices, lengths in tokens."""

    model: Model
    mesh: Mapping[str, int]  # devices along each axis
    rollout: RolloutSettings
    loop: LoopSettings
    lengths: np.ndarray  # f64[max_new + 1], the probability of each length of a response (`decoding.parse`)
    prompt_length: float  # mean tokens of a prompt
    logprob_chunk: int  # columns whose logits are formed at a time
    moments: int  # arrays of the optimizer as large as the parameters
    separate_reference: bool  # the reference has parameters of its own
    offload: bool  # the optimizer's arrays stay in host memory except during its step

    @property
    def shape(self) -> ModelConfig:
        return self.model.config

    @functools.cached_property
    def trained(self) -> int:
        """Parameters that the optimizer changes: those of the adapters, if there are any, or all."""
        if self.model.lora is None:
            return parameter_count(self.shape)
        key = jax.random.key(0)
        adapters = jax.eval_shape(lambda: self.model.lora.init(self.model.init(key), key))
        return sum(leaf.size for leaf in jax.tree.leaves(adapters))

    @property
    def passes(self) -> int:
        """Products of an update with a kernel: forward, and the gradients of its input and, if trained, of itself."""
        return 3 if self.model.lora is None else 2

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the compute dtype."""
        return jnp.dtype(self.model.dtype).itemsize

    @property
    def length(self) -> int:
        """Tokens of a row: prompt and response."""
        return self.rollout.max_prompt + self.rollout.max_new

    @property
    def columns(self) -> int:
        """Tokens of a row of an update or a log-prob pass, which may hold several sequences."""
        return self.loop.packed_columns or self.length

    @property
    def step_rows(self) -> int:
        """Responses that an RL step learns from."""
        return self.loop.prompts * self.loop.samples

    @property
    def generated_rows(self) -> int:
        """Responses of one generation batch."""
        return self.rollout.fresh_prompts * self.rollout.samples

    @property
    def minibatch_rows(self) -> int:
        return self.loop.minibatch_prompts * self.loop.samples

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
    """Work of one device."""

    flops: float
    bytes: float  # between HBM and the cores
    sent: float  # bytes to other devices

    def seconds(self, topology: Topology) -> dict[str, float]:
        """Time at the limit of each resource; the roofline time of a phase is the largest."""
        chip = topology.chip
        return dict(
            compute=self.flops / chip.flops,
            memory=self.bytes / chip.bandwidth,
            interconnect=self.sent / topology.wire(),
        )


# Remat policy -> (share of a layer's matrix products, the last one excepted, share of its attention) that the backward
# pass computes again.
RECOMPUTED = {"none": (0, 0), "dots": (0, 1), "offload": (0, 1), "attention": (1, 0), "full": (1, 1)}


def widths(shape: ModelConfig) -> tuple[int, int, int, int]:
    """(D, M, Q, K)."""
    return shape.hidden_size, shape.mlp_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def layer_weights(shape: ModelConfig) -> int:
    """Weights of the matrix products of one layer."""
    d, m, q, k = widths(shape)
    return d * (2 * q + 2 * k) + 3 * d * m


def saved(shape: ModelConfig, remat: str, tensor: int) -> float:
    """Numbers that a layer saves for its backward pass for each token: its input, and what the remat policy keeps."""
    d, m, q, k = widths(shape)
    split = dict(none=5 * m + 5 * q + 4 * k, dots=2 * m + q + 2 * k, attention=q + 2 * shape.heads)
    whole = dict(none=8 * d, dots=2 * d)
    return d + whole.get(remat, 0) + split.get(remat, 0) / tensor


def kv_bytes(w: Workload) -> float:
    """Keys and values of one token on one of the devices that share its heads; scales of 8-bit ones are left out."""
    itemsize = jnp.dtype(w.rollout.cache_dtype or w.model.dtype).itemsize
    return 2 * w.shape.layers * widths(w.shape)[3] * itemsize / w.tensor


def _products(w: Workload, tokens) -> float:
    """FLOPs of one device in the layers' matrix products, forward, over `tokens`."""
    return 2 * layer_weights(w.shape) * w.shape.layers * tokens / w.devices


def _attention(w: Workload, rows, length) -> float:
    """FLOPs of one device in causal attention, forward: each token attends to those before it, half of all pairs."""
    return 2 * widths(w.shape)[2] * w.shape.layers * rows * length**2 / w.devices


def _vocabulary(w: Workload, tokens) -> float:
    """FLOPs of one device in the logits, forward."""
    return 2 * w.shape.hidden_size * w.shape.vocab_size * tokens / w.devices


def _weights(w: Workload) -> float:
    """Bytes of all weights in the compute dtype, divided over the tensor axis."""
    return parameter_count(w.shape) * w.itemsize / w.tensor


def _sampler_weights(w: Workload) -> float:
    """As `_weights`, in the dtype of the sampler."""
    return parameter_count(w.shape) * jnp.dtype(w.rollout.weights_dtype or w.model.dtype).itemsize / w.tensor


def master_shard(w: Workload) -> float:
    """Bytes of a device's shard of the float32 parameters that are trained."""
    return w.trained * MASTER / (w.mesh["fsdp"] * w.tensor)


def _gathered(w: Workload) -> float:
    """Bytes that a device sends when every device gathers the weights of all fsdp shards once."""
    shards = w.mesh["fsdp"]
    return _weights(w) * (shards - 1) / shards


def _summed(w: Workload, rows, length, passes) -> float:
    """Bytes that a device sends to all-reduce the two partial residuals of each layer over the tensor axis."""
    t = w.tensor
    local = rows * length / w.row_shards * w.shape.hidden_size * w.itemsize
    return 2 * (t - 1) / t * 2 * w.shape.layers * passes * local


def _moved(w: Workload, rows, length, passes, logits) -> float:
    """HBM bytes of `passes` over the layers: weights and activations, and `logits` passes over float32 logits."""
    tokens = rows * length / w.row_shards
    layers = w.shape.layers * saved(w.shape, "none", w.tensor) * w.itemsize * tokens
    chunks = logits * tokens * w.shape.vocab_size / w.tensor * MASTER
    return passes * (_weights(w) + 2 * layers) + chunks


def update_attention(w: Workload) -> Cost:
    """Attention of an update: forward, backward at 2.5 times as many products, and again what is not kept."""
    return Cost((3.5 + RECOMPUTED[w.model.remat][1]) * _attention(w, w.minibatch_rows, w.length), 0, 0)


def experience_attention(w: Workload) -> Cost:
    """Attention of a step's log-prob passes."""
    return Cost((1 + w.separate_reference) * _attention(w, w.step_rows, w.length), 0, 0)


def prefill_attention(w: Workload) -> Cost:
    """Attention among the prompts of one generation batch."""
    return Cost(_attention(w, w.rollout.fresh_prompts, w.prompt_length), 0, 0)


def decode_attention(w: Workload) -> Cost:
    """Attention of one token of every slot to the keys and values of its prompt and of what it has drawn so far."""
    cached = w.rollout.slots * (w.prompt_length + decoding.age(w.lengths))
    flops = 4 * widths(w.shape)[2] * w.shape.layers * cached / w.devices
    return Cost(flops, kv_bytes(w) * cached / w.row_shards, 0)


def microbatches(w: Workload, sequences: int, rows: int) -> float:
    """Microbatches of so many rows that hold sequences of full length."""
    return sequences * w.length / (rows * w.columns)


def update(w: Workload) -> Cost:
    """One optimizer update from a minibatch."""
    rows = w.minibatch_rows
    products, _ = RECOMPUTED[w.model.remat]
    again = products * (1 - w.shape.hidden_size * w.shape.mlp_size / layer_weights(w.shape))
    flops = (w.passes + again) * _products(w, rows * w.length) + update_attention(w).flops
    flops += (w.passes + 1) * _vocabulary(w, rows * w.length)  # forward, again in the backward pass, and gradients
    micro, count = w.loop.microbatch_rows, microbatches(w, rows, w.loop.microbatch_rows)
    shard = master_shard(w)
    moved = _moved(w, micro, w.columns, w.passes + products, logits=6) + 3 * shard
    sent = (2 + products) * _gathered(w) + _summed(w, micro, w.columns, 2 + products)
    across = 2 * (w.mesh["data"] - 1) / w.mesh["data"] * shard  # all-reduce of the gradient over the data axis
    once = (2 * (1 + w.moments) + 2) * shard  # the optimizer reads and writes its arrays once a minibatch
    return Cost(flops, count * moved + once, count * (sent + across))


def experience(w: Workload) -> Cost:
    """Log-probs of a step's responses under the behavior policy, and under the reference if it is another."""
    rows, length = w.step_rows, w.length
    policies = 1 + w.separate_reference
    flops = policies * (_products(w, rows * length) + _vocabulary(w, rows * length)) + experience_attention(w).flops
    micro, count = w.loop.scoring_rows, microbatches(w, rows, w.loop.scoring_rows)
    moved = _moved(w, micro, w.columns, 1, logits=2)
    sent = _gathered(w) + _summed(w, micro, w.columns, 1)
    return Cost(flops, policies * (count * moved), policies * (count * sent))


def prefill_passes(w: Workload) -> float:
    """Passes over the model in which a shard prefills the prompts of one generation batch."""
    return max(w.rollout.fresh_prompts * w.prompt_length / w.row_shards / PREFILL_TOKENS, 1.0)


def prefill(w: Workload) -> Cost:
    """Keys and values of the prompts of one generation batch."""
    rows, length = w.rollout.fresh_prompts, w.prompt_length
    flops = _products(w, rows * length) + prefill_attention(w).flops
    again = (prefill_passes(w) - 1) * _sampler_weights(w)
    moved = _moved(w, rows, length, 1, logits=0) + again + kv_bytes(w) * rows * length / w.row_shards
    return Cost(flops, moved, _summed(w, rows, length, 1))


def decode(w: Workload) -> Cost:
    """One token for every slot: all weights and the live part of the KV cache are read."""
    rows = w.rollout.slots
    attention = decode_attention(w)
    flops = _products(w, rows) + _vocabulary(w, rows) + attention.flops
    logits = 4 * rows / w.row_shards * w.shape.vocab_size / w.tensor * MASTER
    return Cost(flops, _sampler_weights(w) + attention.bytes + logits, _summed(w, rows, 1, 1))


# Phases in the order in which an RL step runs them.
COSTS = {"prefill": prefill, "decode": decode, "experience": experience, "update": update}
ATTENTION = {  # the part of `COSTS` that kernels do where there are some
    "prefill": prefill_attention, "decode": decode_attention,
    "experience": experience_attention, "update": update_attention,
}  # fmt: skip


def times(w: Workload) -> dict[str, float]:
    """How often each phase runs in an RL step.

    Assumes that one generation batch is enough and that packed rows are full.
    """
    rows = (w.prompt_length + decoding.mean(w.lengths)) / w.length if w.loop.packed_columns else 1.0
    requests, slots = w.generated_rows // w.row_shards, w.rollout.slots // w.row_shards
    if w.rollout.carry_over:  # slots are busy to the end, and in the long run a step draws as much as it trains
        decode_steps = w.step_rows * decoding.mean(w.lengths) / w.rollout.slots
    else:
        decode_steps = decoding.steps(w.lengths, requests, slots, w.row_shards)
    return {
        "prefill": 1.0,
        "decode": decode_steps,
        "experience": rows,
        "update": rows * w.loop.epochs * w.step_rows / w.minibatch_rows,
    }
