"""Rollouts by the policy of `rollout.delay` updates ago, to study stale data (docs/method.md 9.4).

An RL step of U updates draws from the policy of k updates ago. Only the policies that some coming rollout is drawn from
are kept: one of each step, after the same one of its updates, and so k // U + 1 at a time. They lie in the hosts'
memory, in the sampler's dtype, divided over devices as for training, and in checkpoints (`TrainState.past`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rpg_jax import parallel
from rpg_jax.models import Model, unstack_layers
from rpg_jax.training.experience import policy_params
from rpg_jax.training.optimizer import Optimizer, fetched, layout
from rpg_jax.types import Params, Policy, TrainState


def make_remember(model: Model, optimizer: Optimizer, mesh: Mesh, shapes: TrainState) -> Callable[[TrainState], Policy]:
    """Builds the jitted `remember(state)`: the policy that samples (x of schedule-free), copied to the hosts' memory.

    `shapes` is the state or its shapes. The state is not donated.
    """

    def remember(state):
        params = policy_params(model, optimizer, state)
        return Policy(state.step, jax.tree.map(lambda x: jnp.copy(x.astype(model.dtype)), params))

    (out_shardings,) = layout(optimizer, mesh, {"past": [jax.eval_shape(remember, shapes)]})["past"]
    return jax.jit(remember, out_shardings=out_shardings)


def make_recall(mesh: Mesh, shapes: Params) -> Callable[[Policy], Params]:
    """Builds the jitted `recall(policy)`: its parameters on the devices, unstacked and laid out for sampling.

    `shapes` are those of the policy's parameters, adapters merged. The policy is not donated.
    """

    def recall(policy):
        return unstack_layers(fetched(policy.params))

    out_shardings = parallel.shardings(mesh, jax.eval_shape(unstack_layers, shapes), parallel.SAMPLING)
    return jax.jit(recall, out_shardings=out_shardings)
