"""The forms that `python -m rpg_jax.verify` examines: every objective of ours, each with the target that it claims."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rpg_jax import objectives
from rpg_jax.exact import Target
from rpg_jax.exact.batches import COUNTS, miscounted
from rpg_jax.exact.enumeration import MIXTURES
from rpg_jax.exact.verification import Case
from rpg_jax.objectives import CLIPS, DIVERGENCES, Claim, Objective, TrustRegion, controls
from rpg_jax.objectives.advantages import kl_penalty, to_go
from rpg_jax.objectives.divergences import ALPHA
from rpg_jax.objectives.objective import BIASED, EXACT_MEAN
from rpg_jax.objectives.registry import ALWAYS, IN_EXPECTATION, NEVER, RPG_FORMS

BETA = 0.3  # large enough that a wrong regularizer shows
NO_DEFAULT = {"cispo": dict(clip_high=0.28)}  # settings that must be given
MASSES = (1.0, 0.5, 2.0)  # of the reference, for the forms that take an unnormalized one


def built_in_cases() -> list[Case]:
    """Every objective × divergence × estimator × clip × level × mass, reduced by a constant; then other reductions, and
    sequences whose tokens were drawn by different policies."""
    cases = []
    for level in ("token", "sequence"):
        for divergence in DIVERGENCES:
            for clip, estimator in RPG_FORMS:
                if (isinstance(CLIPS[clip], TrustRegion) or clip == "sapo") and divergence != "urkl":
                    continue  # what acts beside the surrogate, or on the reward alone: one divergence says it all
                if clip == "dual_reward" and divergence not in controls.OWN:
                    continue  # the same as "dual"
                settings = dict(divergence=divergence, estimator=estimator, clip=clip, level=level, beta=BETA)
                masses = MASSES if clip == "none" else (1.0,)
                cases.append(_case("rpg", *(_make("rpg", z_old=z, **settings) for z in masses)))
    cases += _controlled_cases()
    for alpha in (-1.0, 1.5):
        loss = _make("rpg", divergence="alpha", alpha=alpha, beta=BETA)
        cases.append(_case(f"rpg, alpha {alpha:g}", loss))
    for divergence in ("rkl", "urkl"):  # Algorithm 1 unclipped
        bounds = dict(clip_low=1.0, clip_high=1e30, clip_c=1e30)
        loss = _make("rpg", divergence=divergence, clip="dual", beta=BETA, **bounds)
        cases.append(_case("rpg", loss)._replace(clip="dual, out of reach", declares=IN_EXPECTATION))
    for name, recipe in objectives.RECIPES.items():
        if name != "rpg":
            required = NO_DEFAULT.get(name, {}) | (dict(beta=BETA) if recipe.defaults.get("beta") else {})
            clips = [dict(clip=clip) for clip in recipe.clips] if "clip" in recipe.defaults else [{}]
            losses = [_make(name, **required, **clip) for clip in clips]
            cases += [_case(name, loss) for loss in losses]
            if losses[0].reward_beta:
                cases.append(_kl_in_reward(losses[-1]))
    for reduction in ("token_mean", "sequence_mean", "sequence_mean_token_mean"):
        cases.append(_case(f"rpg, {reduction}", _make("rpg", beta=BETA, reduction=reduction)))
    for mixture, claim in zip(MIXTURES, (ALWAYS, NEVER), strict=True):
        for level in ("token", "sequence"):
            loss = _make("rpg", beta=BETA, level=level)
            cases.append(_case(f"rpg, two policies, {mixture}", loss)._replace(declares=claim, mixture=mixture))
    for level in ("token", "sequence"):
        cases.append(_observations_trained(_make("rpg", beta=BETA, level=level)))
    return cases


def _make(name: str, **settings: Any) -> Objective:
    """An objective, reduced by a constant unless they say otherwise, without the metrics that nobody reads here."""
    return dataclasses.replace(objectives.make(name, **dict(reduction="constant") | settings), measured=False)


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
            loss = _make("rpg", divergence="rkl", control=control, level=level, beta=BETA)
            cases.append(_case(f"rpg, control {control}", loss)._replace(companion=int(control == "optimal")))
    to_go: dict[str, Any] = dict(kl="to_go", beta=BETA)
    cases += [_case("rpg, to go", _make("rpg", divergence=name, **to_go)) for name in DIVERGENCES]
    cases.append(_case("rpg, to go, control 0.5", _make("rpg", divergence="urkl", control=0.5, **to_go)))
    loss = _make("rpg", divergence="urkl", **to_go)
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
    level, alpha = first.level, get("alpha") or ALPHA
    if get("kl") == "to_go" and first.beta:  # the sum of tokens' divergences along the policy's own responses
        level = "sequence" if first.divergence in ("rkl", "urkl") else "path"
    members = tuple(
        (loss if level == loss.level else _by_row(loss), Target(level, loss.divergence, loss.beta, loss.z_old, alpha))
        for loss in losses
    )
    return Case(
        name, first.divergence or "-", get("estimator") or "-", get("clip") or "-", level, members, first.declares
    )


def reduction_faults() -> dict[str, str]:
    """Reduction -> what is wrong with the number that it divides by, of those of ours that have one."""
    forms = [dict(reduction=name) for name in COUNTS] + [dict(level="sequence")]
    losses = [objectives.make("rpg", **settings) for settings in forms]
    return {loss.reduction: fault for loss in losses if (fault := miscounted(loss))}
