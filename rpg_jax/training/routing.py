"""How evenly routers spread tokens over experts: a balance loss and metrics, from the sums that layers return."""

import jax
import jax.numpy as jnp

from rpg_jax.objectives import metrics as metric


def measure(auxiliary: dict[str, jax.Array], count: jax.Array) -> tuple[jax.Array, metric.Metrics]:
    """The balance loss of a microbatch, and metrics.

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
