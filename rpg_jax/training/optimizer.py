"""AdamW and schedule-free AdamW, and the two points of the latter.

Schedule-free trains at y (`TrainState.params`, where gradients are taken) and is evaluated at x: rollouts, evaluation,
the reference and exported weights use `evaluation_params`. Gradient clipping stays outside, in the update step: wrapped
in `optax.chain` the state would hide from `schedule_free_eval_params`.

Offloaded, the state lies in the hosts' memory and comes to the devices for an update only: rollouts have the room. That
is a matter of its layout alone: programs that read it fetch it, which costs nothing where it is there already.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from rpg_jax import parallel

HOST = "pinned_host"  # JAX's name of the memory that devices copy from


class Optimizer(NamedTuple):
    transformation: optax.GradientTransformation
    evaluation_params: object  # (opt_state, params) -> params to sample from, evaluate and export; for use inside jit
    offload: bool = False


def fetched(opt_state):
    """The state in the devices' memory, whatever its layout; for use inside jit."""
    return jax.device_put(opt_state, jax.memory.Space.Device)


def layout(optimizer, mesh, tree):
    """The NamedSharding of every leaf of a TrainState or a part of it, arrays or shapes."""

    def place(path, leaf, sharding):
        hosted = optimizer.offload and leaf.ndim and parallel.leaf_name(path).startswith("opt_state/")
        return sharding.with_memory_kind(HOST) if hosted else sharding

    return jax.tree_util.tree_map_with_path(place, tree, parallel.shardings(mesh, tree))


def check_offload(optimizer, mesh) -> None:
    """Raises ValueError for a state to be offloaded from devices that have no such memory beside them."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if optimizer.offload and HOST not in kinds:
        raise ValueError(
            f"optimizer.offload keeps the optimizer's state in memory of kind {HOST}, and {device.device_kind} devices "
            f"know {', '.join(kinds)} only; set optimizer.offload=False"
        )


def warmup_schedule(learning_rate, warmup_steps, decay="constant", total_steps=None):
    """Learning rate at update t = 1, 2, …: linear to its peak at `warmup_steps`, then constant or a decay to zero."""
    if decay not in ("constant", "linear", "cosine"):
        raise ValueError(f"optimizer decay {decay!r}: expected constant, linear or cosine")

    def schedule(t):
        warm = jnp.minimum(1.0, t / max(warmup_steps, 1))
        if decay == "constant":
            return learning_rate * warm
        done = jnp.clip((t - warmup_steps) / max(total_steps - warmup_steps, 1), 0.0, 1.0)
        return learning_rate * warm * (1.0 - done if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * done)))

    return schedule


def make_optimizer(
    name,
    *,
    learning_rate,
    warmup_steps=0,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    weight_decay=0.0,
    decay=None,
    total_steps=None,
    offload=False,
) -> Optimizer:
    """`adamw` (Loshchilov & Hutter 2019) or `schedule_free_adamw` (Defazio et al. 2024, held against their package).

    Args:
      learning_rate: peak; warmup_steps: in optimizer updates.
      decay: after warm-up: None or constant, linear, cosine to zero at `total_steps` updates; schedule-free has none.
      offload: whether the state lies in the hosts' memory between updates (`layout`).
    """
    if name == "adamw":
        schedule = warmup_schedule(learning_rate, warmup_steps, decay or "constant", total_steps)
        # optax counts updates from 0
        adamw = optax.adamw(lambda count: schedule(count + 1), beta1, beta2, epsilon, weight_decay=weight_decay)
        return Optimizer(adamw, lambda opt_state, params: params, offload)
    if name == "schedule_free_adamw":
        if decay is not None:
            raise ValueError(f"optimizer decay {decay!r}: schedule-free AdamW has no decay; leave it unset")
        schedule = warmup_schedule(learning_rate, warmup_steps)
        # Built from parts: optax's own constructor warms its step size up one update later than its averaging weights.
        base = optax.chain(
            optax.scale_by_rms(decay=beta2, eps=epsilon, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
        )
        transformation = optax.contrib.schedule_free(base, schedule, b1=beta1)
        at_x = optax.contrib.schedule_free_eval_params
        return Optimizer(transformation, lambda state, params: at_x(fetched(state), params), offload)
    raise ValueError(f"unknown optimizer {name!r}; known: adamw, schedule_free_adamw")
