"""What `verify` examines: every objective of ours, or a function of the user's, each with the target that it claims."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rpg_jax import InputError, objectives
from rpg_jax.exact.batches import COUNTS, entangled, miscounted
from rpg_jax.exact.certify import VERDICTS, Gap, Target, examine, worst
from rpg_jax.exact.enumeration import CONDITIONS, FAR, LARGE, MIXTURES, MOVED, Condition
from rpg_jax.objectives import CLIPS, DIVERGENCES, Claim, Objective, TrustRegion, controls, own
from rpg_jax.objectives.advantages import kl_penalty, to_go
from rpg_jax.objectives.divergences import ALPHA
from rpg_jax.objectives.objective import BIASED, EXACT_MEAN
from rpg_jax.objectives.registry import ALWAYS, IN_EXPECTATION, NEVER, RPG_FORMS, of_function
from rpg_jax.objectives.settings import checked

PROBLEMS = 6  # random problems in each situation
BETA = 0.3  # large enough that a wrong regularizer shows
NO_DEFAULT = {"cispo": dict(clip_high=0.28)}  # settings that must be given
MASSES = (1.0, 0.5, 2.0)  # of the reference, for the forms that take an unnormalized one
# Groups of situations by name; those of the table need none.
GROUPS = {"": CONDITIONS, **{str(moved): (moved,) for moved in MOVED}, "far ratios": FAR, "large advantages": LARGE}


class Case(NamedTuple):
    """Losses that share a line of the table: one form, at every mass Z of the reference."""

    name: str
    divergence: str
    estimator: str
    clip: str
    level: str
    members: tuple[tuple[Callable, Target], ...]
    declares: Claim | None
    mixture: str | None = None  # one of `MIXTURES`: which log-probs, where different policies drew a sequence's tokens
    companion: int = 0  # how many others each sequence is in a batch with
    mixes: tuple[str, ...] = ()  # what a gradient depends on beside its own inputs, in words
    faults: tuple[str, ...] = ()  # what no declaration allows


class Finding(NamedTuple):
    """What enumeration says of a case: for each member, (space name, condition) -> a Gap of each problem."""

    case: Case
    gaps: list[dict[tuple[str, Condition], list[Gap]]]

    def verdict(self, on_policy: bool) -> Gap:
        """The worst of all situations: the gap of `seen`."""
        return self.seen(on_policy)[1]

    def seen(self, on_policy: bool) -> tuple[str, Gap]:
        """Where the worst verdict of all situations is, a name of `GROUPS`, and its gap, worst over masses, spaces,
        references and problems: those of `CONDITIONS` if they have that verdict, else the largest of the others."""
        found = []
        for name, group in GROUPS.items():
            if gaps := [gap for c in group if c.on_policy == on_policy for gap in self.at(c)]:
                found.append((name, worst(gaps)))
        return max(found, key=lambda pair: (VERDICTS.index(pair[1].verdict), not pair[0], pair[1].expected))

    def at(self, condition: Condition) -> list[Gap]:
        """Of every member, space and problem."""
        return [gap for gaps in self.gaps for (_, c), each in gaps.items() if c == condition for gap in each]

    def drift(self) -> dict[float | None, float]:
        """Distance -> bias of the median problem, of |∇J|; 0 where the verdict is exact."""
        return {
            c.distance: statistics.median(0 if gap.verdict != BIASED else gap.expected for gap in self.at(c))
            for c in MOVED
        }

    def holds(self) -> bool:
        """Whether nothing falls short of what is declared, all gradients are finite, and the case has no faults."""
        gaps = [gap for gaps in self.gaps for each in gaps.values() for gap in each]
        if self.case.faults or not all(math.isfinite(gap.per_sample) for gap in gaps):
            return False
        if self.case.declares is None:
            return True
        pairs = zip(self.case.declares, (self.verdict(True), self.verdict(False)), strict=True)
        return all(VERDICTS.index(gap.verdict) <= VERDICTS.index(claim) for claim, gap in pairs)


def find(case: Case) -> Finding:
    """Examines every member of a case; in float64."""
    mixture, companion = case.mixture, case.companion
    gaps = [examine(loss, target, PROBLEMS, mixture=mixture, companion=companion) for loss, target in case.members]
    return Finding(case, gaps)


def built_in_cases() -> list[Case]:
    """Every objective × divergence × estimator × clip × level × mass, reduced by a constant; then other reductions, and
    sequences whose tokens were drawn by different policies."""
    cases = []
    for level in ("token", "sequence"):
        for divergence in DIVERGENCES:
            for clip, estimator in RPG_FORMS:
                if isinstance(CLIPS[clip], TrustRegion) and divergence != "urkl":
                    continue  # a trust region acts beside the surrogate: one divergence says it all
                if clip == "dual_reward" and divergence not in controls.OWN:
                    continue  # the same as "dual"
                if clip == "sapo" and divergence != "urkl":
                    continue  # it acts on the reward alone
                settings = dict(divergence=divergence, estimator=estimator, clip=clip, level=level, beta=BETA)
                masses = MASSES if clip == "none" else (1.0,)
                cases.append(
                    _case("rpg", *(objectives.make("rpg", reduction="constant", z_old=z, **settings) for z in masses))
                )
    cases += _controlled_cases()
    for alpha in (-1.0, 1.5):
        loss = objectives.make("rpg", divergence="alpha", alpha=alpha, beta=BETA, reduction="constant")
        cases.append(_case(f"rpg, alpha {alpha:g}", loss))
    for divergence in ("rkl", "urkl"):  # Algorithm 1 unclipped
        bounds = dict(clip_low=1.0, clip_high=1e30, clip_c=1e30)
        loss = objectives.make("rpg", divergence=divergence, clip="dual", beta=BETA, reduction="constant", **bounds)
        cases.append(_case("rpg", loss)._replace(clip="dual, out of reach", declares=IN_EXPECTATION))
    for name, recipe in objectives.RECIPES.items():
        if name != "rpg":
            required = NO_DEFAULT.get(name, {}) | (dict(beta=BETA) if recipe.defaults.get("beta") else {})
            clips = [dict(clip=clip) for clip in recipe.clips] if "clip" in recipe.defaults else [{}]
            losses = [objectives.make(name, reduction="constant", **required, **clip) for clip in clips]
            cases += [_case(name, loss) for loss in losses]
            if losses[0].reward_beta:
                cases.append(_kl_in_reward(losses[-1]))
    for reduction in ("token_mean", "sequence_mean", "sequence_mean_token_mean"):
        cases.append(_case(f"rpg, {reduction}", objectives.make("rpg", beta=BETA, reduction=reduction)))
    for mixture, claim in zip(MIXTURES, (ALWAYS, NEVER), strict=True):
        for level in ("token", "sequence"):
            loss = objectives.make("rpg", beta=BETA, level=level, reduction="constant")
            cases.append(_case(f"rpg, two policies, {mixture}", loss)._replace(declares=claim, mixture=mixture))
    for level in ("token", "sequence"):
        cases.append(_observations_trained(objectives.make("rpg", beta=BETA, level=level, reduction="constant")))
    return cases


def _observations_trained(objective: Objective) -> Case:
    """The loss with a mask that is true on an environment's tokens as well, which is biased."""

    def loss(logp, behavior_logp, advantage, mask, *others, **more):
        exists = jax.lax.cummax(jnp.asarray(mask, jnp.int32), axis=1, reverse=True) > 0
        return objective(logp, behavior_logp, advantage, exists, *others, **more)

    case = _case("rpg, observations trained", objective)
    return case._replace(members=((loss, case.members[0][1]),), declares=NEVER)


def _controlled_cases() -> list[Case]:
    """Control variates at both levels, and divergences to go against the objective along the policy's own responses and
    against that of tokens."""
    cases = []
    for level in ("token", "sequence"):
        for control in (-0.5, "optimal"):
            loss = objectives.make(
                "rpg", divergence="rkl", control=control, level=level, beta=BETA, reduction="constant"
            )
            cases.append(_case(f"rpg, control {control}", loss)._replace(companion=int(control == "optimal")))
    to_go: dict[str, Any] = dict(kl="to_go", beta=BETA, reduction="constant")
    cases += [_case("rpg, to go", objectives.make("rpg", divergence=name, **to_go)) for name in DIVERGENCES]
    controlled = objectives.make("rpg", divergence="urkl", control=0.5, **to_go)
    cases.append(_case("rpg, to go, control 0.5", controlled))
    loss = objectives.make("rpg", divergence="urkl", **to_go)
    of_tokens = ((loss, Target("token", "urkl", BETA)),)
    cases.append(_case("rpg, to go", loss)._replace(level="token", members=of_tokens, declares=NEVER))
    return cases


def _by_row(loss: Callable) -> Callable:
    """The loss with one advantage a response, as an objective over sequences has it: the mean of the tokens'."""

    def with_means(logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None):
        mean = jnp.sum(jnp.where(mask, advantage, 0), axis=1, keepdims=True) / jnp.sum(mask, axis=1, keepdims=True)
        return loss(logp, behavior_logp, mean, mask, reference_logp, weight, denominator)

    return with_means


def _kl_in_reward(objective: Objective) -> Case:
    """The loss, with its KL taken out of the reward: on policy that is the gradient of `rkl` over sequences."""

    def loss(logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None):
        penalty = kl_penalty(behavior_logp, reference_logp, mask, objective.reward_beta)
        mean = jnp.sum(jnp.where(mask, advantage, 0), axis=1, keepdims=True) / jnp.sum(mask, axis=1, keepdims=True)
        cost = penalty.sum(axis=1, keepdims=True) if objective.level == "sequence" else to_go(penalty)
        return objective(logp, behavior_logp, mean - cost, mask, reference_logp, weight, denominator)

    case = _case(f"{objective.name}, KL in the reward", objective)
    target = Target("sequence", "rkl", objective.reward_beta)
    return case._replace(divergence="rkl", members=((loss, target),), declares=Claim(EXACT_MEAN, BIASED))


def _case(name: str, *losses: Objective) -> Case:
    first, get = losses[0], losses[0].settings.get
    level = first.target_level
    alpha = get("alpha") or ALPHA
    members = tuple(
        (loss if level == loss.level else _by_row(loss), Target(level, loss.divergence, loss.beta, loss.z_old, alpha))
        for loss in losses
    )
    return Case(
        name, first.divergence or "-", get("estimator") or "-", get("clip") or "-", level, members, first.declares
    )


def user_case(spec: str, facts: Mapping[str, Any]) -> Case:
    """A user's function FILE.py:NAME and what it is held against: `facts`, then its own settings or attributes.

    Raises ValueError: there is no such function, its signature is another one, or facts that make no sense.
    """
    function = own.load(spec)
    settings = own.settings_of(function)
    settings |= {name: value for name, value in facts.items() if name in settings}
    complete = checked(own.facts_of(function, settings) | dict(facts))
    made = of_function(spec, function, {name: settings[name] for name in facts if name in settings})
    divergence, level, beta = (complete[name] for name in ("divergence", "level", "beta"))
    if (divergence is None) != (not beta):
        raise InputError(
            f"{spec} has divergence {divergence} and beta {beta}: give both (--divergence, --beta) or neither"
        )
    target, by, counted = Target(level, divergence, beta, complete["z_old"]), entangled(made), miscounted(made)
    mixes = [f"mixes rows: three have other gradients in one call than in three, from {by.rows}"] if by.rows else []
    mixes += [f"mixes tokens: a token's gradient depends on {by.tokens}"] if by.tokens else []
    faults = [f"a gradient depends on {by.padding}"] if by.padding else []
    faults += [f"reduction {made.reduction!r}: {counted}"] if counted else []
    case = Case(spec, divergence or "-", "-", "-", level, ((made, target),), complete["declares"])
    return case._replace(companion=2 if by.rows else 0, mixes=tuple(mixes), faults=tuple(faults))


def reduction_faults() -> dict[str, str]:
    """Reduction -> what is wrong with the number that it divides by, of those of ours that have one."""
    forms = [dict(reduction=name) for name in COUNTS] + [dict(level="sequence")]
    losses = [objectives.make("rpg", **settings) for settings in forms]
    return {loss.reduction: fault for loss in losses if (fault := miscounted(loss))}


def unfinite(loss: Callable) -> str | None:
    """Says whether a loss or its gradient is NaN or infinite for finite inputs, off policy or on it; else None.

    Such a loss has no bias to measure. Call it with x64 enabled.
    """
    rng = np.random.default_rng(0)
    logp, behavior_logp, reference_logp = -rng.exponential(size=(3, 3, 4))
    advantage, one = rng.normal(size=logp.shape), np.ones_like(logp)
    for where, behavior, reference in (("", behavior_logp, reference_logp), (", on policy", logp, logp)):
        of_policy = jax.value_and_grad(
            lambda x, *others: loss(x, others[0], advantage, one > 0, others[1], one, 3.0)[0]
        )
        for name, array in zip(("loss", "gradient"), of_policy(logp, behavior, reference), strict=True):
            if not np.isfinite(array).all():
                return f"the {name} is {'NaN' if np.isnan(array).any() else 'infinite'} for finite inputs{where}"
    return None
