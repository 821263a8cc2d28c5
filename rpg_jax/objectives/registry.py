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
from rpg_jax.objectives import baselines, controls, own, surrogates
from rpg_jax.objectives.batch import UNITS, Batch, as_mean_tokens
from rpg_jax.objectives.clips import BOUNDS, CLIPS, UNCLIPPED, Clip, TrustRegion
from rpg_jax.objectives.divergences import ALPHA, DIVERGENCES, named
from rpg_jax.objectives.objective import BIASED, EXACT, EXACT_MEAN, Claim, Objective
from rpg_jax.objectives.reductions import BY_LEVEL
from rpg_jax.objectives.settings import check, checked, choice, nearest

DEFAULT = "default"  # the name of an unset clip
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
    those of `clips.CLIPS`. `settings` says what each may be.

    make("FILE.py:NAME", ...) is a user's function (`own`), with its parameters beyond the contract's as settings.

    Every objective takes `advantage`, a name of `ADVANTAGES` whose default is its paper's, or a user's FILE.py:NAME,
    for `Objective.advantages`, and `sampler_correction`, the cap of truncated importance sampling, for
    `Objective.corrections`.

    Raises ValueError: an unknown name or setting, a value out of range, a combination that docs/method.md 4.3 refuses,
    a setting that cannot matter given the others, or one without a default that is missing.
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
    given = {k: value for k, value in settings.items() if value is not None and (k, value) != ("clip", DEFAULT)}
    chosen = {k: choice(recipe.clips, k, value) if k == "clip" else check(k, value) for k, value in given.items()}
    complete = {**recipe.defaults, **chosen}
    clip = _clip(name, complete, chosen, complete.get("clip", recipe.clips[0]))
    complete |= {key: clip.bounds.get(key) for key in BOUNDS if key in complete}
    level = complete.get("level", recipe.level)
    loss, unclipped, fields = (_rpg if name == "rpg" else _baseline)(recipe, complete, clip)
    reduction = complete["reduction"] or BY_LEVEL[level]
    declares = unclipped._replace(off_policy=BIASED) if clip.bounds else unclipped
    return Objective(
        name=name,
        loss=loss,
        units=recipe.units or UNITS[level],
        settings=complete | {"reduction": reduction},
        level=level,
        reduction=reduction,
        declares=NEVER if reduction == "sequence_mean_token_mean" else declares,
        **fields,
    )


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
    """A user's function as an objective (`own`), tried out. Of an `Objective` only advantage and sampler_correction may
    be set.

    With kl="full" or "to_go" the divergence that it has as a setting or attribute, or what later tokens add to it, is
    taken outside of the function (`controls.terms`), which then has none, or that of the token itself.

    Raises ValueError as `make` does, and for a result that is no loss.
    """
    own_settings = own.settings_of(function)
    defaults = {**own_settings, "advantage": None, "sampler_correction": None}
    takes_kl = not isinstance(function, Objective) and "kl" not in own_settings
    defaults |= dict(kl="token") if takes_kl else {}
    _refuse_unknown(spec, settings, defaults)
    chosen = {key: value for key, value in settings.items() if value is not None}
    if isinstance(function, Objective):
        return dataclasses.replace(function, settings={**function.settings, **checked(chosen)})
    complete = {**defaults, **chosen}
    checked({"sampler_correction": complete["sampler_correction"]})
    kl, facts = check("kl", complete["kl"]) if takes_kl else "token", checked(own.facts_of(function, complete))
    divergence, beta, level, z_old = (facts[key] for key in ("divergence", "beta", "level", "z_old"))
    if kl != "token" and not (divergence and beta and level == "token" and z_old == 1):
        needs = "a divergence and a beta above 0, level='token' and z_old=1"
        raise InputError(f"kl={kl!r} needs {needs}, as settings or attributes of {spec}")
    for name, default in own_settings.items():
        if complete[name] is own.REQUIRED:
            raise InputError(f"{spec} needs {name}, which has no default: set it (--config.objective.{name}=VALUE)")
        if type(default) is float and type(complete[name]) is int:
            complete[name] = float(complete[name])
    made = Objective(
        name=spec,
        loss=functools.partial(function, **{name: complete[name] for name in own_settings}),
        units=UNITS[level],
        settings=complete | {"advantage": facts["advantage"]},
        level=level,
        reduction=facts["reduction"] or BY_LEVEL[level],
        divergence=divergence if beta else None,
        beta=beta,
        z_old=z_old,
        declares=facts["declares"],
        **controls.terms(divergence, beta, kl=kl, z_old=z_old),
    )
    made.try_out((2, 3))
    return made


def _refuse_unknown(name: str, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in settings:
        if key not in known:
            has = f"objective {name!r} has no setting {key!r}{nearest(key, known)}; it has: {', '.join(known)}"
            others = any(key in recipe.defaults for recipe in RECIPES.values())
            raise InputError(has + (f"; leave {key} unset (--config.objective.{key}=)" if others else ""))


def _baseline(recipe: Recipe, settings: dict, clip: Clip | TrustRegion) -> tuple[Callable, Claim, dict]:
    """(loss, what it is without a clip, fields of an `Objective`): a loss of `baselines`, Z = 1."""
    beta, regularized = settings.get("beta", 0.0), "beta" in inspect.signature(recipe.loss).parameters
    in_loss = beta if regularized else 0.0
    loss = functools.partial(recipe.loss, clip=clip, **(dict(beta=beta) if regularized else {}))
    fields = dict(divergence="urkl" if in_loss else None, beta=in_loss, z_old=1.0, reward_beta=beta - in_loss)
    return loss, recipe.unclipped if in_loss or not regularized else ALWAYS, fields


def _rpg(recipe: Recipe, settings: dict, clip: Clip | TrustRegion) -> tuple[Callable, Claim, dict]:
    """The same of an estimator of `surrogates.ESTIMATORS` with a clip that goes with it (docs/method.md 4).

    `settings` get the estimator, and alpha where the divergence has one.
    """
    settings["estimator"] = settings["estimator"] or clip.estimators[0]
    _check_rpg(settings, clip)
    divergence, beta, z_old, kl = (settings[key] for key in ("divergence", "beta", "z_old", "kl"))
    settings["alpha"] = alpha = (settings["alpha"] or ALPHA) if divergence == "alpha" else None
    loss, unclipped, target = surrogates.ESTIMATORS[settings["estimator"]], recipe.unclipped, named(divergence, alpha)
    if settings["clip"] == "dual" and divergence in controls.OWN:
        loss, unclipped = surrogates.regularized_ratio, IN_EXPECTATION if beta else ALWAYS
    if settings["clip"] == "coefficient":
        loss = surrogates.clipped_coefficient
    extra = controls.terms(divergence, beta, alpha=alpha, kl=kl, control=settings["control"], z_old=z_old)
    fields, in_loss = dict(divergence=divergence if beta else None, beta=beta, z_old=z_old, **extra), beta
    if "full_kl" in extra:  # the loss of an entry has the reward alone
        in_loss, unclipped = 0.0, IN_EXPECTATION
    elif extra:
        target = target if settings["control"] is None else DIVERGENCES["urkl"]  # whose own c is 0
        unclipped = IN_EXPECTATION if kl == "token" else Claim(EXACT_MEAN, BIASED)
    if isinstance(clip, TrustRegion):
        shaped = functools.partial(surrogates.regularized_advantage, divergence=target, beta=in_loss)
        region, clip = clip, UNCLIPPED
        fields["region"] = lambda x, tokens: region(x, tokens, shaped(x.logp, x.reference_logp, x.advantage))
    return functools.partial(loss, divergence=target, beta=in_loss, clip=clip, z_old=z_old), unclipped, fields


def _check_rpg(settings: Mapping[str, Any], clip: Clip | TrustRegion) -> None:
    """Raises ValueError for the combinations that docs/method.md 4.3 refuses."""
    keys = ("divergence", "estimator", "alpha", "level", "z_old", "control", "kl")
    divergence, estimator, alpha, level, z_old, control, kl = (settings[key] for key in keys)
    clip_name, scaled, full = f"clip={settings['clip']!r}", z_old != 1, kl == "full"
    chosen = {"control": control, "kl": kl}
    extra = " and ".join(f"{k}={value!r}" for k, value in chosen.items() if value not in (None, "token", "full"))
    refused = {
        f"{clip_name} takes estimator={' or '.join(map(repr, clip.estimators))}, not {estimator!r}":
            estimator not in clip.estimators,
        f"z_old={z_old} cannot go with {clip_name}, and clips are for a normalized reference": scaled and clip.bounds,
        f"z_old={z_old} cannot go with kl={kl!r}, which is for a normalized reference": scaled and kl != "token",
        f"alpha={alpha} cannot matter with divergence={divergence!r}; leave alpha unset":
            divergence != "alpha" and alpha is not None,
        f"kl='full' cannot go with level={level!r}: it sums over the tokens' vocabulary": full and level != "token",
        f"kl='full' cannot go with control={control!r}: it sums over the tokens' vocabulary":
            full and control is not None,
        f"control={control!r} is for divergence='rkl' or 'urkl', not {divergence!r}":
            control is not None and divergence not in controls.OWN,
        f"{extra} cannot go with {clip_name}, which has a KL term of its own":
            extra and settings["clip"] in ("dual", "dual_reward"),
        "control='kl' is for level='token': it is of a token's distribution":
            control == controls.OF_TOKEN and level == "sequence",
        "kl='to_go' is for level='token': over a whole response there are no later tokens":
            kl == "to_go" and level == "sequence",
    }  # fmt: skip
    for text, wrong in refused.items():
        if wrong:
            raise InputError(text)


RPG_FORMS = tuple((name, estimator) for name, clip in CLIPS.items() for estimator in clip.estimators)
_RPG = dict(divergence="urkl", alpha=None, estimator=None, beta=1e-4, control=None, kl="token", clip="none")
_RPG |= dict(**dict.fromkeys(BOUNDS), level="token", reduction=None, z_old=1.0)
_PPO = dict(clip="ppo", clip_low=None, clip_high=None)
_TOKENS = dict(reduction="token_mean")
_BY_STD = dict(advantage="group_mean_std")
_GRPO = dict(beta=0.04, **_PPO, reduction="sequence_mean_token_mean", **_BY_STD)
_SAPO = dict(beta=0.0, tau_pos=None, tau_neg=None, reduction="sequence_mean_token_mean", **_BY_STD)
_RLOO = dict(beta=0.03, reduction="sequence_mean", advantage="leave_one_out")
_REINFORCE_PP = dict(beta=0.01, **_PPO, **_TOKENS, advantage="whitened_return")
_GSPO = dict(clip="ppo", clip_low=3e-4, clip_high=4e-4, reduction="sequence_mean", **_BY_STD)

RECIPES = {
    "rpg": Recipe(surrogates.reinforce, ALWAYS, _RPG, tuple(dict(RPG_FORMS))),
    "grpo": Recipe(baselines.grpo, NEVER, _GRPO),
    "grpo_corrected": Recipe(baselines.grpo_corrected, ALWAYS, _GRPO),
    "dapo": Recipe(baselines.grpo, NEVER, _GRPO | _TOKENS | dict(beta=0.0, clip_high=0.28)),
    "sapo": Recipe(baselines.grpo, NEVER, _SAPO, ("sapo",)),
    "dr_grpo": Recipe(baselines.grpo, NEVER, dict(beta=0.0, **_PPO, reduction="constant")),
    "ppo_clip": Recipe(baselines.ppo_clip, ALWAYS, _PPO | _TOKENS),
    "reinforce": Recipe(baselines.policy_gradient, ON_POLICY, _TOKENS, ("none",)),
    "rloo": Recipe(baselines.weighted_policy_gradient, ALWAYS, _RLOO, ("none",), "sequence"),
    "reinforce_pp": Recipe(baselines.ppo_clip, ALWAYS, _REINFORCE_PP),
    "reinforce_pp_baseline": Recipe(
        baselines.reinforce_pp_baseline, ON_POLICY, _REINFORCE_PP | dict(beta=1e-5, advantage="whitened_group_mean")
    ),
    # Never exact: the geometric mean of a response's ratios divides by its length.
    "gspo": Recipe(baselines.ppo_clip, NEVER, _GSPO, level="sequence", units=as_mean_tokens),
    "gpg": Recipe(baselines.policy_gradient, ON_POLICY, _TOKENS | dict(advantage="rescaled_group_mean"), ("none",)),
    "cispo": Recipe(baselines.weighted_policy_gradient, ALWAYS, dict(clip_high=None, **_TOKENS, **_BY_STD), ("cap",)),
}
_EVERY = dict(advantage="group_mean", sampler_correction=None)  # settings of all, last where a recipe has them not
RECIPES = {name: x._replace(defaults={**x.defaults, **_EVERY, **x.defaults}) for name, x in RECIPES.items()}
