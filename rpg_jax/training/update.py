"""One optimizer update from a minibatch: gradients of microbatches, added up under the denominator of the minibatch.

The number of microbatches is traced and the gradient is taken inside the loop. So one compilation serves any number,
and the size of microbatches changes memory and speed but neither loss nor gradient. Clip m2po and control optimal are
exceptions, because they estimate something from the responses that a loss is called with.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from rpg_jax import InputError, parallel
from rpg_jax.models import Model, join, stack_layers, token_logprobs, token_logprobs_and_divergence, unstack_layers
from rpg_jax.objectives import Objective
from rpg_jax.objectives import metrics as metric
from rpg_jax.objectives.batch import prepare
from rpg_jax.objectives.divergences import full_vocabulary
from rpg_jax.objectives.objective import measure
from rpg_jax.training.optimizer import Optimizer, fetched, layout
from rpg_jax.training.packing import Plan, microbatches
from rpg_jax.training.policies import REFERENCE, frozen_params, joined
from rpg_jax.training.skipped import SKIPPED, finiteness
from rpg_jax.types import Params, Policy, TrainBatch, TrainState

KL_AVERAGE_DECAY = 0.9  # of the moving average that the `kl_target` reference schedule watches


Update = Callable[[TrainState, TrainBatch, Plan, Mapping[str, Policy]], tuple[TrainState, metric.Metrics]]


def init_state(optimizer: Optimizer, mesh: Mesh, params: Params) -> TrainState:
    """A state at step 0. The parameters are donated to it."""

    def build(params):
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.int32)
        return TrainState(step, params, optimizer.transformation.init(params), skipped, kl_average=jnp.zeros(()))

    shapes = jax.eval_shape(build, params)
    return jax.jit(build, donate_argnums=0, out_shardings=layout(optimizer, mesh, shapes))(params)


def init_params(model: Model, mesh: Mesh, seed: int) -> Params:
    """Random parameters, of which each device makes its shards only."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.jit(model.init, out_shardings=parallel.shardings(mesh, model.shapes))(key)


@jax.jit
def _are_finite(tree):
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)


def check_finite(params: Params, where: str, mend: str) -> None:
    """Raises ValueError, which names a leaf, if a parameter is NaN or infinite."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(_are_finite(params)))
    broken = [parallel.leaf_name(path) for path, finite in leaves if not finite]
    if broken:
        count = f"{len(broken)} of {len(leaves)} leaves, the first is {broken[0]}"
        raise InputError(f"{where}: parameters are NaN or infinite ({count}); {mend}")


def policy_age(step: jax.Array, batch: TrainBatch) -> metric.Metrics:
    """Mean and maximum over trained tokens of the updates taken since the policy that drew them; none if none drew."""
    if batch.version is None:
        return {}
    age = (step - batch.version).astype(jnp.float32)
    return {
        "policy_age": metric.mean_of(age, batch.loss_mask),
        "policy_age_max": metric.max_of(age, batch.loss_mask),
    }


def sample_sizes(logp: jax.Array, behavior_logp: jax.Array, mask: jax.Array) -> metric.Metrics:
    """Effective sample sizes over tokens and over whole responses: those of objectives of different levels compare."""
    log_ratio = jax.lax.stop_gradient(jnp.where(mask, logp - behavior_logp, 0))
    rows = jnp.sum(log_ratio, axis=1)
    return {
        "effective_sample_size_token": metric.effective_sample_size(log_ratio, mask),
        "effective_sample_size_sequence": metric.effective_sample_size(rows, jnp.any(mask, axis=1)),
    }


def of_both(measured: metric.Metrics, objective: Objective, logp: jax.Array, batch: TrainBatch) -> metric.Metrics:
    """The metrics of a loss whose ratio is policy / proximal, under names that end so, and those of policy / the policy
    that drew under the names that they have for every source."""
    mask = batch.loss_mask
    tokens = prepare(logp, batch.drawn_logp, batch.advantage, mask, batch.reference_logp)  # type: ignore[arg-type]
    drawn = measure(tokens, objective.units(tokens)) | sample_sizes(logp, batch.drawn_logp, mask)  # type: ignore[arg-type]
    same = {f"kl_reference_{name}" for name in ("k1", "k2", "k3")}  # of no behavior policy
    apart = drawn.keys() - same
    return {f"{name}_proximal" if name in apart else name: value for name, value in measured.items()} | drawn


def of_routers(auxiliary: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, metric.Metrics]:
    """How evenly routers spread tokens over experts: the balance loss of a microbatch, and metrics.

    The loss of a layer is that of Switch Transformers in transformers' scale: experts * sum over experts of (choices a
    token) * (mean probability), which is the number of experts a token when all have the same load, and up to `experts`
    times as much when few have all. It is a mean over layers; its gradient passes through the probabilities.

    Args:
      auxiliary: sums over a microbatch's trained tokens, by `Model.hidden_and_auxiliary`: router_load and
        router_probability f32[layers, experts], router_entropy f32[layers].
      count: f32[], those tokens.

    Returns f32[], and metrics whose means are over tokens.
    """
    load, probability, entropy = (auxiliary[f"router_{name}"] for name in ("load", "probability", "entropy"))
    layers, experts = load.shape
    tokens = jnp.maximum(count, 1)
    balance = experts * jnp.vdot(load / tokens, probability / tokens) / layers
    of_even = load * experts / jnp.maximum(load.sum(-1, keepdims=True), 1)  # of an even load
    value, spread = jax.lax.stop_gradient((balance, entropy.mean()))
    return balance, {
        "router_balance": metric.Mean(value * count, count),
        "router_entropy": metric.Mean(spread, count),
        "router_load_max": metric.max_of(of_even, jnp.broadcast_to(count > 0, of_even.shape)),
        "router_unused": metric.Mean(jnp.sum(load == 0).astype(count.dtype) * count, layers * experts * count),
    }


def make_update(
    model: Model, objective: Objective, optimizer: Optimizer, mesh: Mesh, shapes: TrainState, *,
    rows: int, temperature: float, clip_norm: float, logprob_chunk: int, denominator: float | None = None,
    packed_columns: int | None = None, router_balance: float = 0.0,
) -> Update:  # fmt: skip
    """Builds the jitted `update(state, batch, plan, policies) -> (state, metrics)`, which donates the state.

    Of the policies it reads `base`, if the model has adapters, and `reference`, if the objective has kl="full". An
    update whose loss, gradient or step is not finite is skipped, counted in the state, and explained in the metrics
    (`skipped.split_finiteness`).

    Args:
      shapes: the state or its shapes, for its shardings.
      rows: the size of a microbatch, which must divide the batch; those of the plan are learned from.
      clip_norm: largest norm of the gradient; logprob_chunk: columns whose logits are computed at a time.
      denominator: the number that reduction="constant" divides by.
      packed_columns: W, of a packed row, at least T; None is T.
      router_balance: factor of `of_routers`, whose mean over microbatches is weighted by their trained tokens.
    """
    state_shardings = layout(optimizer, mesh, shapes)

    def update(state, batch, plan, policies):
        state = jax.lax.with_sharding_constraint(state, state_shardings)
        batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, parallel.ROWS))
        micro = microbatches(mesh, plan.start, batch, rows, packed_columns)
        total = objective.count(batch.loss_mask) if denominator is None else denominator  # of the whole minibatch
        trained = jnp.maximum(batch.loss_mask.sum(dtype=jnp.float32), 1)

        def loss(params, index):
            model_rows, sequences, undo = micro(index)
            settings: dict[str, Any] = model_rows | dict(temperature=temperature, chunk=logprob_chunk, auxiliary=True)
            regularizer = {}
            with jax.named_scope("policy_logprobs"):  # [rows, T], or [B, T] when packed
                whole = join(model.lora, base, params)
                if objective.full_kl is None:
                    logp, auxiliary = token_logprobs(model, whole, **settings)
                else:
                    divergence = partial(full_vocabulary, objective.full_kl)
                    logp, full_kl, auxiliary = token_logprobs_and_divergence(model, whole, held, divergence, **settings)
                    regularizer = dict(full_kl=undo(full_kl))
                logp = undo(logp)
            value, metrics = objective(
                logp, sequences.behavior_logp, sequences.advantage, sequences.loss_mask,
                reference_logp=sequences.reference_logp, weight=sequences.weight, denominator=total, **regularizer,
            )  # fmt: skip
            metrics |= sample_sizes(logp, sequences.behavior_logp, sequences.loss_mask)
            if sequences.drawn_logp is not None:
                metrics = of_both(metrics, objective, logp, sequences)
            metrics |= finiteness(logp, sequences)
            if auxiliary:  # of routers; {} without experts
                count = model_rows["mask"].sum(dtype=jnp.float32)
                balance, routed = of_routers(auxiliary, count)
                value, metrics = value + router_balance * balance * count / trained, metrics | routed
            return value, metrics

        gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), inline=True)  # traced once for both calls
        # Unrolled layers are cut out of the stack once, and not in every microbatch.
        params, base = state.params, frozen_params(policies)
        reference = None if objective.full_kl is None else joined(policies, REFERENCE)
        if not model.scan:
            params, base, reference = (tree and unstack_layers(tree) for tree in (params, base, reference))
        held: Any = reference and (policies[REFERENCE].model, reference)

        def body(index, carry):
            value, metrics, grads = carry
            (more, more_metrics), more_grads = gradient(params, index)
            return value + more, metric.merge(metrics, more_metrics), jax.tree.map(jnp.add, grads, more_grads)

        (value, metrics), _ = jax.eval_shape(gradient, params, 0)  # a number as the loop's index is, weakly typed
        nothing = jnp.zeros(value.shape, value.dtype), metric.empty(metrics), jax.tree.map(jnp.zeros_like, params)
        value, metrics, grads = jax.lax.fori_loop(0, plan.count, body, nothing)
        grads = grads if model.scan else stack_layers(grads)

        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(grads)
            finite = jnp.isfinite(value) & jnp.isfinite(norm)
            scale = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale, grads)
            before = fetched(state.opt_state)
            steps, opt_state = optimizer.transformation.update(grads, before, state.params)
            params = optax.apply_updates(state.params, steps)
            change = optax.tree.norm(steps)
            finite &= jnp.isfinite(change)  # else the new parameters were not
        metrics |= policy_age(state.step, batch)
        average = metrics["kl_reference_weighted"].value() - state.kl_average
        taken = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            skipped=state.skipped * jnp.array([1, 0], state.skipped.dtype),
            kl_average=state.kl_average + (1 - KL_AVERAGE_DECAY) * average,
        )
        not_taken = dataclasses.replace(state, opt_state=before, skipped=state.skipped + 1)
        state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), taken, not_taken)
        metrics = {**metrics, "loss": metric.mean_of(value), "grad_norm": metric.mean_of(norm)}
        metrics["update_norm"] = metric.mean_of(jnp.where(finite, change, 0.0))
        metrics[SKIPPED] = metric.mean_of(1 - finite.astype(jnp.float32))
        return state, metrics

    replicated = NamedSharding(mesh, parallel.REPLICATED)
    return jax.jit(update, donate_argnums=0, out_shardings=(state_shardings, replicated))
