"""A user's loss as an objective, named FILE.py:NAME.

The function has the contract of `Objective.__call__`, with all arrays [B, T]. Its keyword-only parameters are its
settings, with their defaults. Settings, or attributes of the function, with the names of `FACTS` say which objective's
gradient it estimates.
"""

import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rpg_jax.objectives import metrics as metric
from rpg_jax.objectives import reductions
from rpg_jax.objectives.batch import UNITS, Batch
from rpg_jax.objectives.objective import Objective, measure

POSITIONAL = ("logp", "behavior_logp", "advantage", "mask")
OPTIONAL = ("reference_logp", "weight", "denominator")
CONTRACT = f"({', '.join(POSITIONAL)}, {'=None, '.join(OPTIONAL)}=None)"
MODULE = "own_objective"  # the name under which the user's file is imported
FACTS = dict(level="token", divergence=None, beta=0.0, z_old=1.0, declares=None, reduction=None, advantage="group_mean")


def load(spec: str) -> Callable:
    """The function that FILE.py:NAME names; ValueError if there is none or its signature is not the contract's."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise ValueError(f"objective {spec!r}: expected FILE.py:NAME")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"objective {spec!r}: there is no file {path}")
    loader = importlib.machinery.SourceFileLoader(MODULE, path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules[loader.name] = module
    sys.path.insert(0, str(pathlib.Path(path).resolve().parent))
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} does not import: {in_a_line(error)}") from error
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{path} has no {name!r}; it has: {', '.join(functions) or 'no function'}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{spec} is a {type(function).__name__}; expected a function {CONTRACT} -> (loss, metrics)")
    signature = inspect.signature(function)
    try:
        signature.bind(*POSITIONAL, **dict.fromkeys(OPTIONAL))
    except TypeError as error:
        raise ValueError(f"{spec} takes {signature}; expected {CONTRACT}: {error}") from error
    in_order = [argument for argument in signature.parameters if argument in POSITIONAL]
    if in_order != [argument for argument in POSITIONAL if argument in in_order]:
        raise ValueError(f"{spec} takes {signature}; expected {CONTRACT}, in that order")
    return function


def settings_of(function: Callable) -> dict:
    """The settings of a user's function, {name: default}: its keyword-only parameters beyond the contract's."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in OPTIONAL}


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
        loss, metrics = returned(self.function(logp, behavior_logp, advantage, mask, **constants))
        # Our metrics win where names are equal: the reference schedule reads one of them.
        return loss, metrics | measure(tokens, UNITS[self.level](tokens))

    def try_out(self, shape: tuple[int, int]) -> None:
        """Raises ValueError if it cannot be called and differentiated on arrays of that shape; computes nothing."""
        array, mask, count = (jax.ShapeDtypeStruct(*x) for x in ((shape, "float32"), (shape, bool), ((), "float32")))
        gradient = jax.value_and_grad(lambda x, *rest: self.measured_loss(Batch(x, *rest[:-1]), rest[-1]), has_aux=True)
        try:
            jax.eval_shape(gradient, array, array, array, array, array, mask, count)
        except Exception as error:
            raise ValueError(
                f"{self.name} does not run as {CONTRACT} -> (loss, metrics): {in_a_line(error)}"
            ) from error


def returned(result: Any) -> tuple[Any, metric.Metrics]:
    """(loss, {name: metric}) from the result of a user's function; TypeError if it is something else."""
    if not isinstance(result, tuple) or len(result) != 2 or jnp.shape(result[0]) or not isinstance(result[1], Mapping):
        raise TypeError("what it returns is not a pair of a scalar loss and a dict of metrics")
    if not all(isinstance(name, str) for name in result[1]):
        raise TypeError(f"its metrics are named {list(result[1])}; expected words")
    metrics = {}
    for name, x in result[1].items():
        try:
            metrics[name] = x if metric.is_metric(x) else metric.mean_of(x)
        except (TypeError, ValueError):
            kinds = "an array, or mean_of and the like of rpg_jax.objectives.metrics"
            raise TypeError(f"its metric {name!r} is a {type(x).__name__}; expected {kinds}") from None
    return result[0], metrics


def objective(spec: str, function: Callable, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> OwnObjective:
    """The objective of a user's function with its settings, `sampler_correction` among them, and `facts_of` it.

    Raises ValueError for a function that cannot be called and differentiated as the contract says.
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


def in_a_line(error: BaseException) -> str:
    """One line about an error in the user's file: its type, the line of the file, and its text."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__") == MODULE]
    where = f" on line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())[:300]}"
