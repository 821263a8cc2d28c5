"""The policies of a run: the one that is trained, and those that are held beside it.

Each is a `Policy`, laid out as for training. Held are the reference (`training.reference`), the policies that
`rollout.delay` draws from, and the frozen weights that adapters are trained beside. With adapters, all others hold
adapters only, so that the weights are there once. A teacher is the distribution over the policy's ids (`Model.ids`).

An RL step of U updates with `rollout.delay` = k draws from the policy of k updates ago, to study stale data
(docs/method.md 9.4). Kept are only those that some coming rollout is drawn from: one of each step, after the same one
of its updates, and so k // U + 1 at a time. They lie in the hosts' memory, in the sampler's dtype.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rpg_jax import parallel
from rpg_jax.models import Model, join, merge, unstack_layers
from rpg_jax.training.optimizer import Optimizer, fetched, layout
from rpg_jax.training.phases import phase
from rpg_jax.training.reference import ReferenceSchedule
from rpg_jax.types import Checkpoint, Params, Policy, TrainState

BASE, BEHAVIOR, REFERENCE = "base", "behavior", "reference"  # names of policies; what is scored is all but the base


class Policies(NamedTuple):
    """The functions that make policies, of `make_policies`; none donates the state."""

    current: Callable[[TrainState], Policy]  # what samples; its arrays may be the state's, which an update donates
    reference: Callable[[Policy], Policy]  # a copy that stays
    past: Callable[[Policy], Policy]  # a copy in the hosts' memory, in the sampler's dtype
    moved: Callable[[Policy, TrainState], Policy] | None  # the reference of mode `ema`, donated, after an update
    sampling_params: Callable[[Policy, Mapping[str, Policy]], Params]  # of a policy and the frozen ones


def frozen_params(policies: Mapping[str, Policy]) -> Params | None:
    """The weights that adapters stand beside; None where all are trained."""
    return policies[BASE].params if BASE in policies else None


def joined(policies: Mapping[str, Policy], name: str) -> Params:
    """The tree of a policy that training computes with; for use inside jit."""
    policy = policies[name]
    return join(policy.model.lora, frozen_params(policies), fetched(policy.params))


def merged(policy: Policy, frozen: Mapping[str, Policy]) -> Params:
    """The whole tree of a policy, adapters merged; for use inside jit."""
    return merge(policy.model.lora, frozen_params(frozen), fetched(policy.params))


def make_policies(
    model: Model, optimizer: Optimizer, mesh: Mesh, shapes: TrainState, decay: float | None = None,
    sampler: Mesh | None = None,
) -> Policies:  # fmt: skip
    """Builds `Policies`; `shapes` is the state or its shapes, and `decay` that of reference mode `ema`.

    The policy that samples is x of schedule-free. Parameters to sample from are those of the merged tree in the model's
    dtype, unstacked and laid out for sampling, on the mesh `sampler` if that is another one. There they are moved one
    after the other: beside the policy's shards, the devices that learn hold one whole matrix at a time.
    """

    def current(state):
        return Policy(model, optimizer.evaluation_params(state.opt_state, state.params), state.step)

    def copied(policy):
        return jax.tree.map(jnp.copy, policy)

    def narrowed(policy):  # adapters are few, and are merged in float32
        dtype = model.dtype if model.lora is None else jnp.float32
        return copied(Policy(model, jax.tree.map(lambda x: x.astype(dtype), policy.params), policy.version))

    def moved(reference, state):  # unless the update was skipped
        def leaf(old, new):
            mean = decay * old + (1.0 - decay) * new.astype(old.dtype)  # type: ignore[operator]
            return jnp.where(state.step > reference.version, mean, old)

        return Policy(model, jax.tree.map(leaf, reference.params, current(state).params), state.step)

    def sampling_params(policy, frozen):
        return unstack_layers(jax.tree.map(lambda x: x.astype(model.dtype), merged(policy, frozen)))

    held = jax.eval_shape(current, shapes)
    on_device, on_host = layout(optimizer, mesh, held), layout(optimizer, mesh, {"past": held})["past"]
    whole = jax.eval_shape(unstack_layers, model.shapes)
    there = parallel.shardings(sampler or mesh, whole, parallel.SAMPLING)
    stays = sampler in (None, mesh)
    here = there if stays else parallel.shardings(mesh, whole, parallel.UNSTACKED)
    merged_here = jax.jit(sampling_params, out_shardings=here)

    def to_sample(policy, frozen):
        params = merged_here(policy, frozen)
        return params if stays else jax.tree.map(parallel.move, params, there)

    return Policies(
        current,
        reference=jax.jit(copied, out_shardings=on_device),
        past=jax.jit(narrowed, out_shardings=on_host),
        moved=None if decay is None else jax.jit(moved, out_shardings=on_device, donate_argnums=0),
        sampling_params=to_sample,
    )


def renewed(policies: Policies, schedule: ReferenceSchedule, checkpoint: Checkpoint) -> Checkpoint:
    """With a new reference, a copy of the current policy, if the schedule says so."""
    if not schedule.is_due(checkpoint):
        return checkpoint
    with phase("reference"):
        reference = jax.block_until_ready(policies.reference(policies.current(checkpoint.state)))
    state = dataclasses.replace(checkpoint.state, kl_average=jnp.zeros_like(checkpoint.state.kl_average))
    return dataclasses.replace(checkpoint, state=state, reference=reference)


def followed(policies: Policies, checkpoint: Checkpoint, is_kept: bool) -> Checkpoint:
    """After an update: with a reference that follows it, and with its policy in the place of the earliest if kept."""
    reference, past = checkpoint.reference, checkpoint.past
    if policies.moved is not None and reference is not None:
        reference = policies.moved(reference, checkpoint.state)
    if is_kept:
        past = *past[1:], policies.past(policies.current(checkpoint.state))
    return dataclasses.replace(checkpoint, reference=reference, past=jax.block_until_ready(past))


def drawing(policies: Policies, checkpoint: Checkpoint, ahead: int = 0) -> Policy:
    """The policy that draws the coming responses: with `rollout.delay` an earlier one. Those of the step after, which
    is 1 `ahead`, are drawn from one that is known already if the delay is a step's updates or more."""
    return checkpoint.past[ahead] if checkpoint.past else policies.current(checkpoint.state)


def sampled(policies: Policies, checkpoint: Checkpoint, ahead: int = 0) -> tuple[Params, int]:
    """What the coming responses are drawn from, laid out for sampling, and its version."""
    behavior = drawing(policies, checkpoint, ahead)
    return policies.sampling_params(behavior, checkpoint.frozen), int(behavior.version)


def scored(policies: Policies, checkpoint: Checkpoint, source: str) -> dict[str, Policy]:
    """The policies whose log-probs a batch needs, and their base; `source` is that of the behavior policy's."""
    if source == "sampler":
        return held(checkpoint)
    behavior = drawing(policies, checkpoint) if source == "trainer" else policies.current(checkpoint.state)
    return held(checkpoint) | {BEHAVIOR: behavior}


def held(checkpoint: Checkpoint) -> dict[str, Policy]:
    """The policies beside the one that is trained which a loss may read whole, by name."""
    return checkpoint.frozen | ({} if checkpoint.reference is None else {REFERENCE: checkpoint.reference})
