"""`make(name, **settings)`: every objective by name, its settings checked.

A recipe is a loss of `surrogates` or `baselines` with the defaults of its settings. To add a baseline, write its loss
in `baselines` and add a line to `RECIPES`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rpg_jax import InputError
from rpg_jax.objectives import baselines, controls, divergences, own, surrogates
from rpg_jax.objectives.batch import UNITS, as_mean_tokens
from rpg_jax.objectives.clips import BOUNDS, CLIPS, UNCLIPPED, Clip, TrustRegion
from rpg_jax.objectives.divergences import ALPHA, DIVERGENCES, Divergence
from rpg_jax.objectives.objective import BIASED, EXACT, EXACT_MEAN, Claim, Objective, SurrogateObjective
from rpg_jax.objectives.reductions import BY_LEVEL
from rpg_jax.objectives.settings import check, checked, choice, nearest

DEFAULT = "default"  # the name of an unset clip


class Recipe(NamedTuple):
    """build: (name, settings, clip) -> SurrogateObjective, of complete settings and the `Clip` that they name.

    defaults: of the settings, None where one is unset or follows from the others. clips: those that `clip` takes; the
    clip of an objective without that setting is the only one.
    """

    build: Callable[..., SurrogateObjective]
    defaults: Mapping[str, Any]
    clips: tuple[str, ...] = ("ppo", "none")


def make(name: str, **settings: Any) -> Objective:
    """Builds an objective; `RECIPES[name].defaults` lists its settings. A setting that is None is unset.

    Unset is the objective's default and not "none": PPO's clip stays on for `make("grpo", clip=None)`, which is spelled
    `clip="default"` too, and only `clip="none"` takes it away.

        make("rpg", divergence="fkl|rkl|ufkl|urkl|js|hellinger|jeffreys|chi2|alpha", alpha=0.5, beta=1e-4,
             estimator="differentiable|reinforce", level="token|sequence", z_old=1.0,
             clip="none|rpg|coefficient|dual|dual_reward|truncate|sapo|icepop|sequence_mask|geometric_mask|m2po|dppo",
             clip_low, clip_high, clip_c, clip_m2, tau_pos, tau_neg,
             control=None or a float or "optimal", kl="token|to_go|full",
             reduction="token_mean|sequence_mean|sequence_mean_token_mean|constant")
        make("grpo", beta=0.04, clip="ppo|none", clip_low, clip_high, reduction="sequence_mean_token_mean")

    Unset, rpg's divergence is urkl, its clip "none", its estimator the first that the clip takes, its reduction
    token_mean (sequence_mean for level="sequence"); bounds are those of `clips.CLIPS`.

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
    settings = {**recipe.defaults, **chosen}
    clip = _clip(name, settings, chosen, settings.get("clip", recipe.clips[0]))
    bounds = {key: clip.bounds.get(key) for key in BOUNDS if key in settings}
    return recipe.build(name, {**settings, **bounds}, clip)


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
    defaults = {} if isinstance(function, Objective) else own.settings_of(function)
    defaults = {**defaults, "advantage": None, "sampler_correction": None}
    _refuse_unknown(spec, settings, defaults)
    chosen = {key: value for key, value in settings.items() if value is not None}
    if isinstance(function, Objective):
        return dataclasses.replace(function, settings={**function.settings, **checked(chosen)})
    complete = own.typed(spec, function, {**defaults, **chosen})
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
        return Claim(BIASED, BIASED)
    return unclipped._replace(off_policy=BIASED) if clip.bounds else unclipped


def _reduction(settings: Mapping[str, Any], level: str) -> str:
    """The reduction; raises for one that counts tokens where a loss has one entry a row."""
    reduction = settings["reduction"] or BY_LEVEL[level]
    if level == "sequence" and reduction not in ("sequence_mean", "constant"):
        raise InputError(f"reduction={reduction!r} averages tokens; level='sequence' takes sequence_mean or constant")
    return reduction


OWN_CONTROL = {"rkl": 1.0, "urkl": 0.0}  # c of the coefficient w(A − beta·(log u + c))


def _rpg(name: str, settings: Mapping[str, Any], clip: Clip | TrustRegion) -> SurrogateObjective:
    """RPG: an estimator of `surrogates.ESTIMATORS` with a clip that goes with it (docs/method.md 4)."""
    divergence, beta, level, z_old = (settings[key] for key in ("divergence", "beta", "level", "z_old"))
    estimator = settings["estimator"] or clip.estimators[0]
    if estimator not in clip.estimators:
        takes = " or ".join(map(repr, clip.estimators))
        raise InputError(f"clip={settings['clip']!r} takes estimator={takes}, not {estimator!r}")
    if clip.bounds and z_old != 1:
        raise InputError(
            f"z_old={z_old} takes clip='none', not {settings['clip']!r}: clips are for a normalized reference"
        )
    if divergence != "alpha" and settings["alpha"] is not None:
        raise InputError(f"alpha={settings['alpha']} cannot matter with divergence={divergence!r}; leave alpha unset")
    alpha = (settings["alpha"] or ALPHA) if divergence == "alpha" else None
    surrogate, unclipped = surrogates.ESTIMATORS[estimator], ALWAYS
    if settings["clip"] == "dual" and divergence in OWN_CONTROL:
        surrogate, unclipped = surrogates.regularized_ratio, IN_EXPECTATION if beta else ALWAYS
    if settings["clip"] == "coefficient":
        surrogate = surrogates.clipped_coefficient
    target = divergences.named(divergence, alpha)
    full, in_surrogate = _full_kl(settings, target), beta
    if full is not None:  # the surrogate has the reward alone
        unclipped, in_surrogate = IN_EXPECTATION, 0.0
    control = None if full is not None else _controlled(settings)
    if control is not None:
        target = DIVERGENCES["urkl"]  # whose advantage takes the control variate and the later tokens
        unclipped = IN_EXPECTATION if settings["kl"] == "token" else Claim(EXACT_MEAN, BIASED)
    region = None
    if isinstance(clip, TrustRegion):
        region = functools.partial(surrogates.kept_units, region=clip, divergence=target, beta=in_surrogate)
    reduction = _reduction(settings, level)
    bounded = UNCLIPPED if isinstance(clip, TrustRegion) else clip
    return SurrogateObjective(
        name=name,
        settings={**settings, "alpha": alpha, "estimator": estimator, "reduction": reduction},
        units=UNITS[level],
        surrogate=functools.partial(surrogate, divergence=target, beta=in_surrogate, clip=bounded, z_old=z_old),
        full_kl=full,
        control=control,
        region=region,
        level=level,
        reduction=reduction,
        divergence=divergence if beta else None,
        beta=beta,
        z_old=z_old,
        declares=_claim(unclipped, clip, reduction),
    )


def _full_kl(settings: Mapping[str, Any], target: Divergence) -> Divergence | None:
    """The divergence of kl="full", None for other kinds and without a beta; raises for what it cannot go with."""
    if settings["kl"] != "full":
        return None
    for key, fits in (("level", settings["level"] == "token"), ("control", settings["control"] is None)):
        if not fits:
            raise InputError(f"kl='full' cannot go with {key}={settings[key]!r}: it sums over the tokens' vocabulary")
    if settings["z_old"] != 1:
        raise InputError(f"kl='full' takes a normalized reference, not z_old={settings['z_old']}")
    return target if settings["beta"] else None


def _controlled(settings: Mapping[str, Any]) -> Callable | None:
    """`controls.controlled_advantage` of the settings, None where they ask for none; raises for what takes none."""
    chosen = {key: settings[key] for key in ("control", "kl") if settings[key] not in (None, "token", "full")}
    if not chosen:
        return None
    spelled = " and ".join(f"{key}={value!r}" for key, value in chosen.items())
    divergence, beta = settings["divergence"], settings["beta"]
    if divergence not in OWN_CONTROL:
        raise InputError(f"{spelled} is for divergence='rkl' or 'urkl', not {divergence!r}")
    if settings["clip"] in ("dual", "dual_reward"):
        raise InputError(f"{spelled} cannot go with clip={settings['clip']!r}, which has a KL term of its own")
    if settings["kl"] == "to_go" and settings["level"] == "sequence":
        raise InputError("kl='to_go' is for level='token': over a whole response there are no later tokens")
    if not beta:
        return None
    own = OWN_CONTROL[divergence]
    c = own if settings["control"] is None else settings["control"]
    z_old, kl = settings["z_old"], settings["kl"]
    return functools.partial(controls.controlled_advantage, beta=beta, c=c, own=own, kl=kl, z_old=z_old)


def _baseline(
    loss: Callable,
    unclipped: Claim,
    *,
    regularized: bool = False,
    kl_in_reward: bool = False,
    level: str = "token",
    units: Callable | None = None,
) -> Callable[..., SurrogateObjective]:
    """The `build` of a loss of `baselines`, against a normalized reference.

    Args:
      unclipped: what is exact without a clip where beta is not 0; a regularized loss without its regularizer is exact.
      regularized: whether the loss takes beta, for an estimator of `urkl`; kl_in_reward: whether the reward does.
      units: what the loss counts; None: what its level does.
    """

    def build(name: str, settings: Mapping[str, Any], clip: Clip | TrustRegion) -> SurrogateObjective:
        reduction, beta = _reduction(settings, level), settings.get("beta", 0.0)
        in_loss = beta if regularized else 0.0
        return SurrogateObjective(
            name=name,
            settings=settings,
            units=units or UNITS[level],
            surrogate=functools.partial(loss, clip=clip, **(dict(beta=beta) if regularized else {})),
            level=level,
            reduction=reduction,
            divergence="urkl" if in_loss else None,
            beta=in_loss,
            z_old=1.0,
            reward_beta=beta if kl_in_reward else 0.0,
            declares=_claim(unclipped if in_loss or not regularized else ALWAYS, clip, reduction),
        )

    return build


RPG_FORMS = tuple((name, estimator) for name, clip in CLIPS.items() for estimator in clip.estimators)
ALWAYS, ON_POLICY, NEVER = Claim(EXACT, EXACT), Claim(EXACT, BIASED), Claim(BIASED, BIASED)
IN_EXPECTATION = Claim(EXACT_MEAN, EXACT_MEAN)
_grpo = _baseline(baselines.grpo, NEVER, regularized=True)
_ANY = dict(advantage="group_mean", sampler_correction=None)  # settings that every objective has
_NO_BOUNDS = dict(clip_low=None, clip_high=None)
_PPO = dict(clip="ppo", **_NO_BOUNDS)
_GRPO = dict(beta=0.04, **_PPO, reduction="sequence_mean_token_mean", advantage="group_mean_std")

RECIPES = {
    "rpg": Recipe(
        _rpg,
        dict(divergence="urkl", alpha=None, estimator=None, beta=1e-4, control=None, kl="token")
        | dict(clip="none", **dict.fromkeys(BOUNDS), level="token", reduction=None, z_old=1.0),
        tuple(dict(RPG_FORMS)),
    ),
    "grpo": Recipe(_grpo, _GRPO),
    "grpo_corrected": Recipe(_baseline(baselines.grpo_corrected, ALWAYS, regularized=True), _GRPO),
    "dapo": Recipe(_grpo, _GRPO | dict(beta=0.0, clip_high=0.28, reduction="token_mean")),
    "sapo": Recipe(
        _grpo,
        dict(beta=0.0, tau_pos=None, tau_neg=None, reduction=_GRPO["reduction"], advantage="group_mean_std"),
        ("sapo",),
    ),
    "dr_grpo": Recipe(_grpo, dict(beta=0.0, **_PPO, reduction="constant")),
    "ppo_clip": Recipe(_baseline(baselines.ppo_clip, ALWAYS), dict(**_PPO, reduction="token_mean")),
    "reinforce": Recipe(_baseline(baselines.policy_gradient, ON_POLICY), dict(reduction="token_mean"), ("none",)),
    "rloo": Recipe(
        _baseline(baselines.weighted_policy_gradient, ALWAYS, kl_in_reward=True, level="sequence"),
        dict(beta=0.03, reduction="sequence_mean", advantage="leave_one_out"),
        ("none",),
    ),
    "reinforce_pp": Recipe(
        _baseline(baselines.ppo_clip, ALWAYS, kl_in_reward=True),
        dict(beta=0.01, **_PPO, reduction="token_mean", advantage="whitened_return"),
    ),
    "reinforce_pp_baseline": Recipe(
        _baseline(baselines.reinforce_pp_baseline, ON_POLICY, regularized=True),
        dict(beta=1e-5, **_PPO, reduction="token_mean", advantage="whitened_group_mean"),
    ),
    "gspo": Recipe(  # never exact: the geometric mean of a response's ratios divides by its length
        _baseline(baselines.ppo_clip, NEVER, level="sequence", units=as_mean_tokens),
        dict(clip="ppo", clip_low=3e-4, clip_high=4e-4, reduction="sequence_mean", advantage="group_mean_std"),
    ),
    "gpg": Recipe(
        _baseline(baselines.policy_gradient, ON_POLICY),
        dict(reduction="token_mean", advantage="rescaled_group_mean"),
        ("none",),
    ),
    "cispo": Recipe(
        _baseline(baselines.weighted_policy_gradient, ALWAYS),
        dict(clip_high=None, reduction="token_mean", advantage="group_mean_std"),
        ("cap",),
    ),
}
for _name, _recipe in RECIPES.items():
    RECIPES[_name] = _recipe._replace(defaults={**_recipe.defaults, **_ANY, **_recipe.defaults})
