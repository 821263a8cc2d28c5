"""When the reference policy is renewed (docs/method.md 9.2; Figure 9 and the released scripts).

`iterative` is the default: each rollout's behavior policy is the reference, and only its log-probs are kept. The other
modes hold a parameter tree in `TrainState.reference`. Most renew it between rollouts and never within one; `ema` moves
it a little with every update (arXiv 2602.04417), and a rollout is scored by what it is at the rollout's start. Of a
model with adapters it holds adapters only, so that no second copy of the weights is needed.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rpg_jax import InputError, parallel
from rpg_jax.training.optimizer import Optimizer
from rpg_jax.types import Params, Reference, TrainState

MODES = ("iterative", "every", "kl_target", "ema", "fixed")


@dataclasses.dataclass(frozen=True)
class ReferenceSchedule:
    """One of `MODES`, with the setting that the modes of these names need."""

    mode: str = "iterative"
    every: int | None = None  # optimizer updates, at whose multiples the reference is renewed
    kl_target: float | None = None  # nats; the reference is renewed once `Reference.kl_average` is larger
    decay: float | None = None  # of the moving average ema, an optimizer update

    def __post_init__(self):
        if self.mode not in MODES:
            raise InputError(f"unknown reference.mode {self.mode!r}; known: {', '.join(MODES)}")
        for name, mode in (("every", "every"), ("kl_target", "kl_target"), ("decay", "ema")):
            value = getattr(self, name)
            if (value is not None) != (self.mode == mode):
                needs = "must be given" if value is None else "cannot matter and must be left unset"
                raise InputError(f"reference.{name} {needs} with reference.mode={self.mode}")

    def is_due(self, state: TrainState) -> bool:
        """Whether the coming rollout gets a new reference; reads scalars from the device."""
        if self.every is not None:
            return int(state.step) // self.every > int(state.reference.refreshed_at) // self.every
        # An infinite KL makes the average infinite, then NaN; renewal sets it to zero.
        return self.kl_target is not None and not float(state.reference.kl_average) <= self.kl_target

    def age(self, state: TrainState) -> float:
        """Optimizer updates since the reference was renewed; the mean age 1 / (1 − decay) of what ema averages."""
        if self.decay is not None:
            return 1 / (1 - self.decay)
        return int(state.step) - int(state.reference.refreshed_at)


def moved(reference: Params, policy: Params, decay: float) -> Params:
    """decay·reference + (1 − decay)·policy, leaf by leaf: the reference of mode `ema` after an update."""
    return jax.tree.map(lambda r, p: decay * r + (1 - decay) * p.astype(r.dtype), reference, policy)


def make_refresh(optimizer: Optimizer, mesh: Mesh, shapes: TrainState) -> Callable[[TrainState], TrainState]:
    """Builds `refresh(state)`: the state with a copy of the policy that samples (x if schedule-free) as its reference.

    `shapes` is the state or its shapes, for its shardings. The state is not donated.
    """

    def reference(state):
        params = jax.tree.map(jnp.copy, optimizer.evaluation_params(state.opt_state, state.params))
        return Reference(params, state.step, jnp.zeros(()))

    copy = jax.jit(reference, out_shardings=parallel.shardings(mesh, jax.eval_shape(reference, shapes)))

    def refresh(state):
        return dataclasses.replace(state, reference=copy(state))

    return refresh
