"""What every loss has around it, once: checks, promotion, masking, levels, weights, reduction, metrics."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax import InputError
from rpg_jax.objectives import metrics as metric
from rpg_jax.objectives import reductions
from rpg_jax.objectives.advantages import ADVANTAGES, kl_penalty
from rpg_jax.objectives.baselines import k3
from rpg_jax.objectives.batch import Batch, prepare
from rpg_jax.objectives.clips import Clipped
from rpg_jax.objectives.controls import OF_TOKEN
from rpg_jax.objectives.divergences import Divergence

EXACT = "exact per sample"
EXACT_MEAN = "exact in expectation"
BIASED = "biased"


class Claim(NamedTuple):
    """What a gradient is declared to be, each one of EXACT, EXACT_MEAN, BIASED; held to it by `rpg_jax.verify`."""

    on_policy: str  # where policy = behavior
    off_policy: str


INPUTS = ("log_ratio", "advantage", "logp", "behavior_logp", "reference_logp")  # of which a loss names what it takes
ARRAYS = (jax.Array, *get_args(ArrayLike))  # a tracer is an instance of the first alone


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Objective:
    """A loss of an entry with its settings resolved, and all that is done around it once; made by `make`.

    loss: a function as in `baselines`: what it names of `INPUTS` -> the loss of every entry, alone or with where it was
    clipped, or with a dict of arrays to be logged. units: Batch of tokens -> Batch of the entries (`batch.UNITS`,
    `as_mean_tokens`). settings: all of them by name, `advantage` and `sampler_correction` among them.
    level, divergence, beta, z_old: those of the objective whose gradient it estimates (divergence None: reward only).
    reward_beta: coefficient of the KL to the reference that `advantages` takes out of the reward. declares: None if
    nothing is. full_kl: the divergence over the whole vocabulary that a call wants for each token, None if it wants
    none. control: (tokens, units) -> advantage of the units, where a control variate or KL-to-go is part of it.
    region: (units, tokens) -> the weights of units and which are dead, where the clip is a `TrustRegion`.
    own_advantage: what `own.advantage` makes of a user's function, where `advantage` names one. measured: whether a
    call gives metrics.
    """

    name: str
    loss: Callable[..., Any]
    units: Callable[[Batch], Batch]
    settings: Mapping[str, Any]
    level: str
    reduction: str
    divergence: str | None
    beta: float
    z_old: float
    reward_beta: float = 0.0
    declares: Claim | None
    full_kl: Divergence | None = None
    control: Callable[[Batch, Batch], jax.Array] | None = None
    region: Callable[[Batch, Batch], tuple[jax.Array, Clipped]] | None = None
    own_advantage: Callable[..., jax.Array] | None = None
    measured: bool = True

    def __post_init__(self):
        if self.level == "sequence" and self.reduction not in ("sequence_mean", "constant"):  # one entry a row
            raise InputError(
                f"reduction={self.reduction!r} averages tokens; level='sequence' takes sequence_mean or constant"
            )

    def __call__(
        self, logp: jax.Array, behavior_logp: jax.Array, advantage: jax.Array, mask: jax.Array,
        reference_logp: jax.Array | None = None, weight: jax.Array | None = None, denominator: ArrayLike | None = None,
        full_kl: jax.Array | None = None,
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
          full_kl: [B, T], with kl="full" only: `divergences.full_vocabulary` of each token's distribution, the other
            input that gradients reach. beta times its reduction is added to the loss.

        Returns:
          loss: scalar, float32, or float64 if an input is.
          metrics: name -> `metrics.Mean`, `Max` or `EffectiveSampleSize`. Clip fractions (if the objective has a clip
            of ours), ratio and effective sample size are over what the level counts (tokens, or rows);
            `off_policy_gap`, |log policy − log behavior|, and the k1, k2, k3 estimators always over tokens.

        Raises:
          ValueError: a shape that does not fit, no denominator for reduction "constant", or no full_kl for kl="full".
        """
        tokens = prepare(logp, behavior_logp, advantage, mask, reference_logp, weight)
        losses, units, logged = self.entries(tokens)
        loss = reductions.reduce(self.reduction, losses * units.weight, units.mask, denominator)
        metrics: metric.Metrics = {}
        if self.measured:  # ours win: the reference schedule reads one
            metrics = of_logged(logged, units) | measure(tokens, units)
        if self.full_kl is None:
            return loss, metrics
        if full_kl is None or full_kl.shape != tokens.logp.shape:
            raise InputError(f"kl='full' needs full_kl of shape {tokens.logp.shape}, each token's whole divergence")
        penalty = jnp.where(tokens.mask, full_kl.astype(tokens.logp.dtype), 0)
        loss += self.beta * reductions.reduce(self.reduction, penalty, tokens.mask, denominator)
        return loss, metrics | {"kl_reference_full": metric.mean_of(jax.lax.stop_gradient(penalty), tokens.mask)}

    def entries(self, tokens: Batch) -> tuple[jax.Array, Batch, Any]:
        """(Loss of every unit before weight and reduction, the units, what is logged: a `Clipped`, or a dict)."""
        units = self.units(tokens)
        if self.control is not None:
            units = units._replace(advantage=self.control(*jax.lax.stop_gradient((tokens, units))))
        if self.region is None:
            losses, logged = of_entries(self.loss, units, self.name)
        else:  # a dead unit's ratio may be too large for a float, so its loss is computed at the ratio 1
            kept, logged = self.region(units, tokens)
            alive = units._replace(logp=jnp.where(kept == 0, units.behavior_logp, units.logp))
            losses = jnp.where(kept == 0, 0, kept * of_entries(self.loss, alive, self.name)[0])
        return losses, units, logged

    @property
    def advantage(self) -> str:
        """The name of its advantage in `ADVANTAGES`, or FILE.py:NAME."""
        return self.settings["advantage"]

    @property
    def sampler_correction(self) -> float | None:
        """The cap of truncated importance sampling; None: no correction."""
        return self.settings["sampler_correction"]

    def count(self, mask: jax.Array) -> jax.Array:
        """The reduction's own denominator for mask [B, T], i32[]; ValueError for "constant", which has none."""
        return reductions.count(self.reduction, mask)

    def advantages(
        self, rewards: jax.Array, behavior_logp: jax.Array, reference_logp: jax.Array, mask: jax.Array,
        step: ArrayLike = 0, turn_reward: jax.Array | None = None, kl: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """The advantages that setting `advantage` names, over a whole batch of B = P·G responses, problem-major.

        Args:
          rewards: [P, G], G responses to each of P prompts; behavior_logp, reference_logp, mask: [B, T].
          step: i32[], the optimizer updates so far, for a user's function.
          turn_reward: [P, G, K], the rewards of an episode's turns, which `rewards` contain; zeros beyond the last.
          kl: [B, T], KL(behavior, reference) of each token's whole distribution, which control="kl" adds, times beta.

        Returns [B, 1], or [B, T] for those that differ from token to token.

        Raises:
          ValueError: the rewards do not fit, or there is no kl for control="kl".
        """
        penalty = kl_penalty(behavior_logp, reference_logp, mask, self.reward_beta)
        function = self.own_advantage or ADVANTAGES[self.advantage]
        known = dict(step=step, turn_reward=turn_reward)
        takes = inspect.signature(function).parameters
        advantage = function(rewards, penalty, mask, **{name: x for name, x in known.items() if name in takes})
        if self.settings.get("control") != OF_TOKEN:
            return advantage
        if kl is None:
            raise InputError("control='kl' needs kl, the KL of each token's whole distribution")
        return advantage + self.beta * kl

    def try_out(self, shape: tuple[int, int]) -> None:
        """Traces loss and gradient at that shape, and computes nothing: a user's function raises what it raises."""
        array, mask = (jax.ShapeDtypeStruct(shape, dtype) for dtype in ("float32", bool))
        loss = jax.value_and_grad(functools.partial(self, denominator=1.0), has_aux=True)
        jax.eval_shape(loss, array, array, array, mask, full_kl=None if self.full_kl is None else array)

    def corrections(
        self, behavior_logp: jax.Array, sampler_logp: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, metric.Metrics]:
        """(weight, metrics): truncated importance sampling, min(behavior / sampler, cap) (Ionides 2008; "TIS" in verl).

        The trainer and the sampler compute the probabilities of the same parameters differently (precision, kernels,
        batching); samples come from the sampler, and objectives are written for the behavior policy. All [B, T], ratios
        those of tokens, at level "sequence" of responses. Ones and no metrics where `sampler_correction` is unset.
        """
        cap = self.sampler_correction
        if cap is None:
            return jnp.ones_like(behavior_logp), {}
        log_ratio = jnp.where(mask, behavior_logp - sampler_logp, 0)
        if self.level == "sequence":
            log_ratio = jnp.broadcast_to(jnp.sum(log_ratio, axis=1, keepdims=True), log_ratio.shape)
        cut = log_ratio > jnp.log(cap)
        weight = jnp.where(cut, cap, jnp.exp(log_ratio)).astype(log_ratio.dtype)
        return weight, {
            "sampler_correction": metric.mean_of(weight, mask),
            "sampler_correction_clip_fraction": metric.mean_of(cut.astype(weight.dtype), mask),
        }


def of_entries(loss: Callable[..., Any], units: Batch, name: str) -> tuple[jax.Array, Any]:
    """(loss of every unit, what is to be logged), from what a loss names of `INPUTS`; ValueError if it is neither."""
    inputs = {**units._asdict(), "log_ratio": units.logp - units.behavior_logp}
    names = inspect.signature(loss).parameters
    result = loss(**{key: inputs[key] for key in INPUTS if key in names})
    returned = result if isinstance(result, tuple) and len(result) == 2 else (result,)
    losses, logged = (*returned, {})[:2]
    if not of_floats(losses, units.logp.shape) or not isinstance(logged, Mapping | Clipped):
        expected = f"the loss of every entry, floats {list(units.logp.shape)}, alone or with a dict of arrays"
        raise InputError(f"{name} returns {' and '.join(map(described, returned))}; expected {expected}")
    for key, value in logged.items() if isinstance(logged, Mapping) else ():
        is_real = isinstance(value, ARRAYS) and not jnp.iscomplexobj(value)
        if not isinstance(key, str) or not (is_real or metric.is_metric(value)):
            raise InputError(f"{name} logs {described(value)} as {key!r}; expected real arrays, under names")
    return losses, logged


def described(value: Any) -> str:
    """What a user's function returned, in a line: float32[2, 3] of an array, else its type."""
    is_array = isinstance(value, ARRAYS)
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}" if is_array else f"a {type(value).__name__}"


def of_floats(value: Any, *shapes: tuple[int, ...]) -> bool:
    """Whether it is an array of floats with one of the shapes."""
    is_array = isinstance(value, ARRAYS) and jnp.shape(value) in shapes
    return is_array and jnp.issubdtype(jnp.result_type(value), jnp.floating)


def of_logged(logged: Mapping[str, Any] | Clipped, units: Batch) -> metric.Metrics:
    """Metrics of arrays: means over what the mask leaves of the units, of booleans their share."""
    if isinstance(logged, Clipped):
        clipped = {"clip_fraction": logged.anywhere} | {f"clip_fraction_{x}": y for x, y in logged._asdict().items()}
        logged = {name: where.astype(units.logp.dtype) for name, where in clipped.items()}

    def averaged(x: Any) -> metric.Metric:
        mask = units.mask if jnp.shape(x) == units.mask.shape else None
        return metric.mean_of(jax.lax.stop_gradient(x), mask)

    return {name: x if metric.is_metric(x) else averaged(x) for name, x in logged.items()}


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
