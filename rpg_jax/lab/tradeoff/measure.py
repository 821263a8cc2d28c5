"""A grid of clips, bounds, betas, levels and estimators, and their exact moments as one table (docs/method.md 8)."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd

from rpg_jax import InputError
from rpg_jax.exact.certify import Target
from rpg_jax.exact.enumeration import every_sequence
from rpg_jax.lab.tradeoff.moments import DIRECTIONS, Moments, Situations, measurer, situations, with_settings
from rpg_jax.lab.tradeoff.settings import Grid
from rpg_jax.objectives import CLIPS, TrustRegion, make
from rpg_jax.objectives.registry import RPG_FORMS
from rpg_jax.storage.logs import Progress

SEQUENCE_LIMIT = 20_000_000  # tokens of all sequences of all situations, which are in memory at once
WORK_LIMIT = 1_000_000_000  # token gradients in all: minutes
MOST_SAMPLES = 10**15
NUMBERS = ("beta", "clip_low", "clip_high", "clip_c")


class Form(NamedTuple):
    """One objective of the grid; None where a clip has no such bound."""

    objective: str
    divergence: str
    estimator: str
    clip: str
    level: str
    beta: float
    clip_low: float | None
    clip_high: float | None
    clip_c: float | None

    @property
    def family(self) -> tuple:
        """Shared by forms that differ in numbers only, which one compiled program measures.

        beta = 0 is a family of its own, because `make` drops the divergence there.
        """
        return (*self[:5], self.beta == 0)


def built_in_forms(grid: Grid) -> list[Form]:
    """Every level × divergence × clip and estimator × beta × bounds that the clip has."""
    forms = []
    for level in ("token", "sequence"):
        for divergence in grid.divergences:
            for clip, estimator in RPG_FORMS:
                if isinstance(CLIPS[clip], TrustRegion) or clip in ("dual_reward", "coefficient", "sapo"):
                    continue  # the clips that the study measured; trust regions act beside the surrogate
                pairs = grid.epsilons if "clip_low" in CLIPS[clip].bounds else ((None, None),)
                ceilings = grid.ceilings if "clip_c" in CLIPS[clip].bounds else (None,)
                forms += [
                    Form("rpg", divergence, estimator, clip, level, beta, low, high, c)
                    for beta in grid.betas
                    for low, high in pairs
                    for c in ceilings
                ]
    return forms


def check(grid: Grid, forms: int) -> None:
    """Raises InputError if the grid is empty, has values out of range, or is too large to enumerate."""
    for name in ("distances", "samples", "epsilons", "ceilings", "betas", "divergences"):
        if not getattr(grid, name):
            raise InputError(f"{name} is empty; expected at least one value")
        if len(set(getattr(grid, name))) < len(getattr(grid, name)):
            raise InputError(f"{name} has a value twice: {getattr(grid, name)}")
    for name, least in (("vocab", 2), ("length", 1), ("problems", 1), ("seed", 0)):
        if getattr(grid, name) < least:
            raise InputError(f"{name} is {getattr(grid, name)}; expected at least {least}")
    for name, least, most in (("distances", 0, 10), ("samples", 1, MOST_SAMPLES)):
        for value in getattr(grid, name):
            if not least <= value <= most:
                raise InputError(f"{name} {value}; expected {least} to {most:g}")
    cells = grid.problems * len(grid.distances) * len(DIRECTIONS)
    try:
        size = float(grid.vocab) ** grid.length * grid.length * cells
    except OverflowError:
        size = math.inf
    spelled = f"{grid.vocab}^{grid.length} sequences of {grid.length} tokens in {cells:,} situations"
    work = {"": (size, SEQUENCE_LIMIT, "tokens"), f" for {forms} forms": (size * forms, WORK_LIMIT, "token gradients")}
    for what, (found, limit, unit) in work.items():
        if found > limit:
            amount = f"{found:.3g}" if math.isfinite(found) else "over 1e+308"
            raise InputError(
                f"a grid too large to enumerate: {spelled}{what} are {amount} {unit}; the limit is {limit:.3g}: lower "
                "--vocab, --length, --problems or the number of --distances, --epsilons, --ceilings or --betas"
            )


def measure(grid: Grid) -> pd.DataFrame:
    """The moments of the built-in forms, as `long_table`; in float64, with progress on stderr.

    Raises:
      ValueError: see `check`; or a setting that `make` refuses.
    """
    forms = built_in_forms(grid)
    check(grid, len(forms))
    losses = [make(reduction="constant", **_settings(form)) for form in forms]  # all are checked before any is measured
    with jax.enable_x64():
        where = _situations(grid)
        measurers, measured = {}, []
        with Progress("forms", 0, len(forms), process_index=0) as progress:
            for form, loss in zip(forms, losses, strict=True):
                if form.family not in measurers:
                    build = functools.partial(with_settings, loss)
                    measurers[form.family] = measurer(where, build, form.level, form.divergence)
                numbers = {name: value for name in NUMBERS if (value := getattr(form, name)) is not None}
                measured.append((form, measurers[form.family](numbers, form.beta)))
                progress(len(measured))
    return long_table(grid, where, measured)


def measure_objective(grid: Grid, name: str, objective: Callable, target: Target) -> pd.DataFrame:
    """A user's objective, and beside it the unclipped loss of the same target; in float64.

    Raises:
      ValueError: see `check`.
    """
    divergence = target.divergence or "urkl"  # any, at beta = 0
    user = Form(name, divergence, "-", "-", target.level, target.beta, None, None, None)
    exact = Form("rpg", divergence, "reinforce", "none", target.level, target.beta, None, None, None)
    check(grid, 2)
    with jax.enable_x64():
        where = _situations(grid)
        losses = (objective, make(reduction="constant", z_old=target.z, **_settings(exact)))
        measured = []
        for form, loss in zip((user, exact), losses, strict=True):
            measure = measurer(where, lambda _, loss=loss: loss, target.level, divergence, target.z)
            measured.append((form, measure({}, target.beta)))
    return long_table(grid, where, measured)


def long_table(grid: Grid, where: Situations, measured: Iterable[tuple[Form, Moments]]) -> pd.DataFrame:
    """A row for each form, direction, distance and problem.

    Columns: the fields of `Form` (NaN for None), `direction`, `kl` (behavior || policy), `problem`, `kl_back`
    (policy || behavior), and the fields of `Moments`.
    """
    names = ("direction", "kl", "problem")
    situation = pd.MultiIndex.from_product((DIRECTIONS, grid.distances, range(grid.problems)), names=names)
    kl_back = np.asarray(where.kl_back).reshape(where.shape)
    frames = [
        situation.to_frame(index=False).assign(
            **{name: math.nan if value is None else value for name, value in form._asdict().items()},
            **{name: np.swapaxes(x, 0, 1).ravel() for name, x in dict(kl_back=kl_back, **moments._asdict()).items()},
        )
        for form, moments in measured
    ]
    table = pd.concat(frames, ignore_index=True)
    text = table.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in table.dtypes]]
    return table.astype(dict.fromkeys(text, "category"))  # groupby and merge take a fifth of the time


def _settings(form: Form) -> dict:
    """The arguments of `make`."""
    settings = form._asdict()
    return {"name": settings.pop("objective"), **settings}


def _situations(grid: Grid) -> Situations:
    space = every_sequence(f"{grid.vocab} tokens, length {grid.length}", grid.vocab, grid.length)
    return situations(space, grid.problems, grid.distances, grid.seed)
