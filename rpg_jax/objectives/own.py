"""Losses of one's own, by FILE.py:NAME.

A function of one's own has the contract of `Objective.__call__`, all arrays [B, T]; its keyword-only parameters are its
settings, with their defaults. What it estimates the gradient of is said by such parameters or by attributes of the
function, `FACTS`.
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
from rpg_jax.objectives.objective import UNITS, Batch, Objective, measure

POSITIONAL = ("logp", "behavior_logp", "advantage", "mask")
OPTIONAL = ("reference_logp", "weight", "denominator")
CONTRACT = f"({', '.join(POSITIONAL)}, {'=None, '.join(OPTIONAL)}=None)"
MODULE = "own_objective"  # what a file is imported as
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
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{path} has no {name!r}; it has: {', '.join(known) or 'no function'}")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{spec} is a {type(function).__name__}; expected a function {CONTRACT} -> (loss, metrics)")
    signature = inspect.signature(function)
    try:
        signature.bind(*POSITIONAL, **dict.fromkeys(OPTIONAL))
    except TypeError as error:
        raise ValueError(f"{spec} takes {signature}; expected {CONTRACT}: {error}") from error
    theirs = [argument for argument in signature.parameters if argument in POSITIONAL]
    if theirs != [argument for argument in POSITIONAL if argument in theirs]:
        raise ValueError(f"{spec} takes {signature}; expected {CONTRACT}, in that order")
    return function


def settings_of(function: Callable) -> dict:
    """Its settings, {name: default}: the keyword-only parameters that the contract does not have."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in OPTIONAL}


def facts_of(function: Callable, settings: Mapping[str, Any]) -> dict:
    """What is said of it, each of `FACTS`: by its settings, else by its attributes."""
    inner = getattr(function, "func", function)  # a functools.partial has no attributes of its function
    said = {name: getattr(function, name, getattr(inner, name, default)) for name, default in FACTS.items()}
    return said | {name: settings[name] for name in FACTS if settings.get(name) is not None}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class OwnObjective(Objective):
    """A function of one's own, with its settings, on inputs that `prepare` has cleaned; its metrics beside ours."""

    function: Callable

    def measured_loss(self, tokens: Batch, denominator: ArrayLike | None) -> tuple[jax.Array, metric.Metrics]:
        logp, behavior_logp, reference_logp, advantage, weight, mask = tokens
        constants = dict(reference_logp=reference_logp, weight=weight, denominator=denominator)
        loss, own = returned(self.function(logp, behavior_logp, advantage, mask, **constants))
        ours = measure(tokens, UNITS[self.level](tokens))
        return loss, own | ours  # ours keep their names: the reference schedule goes by one of them

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
    """(loss, {name: metric}) of what a function of one's own returned; TypeError if that is something else."""
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
    """The objective of a function with settings, `sampler_correction` among them, and `facts_of` it.

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
    """What somebody else's code raised, and on which of its lines."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_globals.get("__name__") == MODULE]
    where = f" on line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {' '.join(str(error).split())[:300]}"
