"""The least that a phase of an RL step takes of one device, from shapes alone: FLOPs, and bytes moved.

Nothing here is compiled. What a good program may avoid is left out, such as activations that go through HBM. Rows of
updates and log-prob passes count as max_prompt + max_new tokens long; how full packed ones are is in `Workload.times`.
Prefill and decoding count the tokens that are there on average. D, M, Q and K are the widths of the residual stream,
the MLP (all experts of a token), all query heads and all key heads; one pass over a product of [D, M] takes 2 D M FLOPs
a token. Routers are taken to spread tokens evenly over the devices that divide experts.
"""

from typing import NamedTuple

import jax.numpy as jnp

from rpg_jax.lab.planning import decoding
from rpg_jax.lab.planning.chips import Topology
from rpg_jax.lab.planning.workload import PHASES, Workload
from rpg_jax.models import ModelConfig, expert_parameter_count, parameter_count

MASTER = 4  # bytes of a float32: parameters, gradients, moments, logits
# Remat policy -> (share of a layer's matrix products, the last one excepted, share of its attention) that the backward
# pass computes again.
RECOMPUTED = {"none": (0, 0), "dots": (0, 1), "offload": (0, 1), "attention": (1, 0), "full": (1, 1)}


class Cost(NamedTuple):
    """Work of one device."""

    flops: float = 0.0
    bytes: float = 0.0  # between HBM and the cores
    sent: float = 0.0  # bytes to other devices

    def seconds(self, topology: Topology) -> dict[str, float]:
        """Time at the limit of each resource; a phase takes at least the largest."""
        chip = topology.chip
        return dict(
            compute=self.flops / chip.flops,
            memory=self.bytes / chip.bandwidth,
            interconnect=self.sent / topology.wire(),
        )


def widths(shape: ModelConfig) -> tuple[int, int, int, int]:
    """(D, M, Q, K)."""
    mlp = shape.experts_per_token * shape.expert_size if shape.experts else shape.mlp_size
    return shape.hidden_size, mlp, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim


def layer_weights(shape: ModelConfig) -> int:
    """Weights of the matrix products of a token in one layer."""
    d, m, q, k = widths(shape)
    return d * (2 * q + 2 * k + shape.experts) + 3 * d * m


def gathered_parameters(w: Workload) -> float:
    """Parameters of the model that a device has once those that shards divide are gathered."""
    experts = expert_parameter_count(w.shape)
    return (parameter_count(w.shape) - experts + experts / w.expert) / w.tensor


def kv_bytes(w: Workload) -> float:
    """Keys and values of one token on one of the devices that share its heads; scales of 8-bit ones are left out."""
    itemsize = jnp.dtype(w.rollout.cache_dtype or w.model.dtype).itemsize
    return 2 * w.shape.layers * widths(w.shape)[3] * itemsize / w.tensor


def attention(w: Workload) -> dict[str, Cost]:
    """The part of `costs` that attention takes. A token attends to those before it, as many as a layer's window holds:
    half of all pairs of a row without one."""
    kinds = w.model.kinds
    pair = 4 * widths(w.shape)[2] / (w.row_shards * w.tensor)  # FLOPs of a token that attends to one in a layer

    def pairs(tokens):  # of a row, over all layers
        return sum(tokens**2 - max(tokens - (kind.window or tokens), 0) ** 2 for kind in kinds) / 2

    age = w.prompt_length + decoding.age(w.lengths)
    cached = w.rollout.slots * sum(min(age, kind.window or age) for kind in kinds)  # keys that a decode step reads
    passes = 3.5 + RECOMPUTED[w.model.remat][1]  # the backward pass is of 2.5 times as many products as the forward
    policies = 1 + w.reference_passes
    return {
        "prefill": Cost(pair * w.rollout.fresh_prompts * pairs(w.prompt_length)),
        "decode": Cost(pair * cached, kv_bytes(w) / w.shape.layers * cached / w.row_shards),
        "experience": Cost(pair * policies * pairs(w.length) * w.step_rows),
        "update": Cost(pair * passes * pairs(w.length) * w.minibatch_rows),
    }


def costs(w: Workload) -> dict[str, Cost]:
    """The work of each phase: of one generation batch, one token of every slot, an RL step's log-probs, one update."""
    shape, data = w.shape, w.mesh["data"]
    devices, kernels = w.row_shards * w.tensor, attention(w)
    mlp = 3 * widths(shape)[0] * widths(shape)[1]
    products = layer_weights(shape) * 2 * shape.layers / devices  # FLOPs of a token, forward
    vocabulary = 2 * shape.hidden_size * shape.vocab_size / devices
    weights = gathered_parameters(w) * w.itemsize  # bytes that a pass reads
    drawn_from = gathered_parameters(w) * jnp.dtype(w.rollout.weights_dtype or w.model.dtype).itemsize
    shard = parameter_count(shape) / w.parameter_shards * w.itemsize
    gathered = weights - shard  # bytes that a pass sends so that every device has all weights
    # Bytes that the two all-reduces of a layer send for a token, over the tensor axis, and what takes it to the experts
    # of others and back.
    summed = 4 * (w.tensor - 1) / w.tensor + 2 * (w.expert - 1)
    summed *= shape.layers * shape.hidden_size * w.itemsize / w.row_shards

    prompts, slots = w.rollout.fresh_prompts * w.prompt_length, w.rollout.slots
    prefill = Cost(products * prompts, w.prefill_passes() * drawn_from, summed * prompts)
    logits = 4 * slots / w.row_shards * shape.vocab_size / w.tensor * MASTER  # they and their weights: written, read
    decode = Cost((products + vocabulary) * slots, drawn_from + logits, summed * slots)

    tokens, policies = w.step_rows * w.length, 1 + w.reference_passes
    count = policies * w.microbatches(w.step_rows, w.loop.scoring_rows)
    flops = policies * (products + vocabulary) * tokens
    experience = Cost(flops, count * weights, count * gathered + policies * summed * tokens)

    # A product has three passes: forward, and the gradients of its input and, if it is trained, of its kernel.
    passes, tokens = 3 if w.model.lora is None else 2, w.minibatch_rows * w.length
    again, _ = RECOMPUTED[w.model.remat]
    computed_again = again * (1 - mlp / 3 / layer_weights(shape))
    flops = ((passes + computed_again) * products + (passes + 1) * vocabulary) * tokens
    count = w.microbatches(w.minibatch_rows, w.loop.microbatch_rows)
    shard = w.trained * MASTER / w.parameter_shards  # bytes of a device's float32 parameters that are trained
    moved = count * ((passes + again) * weights + 3 * shard) + (2 * (1 + w.moments) + 2) * shard
    sent = count * ((2 + again) * gathered + 2 * (data - 1) / data * shard) + (2 + again) * summed * tokens
    update = Cost(flops, moved, sent)

    rest = dict(zip(PHASES, (prefill, decode, experience, update), strict=True))
    return {phase: Cost(*(sum(parts) for parts in zip(rest[phase], kernels[phase], strict=True))) for phase in PHASES}
