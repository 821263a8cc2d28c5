"""When the reference policy is renewed (docs/method.md 9.2; Figure 9 and the released scripts).

`iterative` is the default: each rollout's behavior policy is the reference, and only its log-probs are kept. The other
modes hold a policy, `Checkpoint.reference`. Most renew it between rollouts and never within one; `ema` moves it a
little with every update (arXiv 2602.04417), and a rollout is scored by what it is at the rollout's start.
"""

import dataclasses

from rpg_jax import InputError
from rpg_jax.types import Checkpoint

MODES = ("iterative", "every", "kl_target", "ema", "fixed")


@dataclasses.dataclass(frozen=True)
class ReferenceSchedule:
    """One of `MODES`, with the setting that the modes of these names need."""

    mode: str = "iterative"
    every: int | None = None  # optimizer updates, at whose multiples the reference is renewed
    kl_target: float | None = None  # nats; the reference is renewed once `TrainState.kl_average` is larger
    decay: float | None = None  # of the moving average ema, an optimizer update

    def __post_init__(self):
        if self.mode not in MODES:
            raise InputError(f"unknown reference.mode {self.mode!r}; known: {', '.join(MODES)}")
        for name, mode in (("every", "every"), ("kl_target", "kl_target"), ("decay", "ema")):
            value = getattr(self, name)
            if (value is not None) != (self.mode == mode):
                needs = "must be given" if value is None else "cannot matter and must be left unset"
                raise InputError(f"reference.{name} {needs} with reference.mode={self.mode}")

    def is_due(self, checkpoint: Checkpoint) -> bool:
        """Whether the coming rollout gets a new reference; reads scalars from the device."""
        state, reference = checkpoint.state, checkpoint.reference
        if self.every is not None and reference is not None:
            return int(state.step) // self.every > int(reference.version) // self.every
        # An infinite KL makes the average infinite, then NaN; renewal sets it to zero.
        return self.kl_target is not None and not float(state.kl_average) <= self.kl_target

    def age(self, checkpoint: Checkpoint) -> float:
        """Optimizer updates since the reference was renewed; the mean age 1 / (1 − decay) of what ema averages."""
        if self.decay is not None:
            return 1 / (1 - self.decay)
        assert checkpoint.reference is not None, "iterative has no policy whose age could be told"
        return int(checkpoint.state.step) - int(checkpoint.reference.version)
