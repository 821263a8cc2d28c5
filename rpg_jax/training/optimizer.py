"""AdamW and schedule-free AdamW, and the two points of the latter.

Schedule-free trains at y (`TrainState.params`, where gradients are taken) and is evaluated at x: rollouts, evaluation,
the reference and exported weights use `evaluation_params`. Gradients are clipped by the update step and not inside
`optax.chain`, which would hide the state from `schedule_free_eval_params`.

An offloaded state lies in the hosts' memory and comes to the devices only for an update, so rollouts have the room.
Its layout alone decides that: every program that reads the state fetches it, which is free if it is on the device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from rpg_jax import InputError, parallel
from rpg_jax.types import Params

HOST = "pinned_host"  # JAX's name for the memory that devices copy from


class Optimizer(NamedTuple):
    transformation: optax.GradientTransformation
    # To sample, evaluate and export, inside and outside of jit: the parameters themselves, or x of schedule-free
    evaluation_params: Callable[[optax.OptState, Params], Params]
    offload: bool = False


def fetched(tree: Any) -> Any:
    """A tree in the devices' memory, whatever its layout; for use inside jit."""
    return jax.device_put(tree, jax.memory.Space.Device)


def layout(optimizer: Optimizer, mesh: Mesh, tree: Any) -> Any:
    """The NamedSharding of every leaf of a Checkpoint or a part of it, of arrays or shapes."""
    hosted = {"past", "opt_state"} if optimizer.offload else {"past"}

    def place(path, leaf, sharding):
        names = parallel.leaf_name(path).split("/")
        if "rollout" in names and leaf.shape[0] % parallel.row_shards(mesh) == 0:
            return NamedSharding(mesh, parallel.ROWS)
        return sharding.with_memory_kind(HOST) if leaf.ndim and hosted & {*names} else sharding

    return jax.tree_util.tree_map_with_path(place, tree, parallel.shardings(mesh, tree))


def check_offload(optimizer: Optimizer, mesh: Mesh, delay: int = 0) -> None:
    """Raises ValueError if the optimizer's state is to be offloaded, or policies kept for `rollout.delay`, and the
    devices' hosts have no such memory."""
    kinds = {memory.kind for device in mesh.devices.flat for memory in device.addressable_memories()}  # this process's
    needs = {
        "optimizer.offload keeps the optimizer's state": (optimizer.offload, "optimizer.offload=False"),
        "rollout.delay keeps earlier policies": (delay > 0, "rollout.delay=0"),
    }
    for what, (needed, mend) in needs.items():
        if needed and kinds and HOST not in kinds:
            known = f"{mesh.devices.flat[0].device_kind} devices know {', '.join(sorted(kinds))} only"
            raise InputError(f"{what} in memory of kind {HOST}, and {known}; set {mend}")


def warmup_schedule(
    learning_rate: float, warmup_steps: int, decay: str = "constant", total_steps: int | None = None
) -> optax.Schedule:
    """Learning rate at update t = 1, 2, …: linear to its peak at `warmup_steps`, then constant or a decay to zero."""
    if decay not in ("constant", "linear", "cosine"):
        raise InputError(f"optimizer decay {decay!r}: expected constant, linear or cosine")
    decay_steps = max((total_steps or 0) - warmup_steps, 1)

    def schedule(t):
        warm = jnp.minimum(1.0, t / max(warmup_steps, 1))
        if decay == "constant":
            return learning_rate * warm
        done = jnp.clip((t - warmup_steps) / decay_steps, 0.0, 1.0)
        return learning_rate * warm * (1.0 - done if decay == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * done)))

    return schedule


def make_optimizer(
    name: str, *, learning_rate: float, warmup_steps: int = 0, beta1: float = 0.9, beta2: float = 0.999,
    epsilon: float = 1e-8, weight_decay: float = 0.0, decay: str | None = None, total_steps: int | None = None,
    offload: bool = False,
) -> Optimizer:  # fmt: skip
    """`adamw` (Loshchilov & Hutter 2019) or `schedule_free_adamw` (Defazio et al. 2024; tested against their package).

    Args:
      learning_rate: peak; warmup_steps: in optimizer updates.
      decay: after warm-up: None or constant; linear or cosine to zero at `total_steps` updates. Schedule-free has none.
      offload: whether the state lies in the hosts' memory between updates (`layout`).
    """
    if name == "adamw":
        schedule = warmup_schedule(learning_rate, warmup_steps, decay or "constant", total_steps)
        # optax counts updates from 0
        adamw = optax.adamw(lambda count: schedule(count + 1), beta1, beta2, epsilon, weight_decay=weight_decay)
        return Optimizer(adamw, lambda opt_state, params: params, offload)
    if name == "schedule_free_adamw":
        if decay is not None:
            raise InputError(f"optimizer decay {decay!r}: schedule-free AdamW has no decay; leave it unset")
        if not beta1 > 0:  # x = (y − (1 − beta1) z) / beta1
            raise InputError(
                f"optimizer.beta1 is {beta1}; schedule-free AdamW interpolates with it: it must be above 0"
            )
        schedule = warmup_schedule(learning_rate, warmup_steps)
        # Built from parts: optax's own constructor warms its step size up one update later than its averaging weights.
        base = optax.chain(
            optax.scale_by_rms(decay=beta2, eps=epsilon, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
        )
        transformation = optax.contrib.schedule_free(base, schedule, b1=beta1)
        at_x = optax.contrib.schedule_free_eval_params
        return Optimizer(transformation, jax.jit(lambda state, params: at_x(fetched(state), params)), offload)
    raise InputError(f"unknown optimizer {name!r}; known: adamw, schedule_free_adamw")
