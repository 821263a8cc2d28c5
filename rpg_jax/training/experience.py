"""From sampled responses to what an update learns from: log-probs of the fixed policies, rewards, advantages."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from rpg_jax import parallel
from rpg_jax.models import Model, join, merge, token_logprobs_and_entropy, unstack_layers
from rpg_jax.objectives import Objective
from rpg_jax.objectives import metrics as metric
from rpg_jax.training.optimizer import Optimizer, fetched, layout
from rpg_jax.training.packing import map_rows
from rpg_jax.types import Params, Policy, Rollout, TrainBatch, TrainState

SOURCES = ("trainer", "sampler")  # of the behavior policy's log-probs
Tree = TypeVar("Tree")


class Experience(Protocol):
    """From responses and rewards f32[P, G] to the batch that updates learn from; the rollout is donated."""

    def __call__(
        self, state: TrainState, rollout: Rollout, reward: jax.Array,
        count: ArrayLike | None = None, start: ArrayLike | None = None, drawn_by: Policy | None = None,
    ) -> tuple[TrainBatch, metric.Metrics]: ...  # fmt: skip


def policy_params(model: Model, optimizer: Optimizer, state: TrainState) -> Params:
    """The whole tree of the policy that samples (x of schedule-free), adapters merged; for use inside jit."""
    params = optimizer.evaluation_params(state.opt_state, state.params)
    return merge(model.lora, state.base.params if state.base else None, params)


def make_sampling_params(
    model: Model, optimizer: Optimizer, mesh: Mesh, shapes: TrainState
) -> Callable[[TrainState], Params]:
    """Builds the jitted `policy(state)`: the parameters to sample from (x of schedule-free), in the model's dtype.

    Adapters are merged into them. They are unstacked and laid out for sampling. The state is not donated; `shapes` is
    the state or its shapes.
    """

    def policy(state):
        params = policy_params(model, optimizer, state)
        return unstack_layers(jax.tree.map(lambda x: x.astype(model.dtype), params))

    out_shardings = parallel.shardings(mesh, jax.eval_shape(policy, shapes), parallel.SAMPLING)
    return jax.jit(policy, in_shardings=(layout(optimizer, mesh, shapes),), out_shardings=out_shardings)


def make_experience(
    model: Model, objective: Objective, optimizer: Optimizer, mesh: Mesh, *,
    rows: int, temperature: float, logprob_chunk: int, source: str = "trainer", packed_columns: int | None = None,
) -> Experience:  # fmt: skip
    """Builds the jitted `Experience`.

    The behavior policy is the one that sampled: `drawn_by` if it is given, else that of the state (x under
    schedule-free). With source "trainer" its log-probs are computed again, at the sampling temperature; with "sampler"
    they are those that were recorded as each token was drawn, and no forward pass is made for them (docs/method.md
    9.1). The reference is the behavior policy itself, by the same log-probs, unless the state holds another. Advantages
    and corrections are the objective's, over all P·G responses at once. Every process gives the same reward. `count`
    (all microbatches if None) and `start` are those of `packing.plan` over all responses; `packed_columns` are those of
    a packed row, T if None.

    Metrics that need the behavior policy's forward pass, `entropy` and `sampler_logp_gap`, are left out without it.
    """
    by_rows, replicated = NamedSharding(mesh, parallel.ROWS), NamedSharding(mesh, parallel.REPLICATED)

    def score(params, tokens, mask, count, start):
        logprobs = partial(token_logprobs_and_entropy, model, params, temperature=temperature, chunk=logprob_chunk)
        return map_rows(logprobs, mesh, start, count, tokens, mask, rows, packed_columns)

    def experience(state, rollout, reward, count=None, start=None, drawn_by=None):
        rollout = jax.lax.with_sharding_constraint(rollout, by_rows)
        reward = jax.lax.with_sharding_constraint(reward, replicated)
        state = jax.lax.with_sharding_constraint(state, layout(optimizer, mesh, state))
        tokens, mask = rollout.tokens, rollout.response_mask
        joined = partial(join, model.lora, state.base.params if state.base else None)
        count = tokens.shape[0] // rows if count is None else count
        if drawn_by is None:
            version, params = state.step, joined(optimizer.evaluation_params(state.opt_state, state.params))
        else:
            version, params = drawn_by.version, fetched(drawn_by.params)
        metrics: metric.Metrics = {
            "response_length": metric.mean_of(mask.sum(-1).astype(jnp.float32)),
            "finished": metric.mean_of(rollout.finished.astype(jnp.float32)),
        }
        if source == "sampler":
            behavior = rollout.sampler_logp
        else:
            behavior, entropy = score(params, tokens, mask, count, start)
            gap = jnp.abs(behavior - rollout.model_logp)
            metrics |= {
                "entropy": metric.mean_of(entropy, mask),
                "sampler_logp_gap": metric.mean_of(gap, mask),
                "sampler_logp_gap_max": metric.max_of(gap, mask),
            }
        reference = behavior
        if state.reference.params is not None:
            reference, _ = score(joined(state.reference.params), tokens, mask, count, start)
        weight, corrected = objective.corrections(behavior, rollout.sampler_logp, mask)
        batch = TrainBatch(
            tokens=tokens,
            response_mask=mask,
            behavior_logp=behavior,
            reference_logp=reference,
            advantage=objective.advantages(reward, behavior, reference, mask, state.step),
            weight=weight,
            version=jnp.broadcast_to(version, (tokens.shape[0], 1)) if rollout.version is None else rollout.version,
        )
        return batch, metrics | corrected

    return jax.jit(experience, donate_argnums=1, out_shardings=(by_rows, replicated))


def take_rows(tree: Tree, rows: ArrayLike) -> Tree:
    """The given rows of every [B, ...] leaf, spread over the mesh that the leaves lie on; zeros for an index of B."""
    return _take_rows(parallel.mesh_of(jax.tree.leaves(tree)[0]), tree, rows)


def merge_rows(kept: Tree, fresh: Any, source: ArrayLike) -> Tree:
    """Row i of the result is row source[i] of `fresh`, or row i of `kept` where source[i] is -1. `kept` is donated."""
    return _merge_rows(parallel.mesh_of(jax.tree.leaves(fresh)[0]), kept, fresh, source)


@partial(jax.jit, static_argnums=0)
def _take_rows(mesh, tree, rows):
    taken = jax.tree.map(lambda x: x.at[rows].get(mode="fill", fill_value=0), tree)
    return jax.lax.with_sharding_constraint(taken, NamedSharding(mesh, parallel.ROWS))


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _merge_rows(mesh, kept, fresh, source):
    def merge(old, new):
        taken = new[jnp.maximum(source, 0)]
        return jnp.where((source >= 0).reshape(-1, *(1,) * (new.ndim - 1)), taken, old)

    merged = jax.tree.map(merge, kept, fresh)
    return jax.lax.with_sharding_constraint(merged, NamedSharding(mesh, parallel.ROWS))
