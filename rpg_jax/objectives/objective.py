"""What every loss does around its surrogate, once: checks, promotion, masking, levels, reduction, metrics."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax.objectives import metrics as metric
from rpg_jax.objectives import reductions
from rpg_jax.objectives.advantages import ADVANTAGES, kl_penalty
from rpg_jax.objectives.baselines import k3
from rpg_jax.objectives.clips import Clipped
from rpg_jax.objectives.corrections import truncated_importance_weight

EXACT = "exact per sample"
EXACT_MEAN = "exact in expectation"
BIASED = "biased"


class Claim(NamedTuple):
    """What a gradient is declared to be, each one of EXACT, EXACT_MEAN, BIASED; held to it by `rpg_jax.verify`."""

    on_policy: str  # where policy = behavior
    off_policy: str


class Batch(NamedTuple):
    """Arrays of one shape: [B, T] for tokens, [B, 1] for sequences. Finite wherever masked."""

    logp: jax.Array
    behavior_logp: jax.Array
    reference_logp: jax.Array
    advantage: jax.Array
    weight: jax.Array
    mask: jax.Array  # bool


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Objective(abc.ABC):
    """A loss with its settings resolved; made by `make`.

    settings: all of them by name, `advantage` and `sampler_correction` among them. level, divergence, beta, z_old:
    those of the objective whose gradient it estimates (divergence None: reward only). reward_beta: coefficient of the
    KL to the reference that `advantages` takes out of the reward. declares: None if nothing is.
    """

    name: str
    settings: Mapping[str, Any]
    level: str
    reduction: str
    divergence: str | None
    beta: float
    z_old: float
    reward_beta: float = 0.0
    declares: Claim | None

    def __call__(
        self, logp: jax.Array, behavior_logp: jax.Array, advantage: jax.Array, mask: jax.Array,
        reference_logp: jax.Array | None = None, weight: jax.Array | None = None, denominator: ArrayLike | None = None,
    ) -> tuple[jax.Array, metric.Metrics]:  # fmt: skip
        """Loss to minimize, and metrics.

        Args:
          logp: [B, T] log-probs of the current policy, the only input that gradients reach; column t describes token t.
          behavior_logp: [B, T] of the policy that sampled.
          advantage: [B, T] or [B, 1]. At level "sequence" its masked row mean is used.
          mask: [B, T], nonzero on the tokens that count. Elsewhere the inputs may hold anything, NaN included.
          reference_logp: [B, T] of the (normalized) reference policy; None: the behavior policy is the reference.
          weight: [B, T] or [B, 1], a constant correction that multiplies each token's loss; None: 1. At level
            "sequence" a row has one, its masked row mean: give the sequence's own correction as [B, 1].
          denominator: scalar that replaces the reduction's own count (`self.count`), so that microbatch losses add up.

        Returns:
          loss: scalar, float32, or float64 if an input is.
          metrics: name -> `metrics.Mean`, `Max` or `EffectiveSampleSize`. Clip fractions (if the objective has a clip
            of ours), ratio and effective sample size are over what the level counts (tokens, or rows);
            `off_policy_gap`, |log policy − log behavior|, and the k1, k2, k3 estimators always over tokens.

        Raises:
          ValueError: a shape that does not fit, or no denominator for reduction "constant".
        """
        return self.measured_loss(prepare(logp, behavior_logp, advantage, mask, reference_logp, weight), denominator)

    @property
    def advantage(self) -> str:
        """The name of its advantage in `ADVANTAGES`."""
        return self.settings["advantage"]

    @property
    def sampler_correction(self) -> float | None:
        """The cap of truncated importance sampling; None: no correction."""
        return self.settings["sampler_correction"]

    @abc.abstractmethod
    def measured_loss(self, tokens: Batch, denominator: ArrayLike | None) -> tuple[jax.Array, metric.Metrics]:
        """The loss and the metrics of what `prepare` returns."""

    def count(self, mask: jax.Array) -> jax.Array:
        """The reduction's own denominator for mask [B, T], i32[]; ValueError for "constant", which has none."""
        return reductions.count(self.reduction, mask)

    def advantages(
        self, rewards: jax.Array, behavior_logp: jax.Array, reference_logp: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """The advantages that setting `advantage` names, over a whole batch of B = P·G responses, problem-major.

        Args:
          rewards: [P, G], G responses to each of P prompts; behavior_logp, reference_logp, mask: [B, T].

        Returns:
          [B, 1], or [B, T] for those that differ from token to token.
        """
        penalty = kl_penalty(behavior_logp, reference_logp, mask, self.reward_beta)
        return ADVANTAGES[self.advantage](rewards, penalty, mask)

    def corrections(
        self, behavior_logp: jax.Array, sampler_logp: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, metric.Metrics]:
        """(weight [B, T], metrics): truncated importance sampling for the gap between the sampler and the trainer.

        All [B, T]; per response at level "sequence". Ones and no metrics where `sampler_correction` is unset.
        """
        cap = self.sampler_correction
        if cap is None:
            return jnp.ones_like(behavior_logp), {}
        weight, cut = truncated_importance_weight(behavior_logp, sampler_logp, mask, cap, self.level)
        return weight, {
            "sampler_correction": metric.mean_of(weight, mask),
            "sampler_correction_clip_fraction": metric.mean_of(cut.astype(weight.dtype), mask),
        }


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SurrogateObjective(Objective):
    """A reduction over per-entry losses: every objective of ours.

    units: Batch of tokens -> Batch of what `surrogate` counts (`as_tokens`, `as_sequences`, `as_mean_tokens`).
    surrogate: (logp, behavior_logp, reference_logp, advantage) -> per-entry losses, and where they were clipped.
    """

    units: Callable[[Batch], Batch]
    surrogate: Callable[..., tuple[jax.Array, Clipped]]

    def measured_loss(self, tokens: Batch, denominator: ArrayLike | None) -> tuple[jax.Array, metric.Metrics]:
        units = self.units(tokens)
        losses, clipped = self.surrogate(*units[:4])
        loss = reductions.reduce(self.reduction, losses * units.weight, units.mask, denominator)
        return loss, clip_fractions(clipped, units) | measure(tokens, units)


def prepare(
    logp: jax.Array, behavior_logp: jax.Array, advantage: jax.Array, mask: jax.Array,
    reference_logp: jax.Array | None = None, weight: jax.Array | None = None,
) -> Batch:  # fmt: skip
    """Checks, promotes to one dtype of at least float32, zeroes what is masked, and stops gradients on all but logp."""
    logp = jnp.asarray(logp)
    reference_logp = behavior_logp if reference_logp is None else reference_logp
    arrays = dict(behavior_logp=behavior_logp, reference_logp=reference_logp, advantage=advantage)
    arrays["weight"] = jnp.ones((), logp.dtype) if weight is None else weight
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    mask = jnp.asarray(mask)
    if logp.ndim != 2:
        raise ValueError(f"logp has shape {logp.shape}; expected [B, T], one sequence a row")
    rows = (logp.shape[0], 1)
    for name, array in {**arrays, "mask": mask}.items():
        by_row = name in ("advantage", "weight")
        if array.shape == logp.shape or (by_row and array.shape == rows) or (name == "weight" and weight is None):
            continue
        expected = f"{logp.shape}, that of logp" + (f", or {rows}" if by_row else "")
        raise ValueError(f"{name} has shape {array.shape}; expected {expected}")
    dtype = jnp.result_type(jnp.float32, logp.dtype, *(array.dtype for array in arrays.values()))
    mask = mask.astype(bool)

    def clean(array):
        return jnp.where(mask, array.astype(dtype), 0)

    constants = {name: jax.lax.stop_gradient(clean(array)) for name, array in arrays.items()}
    return Batch(logp=clean(logp), mask=mask, **constants)


def as_tokens(tokens: Batch) -> Batch:
    """Tokens as units."""
    return tokens


def as_mean_tokens(tokens: Batch) -> Batch:
    """Rows as units, [B, 1], everything a masked row mean: w is the geometric mean of the tokens' ratios."""
    length = jnp.maximum(jnp.sum(tokens.mask, axis=1, keepdims=True), 1).astype(tokens.logp.dtype)
    means = Batch(*(jnp.sum(x, axis=1, keepdims=True) / length for x in tokens))
    return means._replace(mask=jnp.any(tokens.mask, axis=1, keepdims=True))


def as_sequences(tokens: Batch) -> Batch:
    """Rows as units, [B, 1]: log-probs are masked sums, advantage and weight masked row means (no length in w)."""
    sums = {name: jnp.sum(getattr(tokens, name), axis=1, keepdims=True) for name in Batch._fields[:3]}
    return as_mean_tokens(tokens)._replace(**sums)


UNITS = {"token": as_tokens, "sequence": as_sequences}  # by level


def clip_fractions(clipped: Clipped, units: Batch) -> metric.Metrics:
    """Metrics that say where the clip was: shares of units."""
    fractions = {"clip_fraction": clipped.anywhere}
    fractions |= {f"clip_fraction_{name}": where for name, where in clipped._asdict().items()}
    return {name: metric.mean_of(x.astype(units.logp.dtype), units.mask) for name, x in fractions.items()}


def measure(tokens: Batch, units: Batch) -> metric.Metrics:
    """Metrics of a batch and no gradients; `units` is `tokens`, or its rows at level "sequence"."""
    tokens, units = jax.lax.stop_gradient((tokens, units))
    log_w = units.logp - units.behavior_logp
    metrics: metric.Metrics = {
        "ratio_mean": metric.mean_of(jnp.exp(log_w), units.mask),
        "ratio_max": metric.max_of(jnp.exp(log_w), units.mask),
        "effective_sample_size": metric.effective_sample_size(log_w, units.mask),
    }
    to_reference = tokens.reference_logp - tokens.logp
    to_behavior = tokens.behavior_logp - tokens.logp
    metrics["off_policy_gap"] = metric.mean_of(jnp.abs(to_behavior), tokens.mask)
    for name, log_y in (("kl_behavior", to_behavior), ("kl_reference", to_reference)):
        for estimator, x in (("k1", -log_y), ("k2", 0.5 * log_y**2), ("k3", k3(log_y))):
            metrics[f"{name}_{estimator}"] = metric.mean_of(x, tokens.mask)
    # w·k3(ref / policy), what the reference schedule `kl_target` watches: estimates the reverse KL off policy too.
    metrics["kl_reference_weighted"] = metric.mean_of(jnp.exp(-to_behavior) * k3(to_reference), tokens.mask)
    return metrics
