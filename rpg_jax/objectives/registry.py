"""`make(name, **settings)`: every objective by name, its settings checked.

A recipe is a loss of `surrogates` or `baselines` with the defaults of its settings. To add a baseline, write its loss
in `baselines` and add a line to `RECIPES`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rpg_jax import InputError
from rpg_jax.objectives import baselines, controls, divergences, own, surrogates
from rpg_jax.objectives.batch import UNITS, Batch, as_mean_tokens
from rpg_jax.objectives.clips import BOUNDS, CLIPS, UNCLIPPED, Clip, TrustRegion
from rpg_jax.objectives.divergences import ALPHA, DIVERGENCES
from rpg_jax.objectives.objective import BIASED, EXACT, EXACT_MEAN, Claim, Objective
from rpg_jax.objectives.reductions import BY_LEVEL
from rpg_jax.objectives.settings import check, checked, choice, nearest

DEFAULT = "default"  # the name of an unset clip
OWN_CONTROL = {"rkl": 1.0, "urkl": 0.0}  # c of the coefficient w(A − beta·(log u + c))
ALWAYS, ON_POLICY, NEVER = Claim(EXACT, EXACT), Claim(EXACT, BIASED), Claim(BIASED, BIASED)
IN_EXPECTATION = Claim(EXACT_MEAN, EXACT_MEAN)


class Recipe(NamedTuple):
    """A loss and the defaults of its settings, None where one is unset or follows from the others.

    If the loss takes beta, it has an estimator of `urkl`; if the settings have one that it does not take, that is the
    coefficient of a KL in the reward. unclipped: what is exact without a clip where beta is not 0; a loss with a
    regularizer is exact without it. clips: those that `clip` takes; the clip of an objective without that setting is
    the only one. units: what the loss counts; None: what its level does.
    """

    loss: Callable[..., Any]
    unclipped: Claim
    defaults: Mapping[str, Any]
    clips: tuple[str, ...] = ("ppo", "none")
    level: str = "token"
    units: Callable[[Batch], Batch] | None = None


def make(name: str, **settings: Any) -> Objective:
    """Builds an objective; `RECIPES[name].defaults` lists its settings. A setting that is None is unset.

    Unset is the objective's default and not "none": PPO's clip stays on for `make("grpo", clip=None)`, which is spelled
    `clip="default"` too, and only `clip="none"` takes it away. Unset, rpg's divergence is urkl, its clip "none", its
    estimator the first that the clip takes, its reduction token_mean (sequence_mean for level="sequence"); bounds are
    those of `clips.CLIPS`. `settings.CHECKS` says what each may be.

    make("FILE.py:NAME", ...) is a user's function (`own`), with its parameters beyond the contract's as settings.

    Every objective takes `advantage`, a name of `ADVANTAGES` whose default is its paper's, or a user's FILE.py:NAME,
    for `Objective.advantages`, and `sampler_correction`, the cap of truncated importance sampling, for
    `Objective.corrections`.

    Raises:
      ValueError: an unknown name or setting, a value out of range, a combination that docs/method.md 4.3 refuses, a
        setting that cannot matter given the others, or one without a default that is missing.
    """
    made = of_function(name, own.load(name), settings) if ":" in name else _of_recipe(name, settings)
    return dataclasses.replace(made, own_advantage=own.advantage(made.advantage)) if ":" in made.advantage else made


def _of_recipe(name: str, settings: Mapping[str, Any]) -> Objective:
    """An objective of ours; raises ValueError as `make` does."""
    if name not in RECIPES:
        raise InputError(
            f"unknown objective {name!r}{nearest(name, RECIPES)}; known: {', '.join(RECIPES)}, and FILE.py:NAME"
        )
    recipe = RECIPES[name]
    _refuse_unknown(name, settings, recipe.defaults)
    unset = {key for key, value in settings.items() if value is None or (key == "clip" and value == DEFAULT)}
    given = {key: value for key, value in settings.items() if key not in unset}
    chosen = {k: choice(recipe.clips, k, value) if k == "clip" else check(k, value) for k, value in given.items()}
    complete = {**recipe.defaults, **chosen}
    clip = _clip(name, complete, chosen, complete.get("clip", recipe.clips[0]))
    complete |= {key: clip.bounds.get(key) for key in BOUNDS if key in complete}
    return (_rpg if name == "rpg" else _baseline)(name, recipe, complete, clip)


def _clip(name: str, settings: Mapping, chosen: Mapping, clip_name: str) -> Clip | TrustRegion:
    """The clip of that name with the bounds of the settings; raises for a bound that it lacks, or that is missing."""
    clip = CLIPS[clip_name]
    for key in BOUNDS:
        if key in chosen and key not in clip.bounds:
            has = f"has only {' and '.join(clip.bounds)}" if clip.bounds else "clips nothing"
            raise InputError(f"{key}={chosen[key]} cannot matter: clip={clip_name!r} {has}; leave {key} unset")
    bounds = {key: default if settings.get(key) is None else settings[key] for key, default in clip.bounds.items()}
    for key, value in bounds.items():
        if value is None:
            raise InputError(f"objective {name!r} needs {key}, a bound of clip {clip_name!r} that has no default")
    return clip._replace(bounds=bounds)


def of_function(spec: str, function: Callable, settings: Mapping[str, Any]) -> Objective:
    """A user's function as an objective (`own`). Of an `Objective` only advantage and sampler_correction may be set.

    Raises ValueError as `make` does.
    """
    defaults = {**own.settings_of(function), "advantage": None, "sampler_correction": None}
    _refuse_unknown(spec, settings, defaults)
    chosen = {key: value for key, value in settings.items() if value is not None}
    if isinstance(function, Objective):
        return dataclasses.replace(function, settings={**function.settings, **checked(chosen)})
    complete = {**defaults, **chosen}
    checked({"sampler_correction": complete["sampler_correction"]})
    return own.objective(spec, function, complete, checked(own.facts_of(function, complete)))


def _refuse_unknown(name: str, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in settings:
        if key not in known:
            has = f"objective {name!r} has no setting {key!r}{nearest(key, known)}; it has: {', '.join(known)}"
            others = any(key in recipe.defaults for recipe in RECIPES.values())
            raise InputError(has + (f"; leave {key} unset (--config.objective.{key}=)" if others else ""))


def _claim(unclipped: Claim, clip: Clip | TrustRegion, reduction: str) -> Claim:
    """Biased off policy with a clip, and altogether by a mean over each response's own length."""
    if reduction == "sequence_mean_token_mean":
        return NEVER
    return unclipped._replace(off_policy=BIASED) if clip.bounds else unclipped


def _reduction(settings: Mapping[str, Any], level: str) -> str:
    """The reduction; raises for one that counts tokens where a loss has one entry a row."""
    reduction = settings["reduction"] or BY_LEVEL[level]
    if level == "sequence" and reduction not in ("sequence_mean", "constant"):
        raise InputError(f"reduction={reduction!r} averages tokens; level='sequence' takes sequence_mean or constant")
    return reduction


def _baseline(name: str, recipe: Recipe, settings: Mapping[str, Any], clip: Clip | TrustRegion) -> Objective:
    """A loss of `baselines`, against a normalized reference."""
    reduction, beta = _reduction(settings, recipe.level), settings.get("beta", 0.0)
    regularized = "beta" in inspect.signature(recipe.loss).parameters
    in_loss = beta if regularized else 0.0
    return Objective(
        name=name,
        loss=functools.partial(recipe.loss, clip=clip, **(dict(beta=beta) if regularized else {})),
        units=recipe.units or UNITS[recipe.level],
        settings=settings,
        level=recipe.level,
        reduction=reduction,
        divergence="urkl" if in_loss else None,
        beta=in_loss,
        z_old=1.0,
        reward_beta=beta - in_loss,
        declares=_claim(recipe.unclipped if in_loss or not regularized else ALWAYS, clip, reduction),
    )


def _refuse(where: str, **fits: bool) -> None:
    """Raises for the first of `fits` that is not so."""
    for what, fine in fits.items():
        if not fine:
            raise InputError(f"{where} cannot go with {what}")


def _rpg(name: str, recipe: Recipe, settings: Mapping[str, Any], clip: Clip | TrustRegion) -> Objective:
    """RPG: an estimator of `surrogates.ESTIMATORS` with a clip that goes with it (docs/method.md 4)."""
    divergence, beta, level, z_old, kl = (settings[key] for key in ("divergence", "beta", "level", "z_old", "kl"))
    estimator = settings["estimator"] or clip.estimators[0]
    _check_rpg(settings, clip, estimator)
    alpha = (settings["alpha"] or ALPHA) if divergence == "alpha" else None
    loss, unclipped, target = surrogates.ESTIMATORS[estimator], recipe.unclipped, divergences.named(divergence, alpha)
    if settings["clip"] == "dual" and divergence in OWN_CONTROL:
        loss, unclipped = surrogates.regularized_ratio, IN_EXPECTATION if beta else ALWAYS
    if settings["clip"] == "coefficient":
        loss = surrogates.clipped_coefficient
    in_loss, full_kl, control, region = beta, None, None, None
    if kl == "full" and beta:  # the loss of an entry has the reward alone
        in_loss, full_kl, unclipped = 0.0, target, IN_EXPECTATION
    elif beta and (kl == "to_go" or settings["control"] is not None):
        own_c, target = OWN_CONTROL[divergence], DIVERGENCES["urkl"]  # whose advantage takes it and the later tokens
        c = own_c if settings["control"] is None else settings["control"]
        control = functools.partial(controls.controlled_advantage, beta=beta, c=c, own=own_c, kl=kl, z_old=z_old)
        unclipped = IN_EXPECTATION if kl == "token" else Claim(EXACT_MEAN, BIASED)
    if isinstance(clip, TrustRegion):
        region = functools.partial(surrogates.kept_units, region=clip, divergence=target, beta=in_loss)
    reduction = _reduction(settings, level)
    bounded = UNCLIPPED if isinstance(clip, TrustRegion) else clip
    return Objective(
        name=name,
        loss=functools.partial(loss, divergence=target, beta=in_loss, clip=bounded, z_old=z_old),
        units=UNITS[level],
        settings={**settings, "alpha": alpha, "estimator": estimator, "reduction": reduction},
        level=level,
        reduction=reduction,
        divergence=divergence if beta else None,
        beta=beta,
        z_old=z_old,
        declares=_claim(unclipped, clip, reduction),
        full_kl=full_kl,
        control=control,
        region=region,
    )


def _check_rpg(settings: Mapping[str, Any], clip: Clip | TrustRegion, estimator: str) -> None:
    """Raises ValueError for the combinations that docs/method.md 4.3 refuses."""
    divergence, z_old, level, kl = (settings[key] for key in ("divergence", "z_old", "level", "kl"))
    named = f"clip={settings['clip']!r}"
    if estimator not in clip.estimators:
        raise InputError(f"{named} takes estimator={' or '.join(map(repr, clip.estimators))}, not {estimator!r}")
    for what, fits in ((f"{named}, and clips are", not clip.bounds), ("kl='full', which is", kl != "full")):
        if z_old != 1 and not fits:
            raise InputError(f"z_old={z_old} cannot go with {what} for a normalized reference")
    if divergence != "alpha" and settings["alpha"] is not None:
        raise InputError(f"alpha={settings['alpha']} cannot matter with divergence={divergence!r}; leave alpha unset")
    for key, fits in (("level", level == "token"), ("control", settings["control"] is None)):
        if kl == "full" and not fits:
            raise InputError(f"kl='full' cannot go with {key}={settings[key]!r}: it sums over the tokens' vocabulary")
    chosen = {key: settings[key] for key in ("control", "kl") if settings[key] not in (None, "token", "full")}
    spelled = " and ".join(f"{key}={value!r}" for key, value in chosen.items())
    if chosen and divergence not in OWN_CONTROL:
        raise InputError(f"{spelled} is for divergence='rkl' or 'urkl', not {divergence!r}")
    if chosen and settings["clip"] in ("dual", "dual_reward"):
        raise InputError(f"{spelled} cannot go with {named}, which has a KL term of its own")
    if kl == "to_go" and level == "sequence":
        raise InputError("kl='to_go' is for level='token': over a whole response there are no later tokens")


RPG_FORMS = tuple((name, estimator) for name, clip in CLIPS.items() for estimator in clip.estimators)
_ANY = dict(advantage="group_mean", sampler_correction=None)  # settings that every objective has
_NO_BOUNDS = dict(clip_low=None, clip_high=None)
_PPO = dict(clip="ppo", **_NO_BOUNDS)
_GRPO = dict(beta=0.04, **_PPO, reduction="sequence_mean_token_mean", advantage="group_mean_std")

RECIPES = {
    "rpg": Recipe(
        surrogates.reinforce,
        ALWAYS,
        dict(divergence="urkl", alpha=None, estimator=None, beta=1e-4, control=None, kl="token")
        | dict(clip="none", **dict.fromkeys(BOUNDS), level="token", reduction=None, z_old=1.0),
        tuple(dict(RPG_FORMS)),
    ),
    "grpo": Recipe(baselines.grpo, NEVER, _GRPO),
    "grpo_corrected": Recipe(baselines.grpo_corrected, ALWAYS, _GRPO),
    "dapo": Recipe(baselines.grpo, NEVER, _GRPO | dict(beta=0.0, clip_high=0.28, reduction="token_mean")),
    "sapo": Recipe(
        baselines.grpo,
        NEVER,
        dict(beta=0.0, tau_pos=None, tau_neg=None, reduction=_GRPO["reduction"], advantage="group_mean_std"),
        ("sapo",),
    ),
    "dr_grpo": Recipe(baselines.grpo, NEVER, dict(beta=0.0, **_PPO, reduction="constant")),
    "ppo_clip": Recipe(baselines.ppo_clip, ALWAYS, dict(**_PPO, reduction="token_mean")),
    "reinforce": Recipe(baselines.policy_gradient, ON_POLICY, dict(reduction="token_mean"), ("none",)),
    "rloo": Recipe(
        baselines.weighted_policy_gradient,
        ALWAYS,
        dict(beta=0.03, reduction="sequence_mean", advantage="leave_one_out"),
        ("none",),
        level="sequence",
    ),
    "reinforce_pp": Recipe(
        baselines.ppo_clip, ALWAYS, dict(beta=0.01, **_PPO, reduction="token_mean", advantage="whitened_return")
    ),
    "reinforce_pp_baseline": Recipe(
        baselines.reinforce_pp_baseline,
        ON_POLICY,
        dict(beta=1e-5, **_PPO, reduction="token_mean", advantage="whitened_group_mean"),
    ),
    "gspo": Recipe(  # never exact: the geometric mean of a response's ratios divides by its length
        baselines.ppo_clip,
        NEVER,
        dict(clip="ppo", clip_low=3e-4, clip_high=4e-4, reduction="sequence_mean", advantage="group_mean_std"),
        level="sequence",
        units=as_mean_tokens,
    ),
    "gpg": Recipe(
        baselines.policy_gradient, ON_POLICY, dict(reduction="token_mean", advantage="rescaled_group_mean"), ("none",)
    ),
    "cispo": Recipe(
        baselines.weighted_policy_gradient,
        ALWAYS,
        dict(clip_high=None, reduction="token_mean", advantage="group_mean_std"),
        ("cap",),
    ),
}
for _name, _recipe in RECIPES.items():
    RECIPES[_name] = _recipe._replace(defaults={**_recipe.defaults, **_ANY, **_recipe.defaults})
