"""A grid of clips, bounds, betas, levels and estimators, and their exact moments as one table (docs/method.md 8)."""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd

from rpg_jax import InputError
from rpg_jax.exact.certify import Target
from rpg_jax.exact.enumeration import every_sequence
from rpg_jax.exact.verification import Case
from rpg_jax.lab.tradeoff.moments import DIRECTIONS, Moments, Situations, measurer, situations, with_settings
from rpg_jax.lab.tradeoff.settings import Grid
from rpg_jax.objectives import CLIPS, TrustRegion, make
from rpg_jax.objectives.registry import RPG_FORMS
from rpg_jax.storage.logs import Progress

SEQUENCE_LIMIT = 20_000_000  # tokens of all sequences of all situations, which are in memory at once
WORK_LIMIT = 1_000_000_000  # token gradients in all: minutes
RANGES = dict(vocab=(2, math.inf), length=(1, math.inf), problems=(1, math.inf), seed=(0, math.inf))
RANGES |= dict(distances=(0, 10), samples=(1, 1e15))
OWN = "-"  # clip and estimator of a user's objective
NUMBERS = ("beta", "clip_low", "clip_high", "clip_c")


class Form(NamedTuple):
    """One objective of the grid; None where a clip has no such bound."""

    objective: str
    divergence: str
    estimator: str
    clip: str
    level: str
    beta: float
    clip_low: float | None = None
    clip_high: float | None = None
    clip_c: float | None = None

    @property
    def settings(self) -> dict:
        """The arguments of `make` beside its name."""
        return {name: value for name, value in self._asdict().items() if name != "objective"}

    @property
    def family(self) -> tuple:
        """Shared by forms that one compiled program measures: they differ in numbers only, and `make` drops the
        divergence of all or of none, at beta = 0."""
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
    for name, values in grid._asdict().items():
        if values == ():
            raise InputError(f"{name} is empty; expected at least one value")
        if isinstance(values, tuple) and len({*values}) < len(values):
            raise InputError(f"{name} has a value twice: {values}")
        least, most = RANGES.get(name, (-math.inf, math.inf))
        for value in np.ravel(values) if name in RANGES else ():
            if not least <= value <= most:
                raise InputError(f"{name} {value}; expected {least} to {most:g}")
    cells = grid.problems * len(grid.distances) * len(DIRECTIONS)
    with np.errstate(over="ignore"):
        size = np.float64(grid.vocab) ** grid.length * grid.length * cells
    for amount, of, limit in ((size, "tokens", SEQUENCE_LIMIT), (size * forms, "token gradients of forms", WORK_LIMIT)):
        if amount > limit:
            raise InputError(
                f"a grid too large to enumerate: {grid.vocab}^{grid.length} sequences of {grid.length} tokens in "
                f"{cells:,} situations are {amount:.3g} {of}; the limit is {limit:.3g}: lower --vocab, --length, "
                "--problems or the number of --distances, --epsilons, --ceilings or --betas"
            )


def measure(grid: Grid, case: Case | None = None) -> pd.DataFrame:
    """The moments of the built-in forms, or of a user's objective and beside it the unclipped loss of the same target.

    As `long_table`; in float64, with progress on stderr. Raises InputError: see `check`; or a setting that `make`
    refuses.
    """
    objective, target = case.members[0] if case else (None, Target())
    forms = built_in_forms(grid)
    if case:
        of = dict(divergence=target.divergence or "urkl", level=target.level, beta=target.beta)  # any, at beta = 0
        forms = [Form(case.name, estimator=OWN, clip=OWN, **of), Form("rpg", estimator="reinforce", clip="none", **of)]
    check(grid, len(forms))
    losses = [  # all are checked before any is measured
        objective if form.clip == OWN else make(form.objective, reduction="constant", z_old=target.z, **form.settings)
        for form in forms
    ]
    with jax.enable_x64():
        where = _situations(grid)
        measurers, measured = {}, []
        with Progress("forms", 0, len(forms), process_index=0) as progress:
            for form, loss in zip(forms, losses, strict=True):
                if form.family not in measurers:
                    build = (lambda _, loss=loss: loss) if form.clip == OWN else functools.partial(with_settings, loss)
                    measurers[form.family] = measurer(where, build, form.level, form.divergence, target.z)
                numbers = {name: value for name in NUMBERS if (value := getattr(form, name)) is not None}
                measured.append((form, measurers[form.family](numbers)))
                progress(len(measured))
    return long_table(grid, where, measured)


def long_table(grid: Grid, where: Situations, measured: Iterable[tuple[Form, Moments]]) -> pd.DataFrame:
    """A row for each form, direction, distance and problem: `Form` (NaN for None), `direction`, `kl` (behavior ||
    policy), `problem`, `kl_back` (policy || behavior), and `Moments`."""
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


def _situations(grid: Grid) -> Situations:
    space = every_sequence(f"{grid.vocab} tokens, length {grid.length}", grid.vocab, grid.length)
    return situations(space, grid.problems, grid.distances, grid.seed)
