"""A user's loss as an objective, named FILE.py:NAME.

The function has the contract of `Objective.__call__`, with all arrays [B, T]. Its other parameters are its settings,
with their defaults. Settings, or attributes of the function, with the names of `FACTS` say which objective's gradient
it estimates.

An advantage may be a user's function as well: `advantage`.
"""

import dataclasses
import functools
import inspect
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax import InputError
from rpg_jax.objectives import metrics as metric
from rpg_jax.objectives import own_files, reductions
from rpg_jax.objectives.advantages import penalized
from rpg_jax.objectives.batch import UNITS, Batch
from rpg_jax.objectives.objective import Objective, measure

POSITIONAL = ("logp", "behavior_logp", "advantage", "mask")
OPTIONAL = ("reference_logp", "weight", "denominator")
CONTRACT = f"({', '.join(POSITIONAL)}, {'=None, '.join(OPTIONAL)}=None)"
REQUIRED = inspect.Parameter.empty  # the default of a setting that has none
ADVANTAGE_INPUTS = ("rewards", "lengths", "step")
ADVANTAGE = "(rewards [P, G], lengths [P, G], step) -> floats [P, G]"
FACTS = dict(level="token", divergence=None, beta=0.0, z_old=1.0, declares=None, reduction=None, advantage="group_mean")


def load(spec: str) -> Callable:
    """The function that FILE.py:NAME names; ValueError if there is none or its signature is not the contract's."""
    function = own_files.load(spec)
    signature = inspect.signature(function)
    try:
        signature.bind(*POSITIONAL, **dict.fromkeys([*OPTIONAL, *settings_of(function)]))
    except TypeError as error:
        raise InputError(f"{spec} takes {signature}; expected {CONTRACT}: {error}") from error
    in_order = [argument for argument in signature.parameters if argument in POSITIONAL]
    if in_order != [argument for argument in POSITIONAL if argument in in_order]:
        raise InputError(f"{spec} takes {signature}; expected {CONTRACT}, in that order")
    return function


def settings_of(function: Callable) -> dict:
    """The settings of a user's function, {name: default}, the default REQUIRED where it has none.

    They are its parameters beyond the contract's: beyond the first four, and those of `OPTIONAL`.
    """
    parameters = list(inspect.signature(function).parameters.values())
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    contract = {*OPTIONAL, *(p.name for p in ordered[: len(POSITIONAL)])}
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in contract]
    return {p.name: REQUIRED if p.default is p.empty else p.default for p in named}


def typed(spec: str, function: Callable, settings: Mapping[str, Any]) -> dict:
    """Settings with the types of their parameters: those of the annotations, else those of the defaults.

    A whole number is as good as a float, and a float that is whole as an int. Raises ValueError for another type, and
    for a setting that has neither a default nor a value.
    """
    parameters, defaults = inspect.signature(function).parameters, settings_of(function)
    result = dict(settings)
    for name, default in defaults.items():
        if result[name] is REQUIRED:
            raise InputError(f"{spec} needs {name}, which has no default: set it (--config.objective.{name}=VALUE)")
        annotation, kind = _kind(parameters[name].annotation), type(default)
        kind, why = (annotation, "its annotation") if annotation else (kind, f"its default {default!r}")
        if kind in CONVERTED and result[name] is not default and result[name] is not None:
            try:
                result[name] = CONVERTED[kind](result[name])
            except (TypeError, ValueError):
                needs = f"expected {kind.__name__}, the type of {why}"
                raise InputError(f"{spec}: {name}={settings[name]!r}; {needs}") from None
    return result


def _kind(annotation: Any) -> type | None:
    """float of float, "float", float | None and Optional[float]; None of what is no such type."""
    words = set(re.findall(r"\w+", str(annotation))) - {"class", "typing", "Optional", "None", "NoneType"}
    return next((kind for kind in CONVERTED if words == {kind.__name__}), None)


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    return float(value)


def _whole(value: Any) -> int:
    if not _real(value).is_integer():
        raise InputError
    return int(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, (str, numbers.Real)):
        raise TypeError
    return str(value)


CONVERTED: dict[type, Callable] = {float: _real, int: _whole, bool: _truth, str: _text}


def facts_of(function: Callable, settings: Mapping[str, Any]) -> dict:
    """The value of each of `FACTS`: from the settings, else from the function's attributes, else the default."""
    inner = getattr(function, "func", function)  # a functools.partial has no attributes of its function
    facts = {name: getattr(function, name, getattr(inner, name, default)) for name, default in FACTS.items()}
    return facts | {name: settings[name] for name in FACTS if settings.get(name) is not None}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OwnObjective(Objective):
    """A user's function with its settings. It gets inputs that `prepare` has cleaned; our metrics join its own."""

    function: Callable

    def measured_loss(self, tokens: Batch, denominator: ArrayLike | None) -> tuple[jax.Array, metric.Metrics]:
        logp, behavior_logp, reference_logp, advantage, weight, mask = tokens
        constants = dict(reference_logp=reference_logp, weight=weight, denominator=denominator)
        loss, metrics = returned(self.function(logp, behavior_logp, advantage, mask, **constants), self.name)
        # Our metrics win where names are equal: the reference schedule reads one of them.
        return loss, metrics | measure(tokens, UNITS[self.level](tokens))

    def try_out(self, shape: tuple[int, int]) -> None:
        """Calls and differentiates it on arrays of that shape, and computes nothing; raises what it raises."""
        array, mask, count = (jax.ShapeDtypeStruct(*x) for x in ((shape, "float32"), (shape, bool), ((), "float32")))
        gradient = jax.value_and_grad(lambda x, *rest: self.measured_loss(Batch(x, *rest[:-1]), rest[-1]), has_aux=True)
        jax.eval_shape(gradient, array, array, array, array, array, mask, count)


def returned(result: Any, spec: str = "the function") -> tuple[Any, metric.Metrics]:
    """(loss, {name: metric}) from the result of a user's function; ValueError if it is something else."""
    if not isinstance(result, tuple) or len(result) != 2 or jnp.shape(result[0]) or not isinstance(result[1], Mapping):
        raise InputError(f"{spec}: what it returns is not a pair of a scalar loss and a dict of metrics")
    if not all(isinstance(name, str) for name in result[1]):
        raise InputError(f"{spec}: its metrics are named {list(result[1])}; expected words")
    metrics = {}
    for name, x in result[1].items():
        try:
            metrics[name] = x if metric.is_metric(x) else metric.mean_of(x)
        except (TypeError, ValueError):
            kinds = "an array, or mean_of and the like of rpg_jax.objectives.metrics"
            raise InputError(f"{spec}: its metric {name!r} is a {type(x).__name__}; expected {kinds}") from None
    return result[0], metrics


def objective(spec: str, function: Callable, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> OwnObjective:
    """The objective of a user's function with its settings, `sampler_correction` among them, and `facts_of` it.

    Tries the function out: raises ValueError where it returns something else than the contract says.
    """
    made = OwnObjective(
        name=spec,
        function=functools.partial(function, **{name: settings[name] for name in settings_of(function)}),
        settings={**settings, "advantage": facts["advantage"]},
        level=facts["level"],
        reduction=facts["reduction"] or reductions.BY_LEVEL[facts["level"]],
        divergence=facts["divergence"] if facts["beta"] else None,
        beta=facts["beta"],
        z_old=facts["z_old"],
        declares=facts["declares"],
    )
    made.try_out((2, 3))
    return made


def advantage(spec: str) -> Callable[[jax.Array, jax.Array, jax.Array, ArrayLike], jax.Array]:
    """The function that FILE.py:NAME names, as (rewards [P, G], penalty [P·G, T], mask [P·G, T], step) -> [P·G, 1].

    The user's function gets rewards f32[P, G], from which penalties are taken, and those of lengths i32[P, G], the
    tokens of responses, and step i32[], the optimizer updates so far, that it names; it returns floats [P, G].

    Raises:
      ValueError: there is no such function, it takes something else, or, when called, it returns something else.
    """
    function = own_files.load(spec, "advantage")
    signature = inspect.signature(function)
    variadic = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    first = () if "rewards" in signature.parameters else ("rewards",)  # which is then passed by position
    names = [x for x in ADVANTAGE_INPUTS if x not in first and (x in signature.parameters or variadic)]
    try:
        signature.bind(*first, **dict.fromkeys(names))
    except TypeError as error:
        raise InputError(f"advantage {spec} takes {signature}; expected {ADVANTAGE}: {error}") from error

    def of_batch(rewards, penalty, mask, step):
        left = penalized(rewards, penalty)
        lengths = jnp.sum(mask.astype(bool), axis=1, dtype=jnp.int32).reshape(left.shape)
        given = dict(zip(ADVANTAGE_INPUTS, (left, lengths, jnp.asarray(step, jnp.int32)), strict=True))
        values = function(*(given[x] for x in first), **{x: given[x] for x in names})
        if jnp.shape(values) != left.shape or not jnp.issubdtype(jnp.result_type(values), jnp.floating):
            found = f"{jnp.result_type(values)}{list(jnp.shape(values))}"
            expected = f"expected floats of the shape of rewards, {list(left.shape)}"
            raise InputError(f"advantage {spec} returns {found}; {expected}")
        return values.astype(left.dtype).reshape(-1, 1)

    return of_batch
