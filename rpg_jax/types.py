"""The pytrees that pass between folders.

One convention holds everywhere: column t describes token t, so `logp[b, t] = log p(tokens[b, t] | tokens[b, :t])`.
A row is `prompt ++ response ++ padding`, aligned to column 0 and padded on the right. A token's position is therefore
its column, and causal attention alone keeps padding out of every valid token's context.
"""

import dataclasses
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import jax

Params: TypeAlias = Any  # a tree of parameters as `Model.init` makes it; "layers" is a list once they are unstacked
Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def pytree(cls: type[Class]) -> type[Class]:
    """A frozen dataclass that JAX sees as a pytree with one child per field that is not static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@pytree
class Sequences:
    """B rows of tokens: a prompt to be answered, a response under way or complete, or a worked solution.

    A row is a prompt, then what the policy drew and, in a conversation, what others said. No length and no position is
    counted from a mask.
    """

    tokens: jax.Array  # i32[B, T]; zeros, or the tokenizer's padding, from `length` on
    length: jax.Array  # i32[B], tokens that exist
    prompt_length: jax.Array  # i32[B], those of them that are the prompt
    loss_mask: jax.Array  # bool[B, T], true on tokens that the policy drew and that are trained
    sampler_logp: jax.Array  # f32[B, T], of the filtered and tempered distribution that was sampled; 0 off the mask
    model_logp: jax.Array  # f32[B, T], of the model at the training temperature, no filters; 0 off the mask
    version: jax.Array  # i32[B, T], optimizer updates of the policy that drew each token; 0 off the mask
    problem: jax.Array  # i32[B], position in the stream or in the evaluated set: part of the responses' noise
    sample: jax.Array  # i32[B], index among the responses to its problem
    complete: jax.Array  # bool[B], whether nothing more is drawn of it
    finished: jax.Array  # bool[B], whether it came to its own end: a stop token, or what its environment says
    routes: jax.Array | None = None  # u8[B, T, layers * k], experts of each token when its successor was drawn


@pytree
class Pending:
    """With rollout.carry_over, G groups of responses that were begun and not trained yet, oldest first."""

    rollout: Sequences  # G * samples rows; their tokens may end where a step ended
    position: jax.Array  # i32[G], of its problem in the stream's order; -1 for no group
    begun: jax.Array  # i32[G], RL step in which it was begun, and whose noise its responses have


@pytree
class TrainBatch:
    """The input of an update: B rows of T tokens, and everything but the current policy's log-probs."""

    tokens: jax.Array  # i32[B, T]
    length: jax.Array  # i32[B], tokens that exist
    loss_mask: jax.Array  # bool[B, T], true on the tokens that are trained
    behavior_logp: jax.Array  # f32[B, T], of the policy that drew each token, at the sampling temperature, or proximal
    reference_logp: jax.Array  # f32[B, T]
    advantage: jax.Array  # f32[B, 1] or f32[B, T]
    weight: jax.Array  # f32[B, T], constant correction per token (docs/method.md 5.3); ones when unused
    version: jax.Array | None = None  # i32[B, T], optimizer updates of the policy that drew each token; None: none did
    routes: jax.Array | None = None  # u8[B, T, layers * k], experts that every policy sends a token to (models.routes)
    drawn_logp: jax.Array | None = None  # f32[B, T], of the policy that drew each token; None: behavior_logp is it


@pytree
class Policy:
    """A model and its parameters after some optimizer updates: what draws tokens, or what they are scored by."""

    model: Any = dataclasses.field(metadata=dict(static=True))  # a `models.Model`, no part of the pytree's arrays
    params: Params  # laid out as for training; with `model.lora` the adapters alone, beside the frozen policy "base"
    version: jax.Array  # i32[], the updates


@pytree
class TrainState:
    """Everything that an update reads and writes, arrays only."""

    step: jax.Array  # i32[], optimizer steps taken
    params: Params  # float32, what is trained; under schedule-free the point y where gradients are taken
    opt_state: Any  # optax's
    skipped: jax.Array  # i32[2], updates skipped as non-finite: in total, and consecutively until now
    kl_average: jax.Array  # f32[], since the reference is what it is, of the token mean of w * k3(ref / policy)


@pytree
class Checkpoint:
    """Everything that a run goes on from. `frozen` is read from its folders again, and the rest is saved."""

    state: TrainState
    reference: Policy | None = None  # None where it is the behavior policy itself, or a frozen one
    past: tuple[Policy, ...] = ()  # rollout.delay: what coming rollouts are drawn from, in that order, on the hosts
    pending: Pending | None = None  # rollout.carry_over: what the next step goes on with
    # "base": the weights that have adapters; "reference": a teacher
    frozen: dict[str, Policy] = dataclasses.field(default_factory=dict)
    checksums: dict[str, jax.Array] = dataclasses.field(default_factory=dict)  # u32[leaves] of each frozen policy
