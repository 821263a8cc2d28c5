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
class Prompts:
    """P prompts of at most Tp tokens; answers and other metadata stay on the host."""

    tokens: jax.Array  # i32[P, Tp], padded on the right
    mask: jax.Array  # bool[P, Tp], true on prompt tokens; at least one per row
    problem: jax.Array  # i32[P], its position in the stream or in the evaluated set: part of its responses' noise


@pytree
class Rollout:
    """B sampled responses with their log-probs; T = Tp + the length limit of responses."""

    tokens: jax.Array  # i32[B, T]
    response_mask: jax.Array  # bool[B, T], true on response tokens up to and including the first stop token
    sampler_logp: jax.Array  # f32[B, T], of the filtered and tempered distribution that was sampled; 0 outside the mask
    model_logp: jax.Array  # f32[B, T], of the model at the training temperature, no filters; 0 outside the mask
    problem: jax.Array  # i32[B]
    sample: jax.Array  # i32[B], index among the responses to its problem
    finished: jax.Array  # bool[B], whether a stop token ended it (false: truncated at its length limit)
    # i32[B, T], optimizer updates of the policy that drew each token; None: one policy drew them all
    version: jax.Array | None = None


@pytree
class Pending:
    """With rollout.carry_over, G groups of responses that were begun and not trained yet, oldest first."""

    rollout: Rollout  # G * samples rows; their tokens may end where a step ended
    position: jax.Array  # i32[G], of its problem in the stream's order; -1 for no group
    begun: jax.Array  # i32[G], RL step in which it was begun, and whose noise its responses have


@pytree
class TrainBatch:
    """The input of an update: B rows of T tokens, and everything but the current policy's log-probs."""

    tokens: jax.Array  # i32[B, T]
    response_mask: jax.Array  # bool[B, T]
    behavior_logp: jax.Array  # f32[B, T], of the policy that drew each token, at the sampling temperature
    reference_logp: jax.Array  # f32[B, T]
    advantage: jax.Array  # f32[B, 1] or f32[B, T]
    weight: jax.Array  # f32[B, T], constant correction per token (docs/method.md 5.3); ones when unused
    # i32[B, 1], or i32[B, T] token by token: optimizer updates of the policy that drew it; None: no policy did
    version: jax.Array | None = None


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
    reference: Policy | None = None  # None where it is the behavior policy itself
    past: tuple[Policy, ...] = ()  # rollout.delay: what coming rollouts are drawn from, in that order, on the hosts
    pending: Pending | None = None  # rollout.carry_over: what the next step goes on with
    frozen: dict[str, Policy] = dataclasses.field(default_factory=dict)  # "base": the weights that have adapters
    checksums: dict[str, jax.Array] = dataclasses.field(default_factory=dict)  # u32[leaves] of each frozen policy
