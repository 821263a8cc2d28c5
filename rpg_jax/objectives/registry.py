"""`make(name, **settings)`: every objective by name, its settings checked.

A recipe holds the defaults of its settings (None: unset, or resolved from the others) and a function that turns
settings into an `Objective`. To add a baseline, write its loss in `baselines` and add a line to `RECIPES`.
"""

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from rpg_jax.objectives import baselines, own, surrogates
from rpg_jax.objectives.advantages import ADVANTAGES
from rpg_jax.objectives.divergences import DIVERGENCES, Divergence
from rpg_jax.objectives.objective import (
    BIASED,
    EXACT,
    EXACT_MEAN,
    UNITS,
    Claim,
    Objective,
    SurrogateObjective,
    as_mean_tokens,
    as_sequences,
    as_tokens,
)
from rpg_jax.objectives.reductions import BY_LEVEL, REDUCTIONS


class Recipe(NamedTuple):
    build: (
        Callable  # (name, settings, given) -> Objective; settings are complete, given holds those that the caller set
    )
    defaults: dict
    clips: tuple = ("ppo", "none")


def make(name: str, **settings) -> Objective:
    """Builds an objective; `RECIPES[name].defaults` lists its settings. A setting that is None is unset.

    make("rpg", divergence="fkl|rkl|ufkl|urkl|js|hellinger", estimator="differentiable|reinforce", beta=1e-4,
         clip="none|rpg|dual|truncate", clip_low=0.2, clip_high=0.28, clip_c=3.0, level="token|sequence",
         reduction="token_mean|sequence_mean|sequence_mean_token_mean|constant", z_old=1.0)
    make("grpo", beta=0.04, clip="ppo|none", clip_low=0.2, clip_high=0.2, reduction="sequence_mean_token_mean"), and
    so on for the other `RECIPES`.

    Unset, rpg's divergence is urkl, its clip none, its estimator reinforce (differentiable for clip="dual"), its
    reduction token_mean (sequence_mean for level="sequence").

    make("FILE.py:NAME", ...) is a function of one's own (`own`), with its keyword-only parameters as settings.

    Every objective takes `advantage`, a name of `ADVANTAGES` whose default is its paper's, for `Objective.advantages`,
    and `sampler_correction`, the cap of truncated importance sampling, for `Objective.corrections`.

    Raises:
      ValueError: an unknown name or setting, a value out of range, a combination refused in docs/method.md 4.3, what
        cannot matter given the others, or one without a default that is missing.
    """
    if ":" in name:
        return of_function(name, own.load(name), settings)
    if name not in RECIPES:
        known = f"known: {', '.join(RECIPES)}, and FILE.py:NAME"
        raise ValueError(f"unknown objective {name!r}{_nearest(name, RECIPES)}; {known}")
    recipe = RECIPES[name]
    _refuse_unknown(name, settings, recipe.defaults)
    checks = {**CHECKS, "clip": functools.partial(_choice, recipe.clips)}
    given = {key: checks[key](key, value) for key, value in settings.items() if value is not None}
    return recipe.build(name, {**recipe.defaults, **given}, given)


def _refuse_unknown(name, settings, known):
    for key in settings:
        if key not in known:
            has = f"objective {name!r} has no setting {key!r}{_nearest(key, known)}; it has: {', '.join(known)}"
            others = any(key in recipe.defaults for recipe in RECIPES.values())
            raise ValueError(has + (f"; leave {key} unset (--config.objective.{key}=)" if others else ""))


def of_function(spec, function, settings) -> Objective:
    """A function of one's own as an objective, see `own`; an `Objective` is one, and has settled all but two settings.

    Raises ValueError as `make` does.
    """
    settled = isinstance(function, Objective)
    known = {} if settled else own.settings_of(function)
    known = {**known, "advantage": None, "sampler_correction": None}
    _refuse_unknown(spec, settings, known)
    given = {key: value for key, value in settings.items() if value is not None}
    if settled:
        return dataclasses.replace(function, settings={**function.settings, **checked(given)})
    settings = known | given
    checked({"sampler_correction": settings["sampler_correction"]})
    return own.objective(spec, function, settings, checked(own.facts_of(function, settings)))


def checked(facts) -> dict:
    """What is said of an objective, as `CHECKS` leave it; a value that is None is left so."""
    return {key: value if value is None else CHECKS[key](key, value) for key, value in facts.items()}


def _nearest(word, known):
    close = difflib.get_close_matches(str(word), list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _choice(known, key, value):
    if value not in tuple(known):
        raise ValueError(f"{key}={value!r}{_nearest(value, known)}; expected one of: {', '.join(known)}")
    return value


def _number(fits, expected, key, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{key}={value!r}; expected a number {expected}")
    return float(value)


def _declared(key, value):
    claims = (value, value) if isinstance(value, str) else value
    known = (EXACT, EXACT_MEAN, BIASED)
    if not isinstance(claims, tuple | list) or len(claims) != 2 or not all(claim in known for claim in claims):
        raise ValueError(f"{key}={value!r}; expected one of: {', '.join(known)}; or a pair of them, on and off policy")
    return Claim(*claims)


CHECKS = {
    "divergence": functools.partial(_choice, DIVERGENCES),
    "estimator": functools.partial(_choice, ("differentiable", "reinforce")),
    "level": functools.partial(_choice, ("token", "sequence")),
    "reduction": functools.partial(_choice, REDUCTIONS),
    "beta": functools.partial(_number, lambda x: 0 <= x < math.inf, "of at least 0"),
    "clip_low": functools.partial(_number, lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "clip_high": functools.partial(_number, lambda x: x > 0, "above 0"),
    "clip_c": functools.partial(_number, lambda x: x > 1, "above 1"),
    "declares": _declared,
    "z_old": functools.partial(_number, lambda x: 0 < x < math.inf, "above 0"),
    "advantage": functools.partial(_choice, ADVANTAGES),
    "sampler_correction": functools.partial(_number, lambda x: 0 < x < math.inf, "above 0, the largest weight"),
}


def _refuse_bounds(clip, given, used):
    """Raises for a bound that was given and that the clip does not have."""
    for key in ("clip_low", "clip_high", "clip_c"):
        if key in given and key not in used:
            has = f"has only {' and '.join(used)}" if used else "clips nothing"
            raise ValueError(f"{key}={given[key]} cannot matter: clip={clip!r} {has}; leave {key} unset")


def _claim(on_policy, off_policy, reduction):
    """A mean over each response's own length is biased whatever is averaged."""
    return Claim(BIASED, BIASED) if reduction == "sequence_mean_token_mean" else Claim(on_policy, off_policy)


def _sequence_reduction(reduction):
    """Raises for a reduction that counts tokens where a loss has one entry a row."""
    if reduction not in ("sequence_mean", "constant"):
        raise ValueError(f"reduction={reduction!r} averages tokens; level='sequence' takes sequence_mean or constant")


# At beta = 0 a reference far away must not turn into 0 · inf.
NO_DIVERGENCE = Divergence(lambda log_u, w, r: jnp.zeros_like(w), jnp.zeros_like)
RPG_BOUNDS = dict(clip_low=0.2, clip_high=0.28, clip_c=3.0)


class Form(NamedTuple):
    surrogate: Callable
    clipped: Callable  # (w, the advantage whose sign decides, **bounds) -> Clipped
    decides: Callable  # surrogates.regularized_advantage, or raw_advantage
    bounds: tuple


def raw_advantage(logp, reference_logp, advantage, *, divergence, beta):
    """A itself decides."""
    del logp, reference_logp, divergence, beta
    return advantage


# What is not here is refused (docs/method.md 4.3).
RPG_FORMS = {
    ("none", "reinforce"): Form(surrogates.reinforce, surrogates.unclipped, raw_advantage, ()),
    ("none", "differentiable"): Form(surrogates.differentiable, surrogates.unclipped, raw_advantage, ()),
    ("rpg", "reinforce"): Form(
        surrogates.rpg_clip,
        surrogates.rpg_clipped,
        surrogates.regularized_advantage,
        ("clip_low", "clip_high", "clip_c"),
    ),
    ("truncate", "reinforce"): Form(
        surrogates.truncate, surrogates.truncate_clipped, raw_advantage, ("clip_low", "clip_high")
    ),
    ("dual", "differentiable"): Form(
        surrogates.dual_clip,
        surrogates.ppo_clipped,
        surrogates.regularized_advantage,
        ("clip_low", "clip_high", "clip_c"),
    ),
}


def _rpg(name, settings, given):
    clip, estimator, divergence, beta, level, z_old = (
        settings[key] for key in ("clip", "estimator", "divergence", "beta", "level", "z_old")
    )
    estimator = estimator or next(e for c, e in RPG_FORMS if c == clip)
    if (clip, estimator) not in RPG_FORMS:
        takes = next(e for c, e in RPG_FORMS if c == clip)
        raise ValueError(f"clip={clip!r} takes estimator={takes!r}, not {estimator!r}")
    form = RPG_FORMS[clip, estimator]
    if clip == "dual" and divergence not in ("rkl", "urkl"):
        form = form._replace(surrogate=surrogates.dual_clip_reward, decides=raw_advantage)
    _refuse_bounds(clip, given, form.bounds)
    if clip != "none" and z_old != 1:
        raise ValueError(f"z_old={z_old} takes clip='none', not {clip!r}: clips are for a normalized reference")
    reduction = settings["reduction"] or BY_LEVEL[level]
    if level == "sequence":
        _sequence_reduction(reduction)

    bounds = {key: settings[key] or RPG_BOUNDS[key] for key in form.bounds}
    terms = dict(divergence=DIVERGENCES[divergence] if beta else NO_DIVERGENCE, beta=beta)
    mass = dict(z_old=z_old) if clip == "none" else {}
    on_policy = EXACT_MEAN if form.surrogate is surrogates.dual_clip and beta else EXACT
    return SurrogateObjective(
        name=name,
        settings={**settings, "estimator": estimator, "reduction": reduction, **bounds},
        units=UNITS[level],
        surrogate=functools.partial(form.surrogate, **terms, **bounds, **mass),
        clipped=functools.partial(form.clipped, **bounds),
        decides=functools.partial(form.decides, **terms),
        level=level,
        reduction=reduction,
        divergence=divergence if beta else None,
        beta=beta,
        z_old=z_old,
        reward_beta=0.0,
        declares=_claim(on_policy, EXACT if clip == "none" else BIASED, reduction),
    )


OUT_OF_REACH = dict(clip_low=1.0, clip_high=math.inf)  # bounds that no ratio crosses
ALWAYS, ON_POLICY, NEVER = Claim(EXACT, EXACT), Claim(EXACT, BIASED), Claim(BIASED, BIASED)


def _policy_gradient(name, settings, given):
    """REINFORCE: no ratio, no clip, no regularizer."""
    del given
    return _baseline(name, settings, baselines.policy_gradient, surrogates.unclipped, ON_POLICY)


def _rloo(name, settings, given):
    """Whole responses, weighted and unclipped; its KL is in the reward."""
    del given
    rows = dict(level="sequence", units=as_sequences, reward_beta=settings["beta"])
    return _baseline(name, settings, baselines.weighted_policy_gradient, surrogates.unclipped, ALWAYS, **rows)


def _cispo(name, settings, given):
    """The ratio capped as a constant, so that every token keeps a gradient."""
    if "clip_high" not in given:
        raise ValueError(f"objective {name!r} needs clip_high: it caps ratios at 1 + clip_high and has no default")
    bound = dict(clip_high=settings["clip_high"])
    loss = functools.partial(baselines.weighted_policy_gradient, **bound)
    return _baseline(name, settings, loss, functools.partial(baselines.capped, **bound), ON_POLICY)


def _gspo(name, settings, given):
    """PPO's clip of the geometric mean of a response's ratios: never exact, for it divides by the length."""
    return _clipped_baseline(None, NEVER, name, settings, given, level="sequence", units=as_mean_tokens)


def _reinforce_pp(name, settings, given):
    """PPO's clip; its KL is in the reward."""
    return _clipped_baseline(None, ALWAYS, name, settings, given, reward_beta=settings["beta"])


def _clipped_baseline(regularized, claim, name, settings, given, **rest):
    """PPO's clip (or none) of the reward part; `regularized` is the loss to take where beta is not 0.

    claim: what is exact without a clip, where beta is not 0 if there is a `regularized`.
    """
    clip, beta = settings["clip"], settings["beta"] if regularized else 0.0
    bounds = {key: settings[key] for key in OUT_OF_REACH}
    if clip == "none":
        _refuse_bounds(clip, given, ())
        settings = {**settings, **dict.fromkeys(OUT_OF_REACH)}
        bounds = OUT_OF_REACH
    loss = functools.partial(baselines.ppo_clip, **bounds)
    if beta:
        loss = functools.partial(regularized, beta=beta, **bounds)
    elif regularized:
        claim = ALWAYS
    claim = claim if clip == "none" else claim._replace(off_policy=BIASED)
    clipped = functools.partial(surrogates.ppo_clipped, **bounds)
    return _baseline(name, settings, loss, clipped, claim, beta=beta, **rest)


def _baseline(name, settings, surrogate, clipped, claim, *, beta=0.0, level="token", units=as_tokens, reward_beta=0.0):
    """A normalized reference; the divergence, if there is one, is that which k3 estimates."""
    reduction = settings["reduction"]
    if level == "sequence":
        _sequence_reduction(reduction)
    return SurrogateObjective(
        name=name,
        settings=settings,
        units=units,
        surrogate=surrogate,
        clipped=clipped,
        decides=functools.partial(raw_advantage, divergence=None, beta=0.0),
        level=level,
        reduction=reduction,
        divergence="urkl" if beta else None,
        beta=beta,
        z_old=1.0,
        reward_beta=reward_beta,
        declares=_claim(*claim, reduction),
    )


def _recipe(build, *, advantage="group_mean", clips=("ppo", "none"), **defaults) -> Recipe:
    return Recipe(build, dict(**defaults, advantage=advantage, sampler_correction=None), clips)


_ppo = functools.partial(_clipped_baseline, None, ALWAYS)
_grpo = functools.partial(_clipped_baseline, baselines.grpo, NEVER)
_grpo_corrected = functools.partial(_clipped_baseline, baselines.grpo_corrected, ALWAYS)
_reinforce_pp_baseline = functools.partial(_clipped_baseline, baselines.reinforce_pp_baseline, ON_POLICY)
PPO_BOUNDS = dict(clip="ppo", clip_low=0.2, clip_high=0.2)
GRPO = dict(beta=0.04, **PPO_BOUNDS, reduction="sequence_mean_token_mean", advantage="group_mean_std")

RECIPES = {
    "rpg": _recipe(
        _rpg,
        clips=("none", "rpg", "dual", "truncate"),
        **dict(divergence="urkl", estimator=None, beta=1e-4, clip="none", clip_low=None, clip_high=None, clip_c=None),
        **dict(level="token", reduction=None, z_old=1.0),
    ),
    "grpo": _recipe(_grpo, **GRPO),
    "grpo_corrected": _recipe(_grpo_corrected, **GRPO),
    "dapo": _recipe(
        _grpo, beta=0.0, clip="ppo", clip_low=0.2, clip_high=0.28, reduction="token_mean", advantage="group_mean_std"
    ),
    "dr_grpo": _recipe(_grpo, beta=0.0, **PPO_BOUNDS, reduction="constant"),
    "ppo_clip": _recipe(_ppo, **PPO_BOUNDS, reduction="token_mean"),
    "reinforce": _recipe(_policy_gradient, reduction="token_mean"),
    "rloo": _recipe(_rloo, beta=0.03, reduction="sequence_mean", advantage="leave_one_out"),
    "reinforce_pp": _recipe(
        _reinforce_pp, beta=0.01, **PPO_BOUNDS, reduction="token_mean", advantage="whitened_return"
    ),
    "reinforce_pp_baseline": _recipe(
        _reinforce_pp_baseline, beta=1e-5, **PPO_BOUNDS, reduction="token_mean", advantage="whitened_group_mean"
    ),
    "gspo": _recipe(
        _gspo, clip="ppo", clip_low=3e-4, clip_high=4e-4, reduction="sequence_mean", advantage="group_mean_std"
    ),
    "gpg": _recipe(_policy_gradient, reduction="token_mean", advantage="rescaled_group_mean"),
    "cispo": _recipe(_cispo, clip_high=None, reduction="token_mean", advantage="group_mean_std"),
}
