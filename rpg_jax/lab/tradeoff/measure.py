"""A grid of clips, bounds, betas, levels and estimators, and their exact moments by distance (docs/method.md 8)."""

import math
from typing import NamedTuple

import jax
import numpy as np

from rpg_jax.exact.certify import Target
from rpg_jax.exact.enumeration import every_sequence
from rpg_jax.lab.tradeoff.groups import GroupMoments, measure_groups
from rpg_jax.lab.tradeoff.moments import DIRECTIONS, Moments, Situations, measurer, situations, with_settings
from rpg_jax.objectives import CLIPS, make
from rpg_jax.objectives.advantages import ADVANTAGES
from rpg_jax.objectives.registry import RPG_FORMS

SEQUENCE_LIMIT = 20_000_000  # tokens of all sequences of all situations, which are in memory at once
WORK_LIMIT = 1_000_000_000  # token gradients in all: minutes
MOST_SAMPLES = 10**15
NUMBERS = ("beta", "clip_low", "clip_high", "clip_c")


class Grid(NamedTuple):
    """What is enumerated and compared. Of betas, epsilons and ceilings, tables and figures show the first."""

    vocab: int = 3
    length: int = 4
    problems: int = 100
    distances: tuple = (1e-3, 1e-2, 1e-1, 1.0)  # KL(behavior || policy), nats a sequence
    samples: tuple = (1, 4, 16, 64, 256, 1024, 4096)  # N
    epsilons: tuple = ((0.2, 0.28), (0.05, 0.05), (0.1, 0.1), (0.2, 0.2), (0.4, 0.4), (0.8, 0.8))  # (low, high)
    ceilings: tuple = (3.0, 10.0)  # c
    betas: tuple = (0.01, 0.1, 0.0)
    divergences: tuple = ("urkl",)
    group: int = 4  # G of the group baselines
    seed: int = 0


class Form(NamedTuple):
    """One line of the grid; None where a clip has no such bound."""

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
        """What forms have in common that differ in numbers only; beta = 0 drops the divergence, so is not one."""
        return (*self[:5], self.beta == 0)


class Tradeoff(NamedTuple):
    """Everything measured."""

    grid: Grid
    forms: list[Form]
    moments: list[Moments]  # of each form
    kl_back: np.ndarray  # f64[distances, directions, problems], KL(policy || behavior)
    groups: dict[tuple[str, bool, float], GroupMoments]  # empty for an objective of the user's

    def unclipped(self, form: Form) -> Moments:
        """Of the exact loss with the same target."""
        wanted = (form.divergence, form.level, form.beta)
        rows = (i for i, f in enumerate(self.forms) if f.clip == "none" and (f.divergence, f.level, f.beta) == wanted)
        return self.moments[next(rows)]


def built_in_forms(grid: Grid) -> list[Form]:
    """Every level × divergence × clip and estimator × beta × bounds that the clip has."""
    forms = []
    for level in ("token", "sequence"):
        for divergence in grid.divergences:
            for clip, estimator in RPG_FORMS:
                pairs = grid.epsilons if "clip_low" in CLIPS[clip].bounds else ((None, None),)
                ceilings = grid.ceilings if "clip_c" in CLIPS[clip].bounds else (None,)
                forms += [
                    Form("rpg", divergence, estimator, clip, level, beta, low, high, c)
                    for beta in grid.betas
                    for low, high in pairs
                    for c in ceilings
                ]
    return forms


def check(grid: Grid, forms: int):
    """Raises ValueError if the grid is empty, has values out of range, or is too large to enumerate."""
    for name in ("distances", "samples", "epsilons", "ceilings", "betas", "divergences"):
        if not getattr(grid, name):
            raise ValueError(f"{name} is empty; expected at least one value")
        if len(set(getattr(grid, name))) < len(getattr(grid, name)):
            raise ValueError(f"{name} has a value twice: {getattr(grid, name)}")
    for name, least in (("vocab", 2), ("length", 1), ("problems", 1), ("group", 2), ("seed", 0)):
        if getattr(grid, name) < least:
            raise ValueError(f"{name} is {getattr(grid, name)}; expected at least {least}")
    for distance in grid.distances:
        if not 0 <= distance <= 10:
            raise ValueError(f"distance {distance}; expected a KL of 0 to 10 nats")
    for count in grid.samples:
        if not 1 <= count <= MOST_SAMPLES:
            raise ValueError(f"samples {count}; expected 1 to {MOST_SAMPLES:g}")
    cells = grid.problems * len(grid.distances) * len(DIRECTIONS)
    try:
        size = float(grid.vocab) ** grid.length * grid.length * cells
    except OverflowError:
        size = math.inf
    spelled = f"{grid.vocab}^{grid.length} sequences of {grid.length} tokens in {cells:,} situations"
    if size > SEQUENCE_LIMIT:
        raise ValueError(
            f"a grid too large to enumerate: {spelled} have {_spelled(size)} tokens; the limit is "
            f"{SEQUENCE_LIMIT:.3g}: lower --vocab, --length, --problems or the number of --distances"
        )
    if size * forms > WORK_LIMIT:
        raise ValueError(
            f"a grid too large to enumerate: {spelled} for {forms} forms are {size * forms:.3g} token gradients; "
            f"the limit is {WORK_LIMIT:.3g}: lower --length, --problems or the number of --epsilons, --ceilings, "
            "--betas or --distances"
        )


def _spelled(size: float) -> str:
    return f"{size:.3g}" if math.isfinite(size) else "over 1e+308"


def check_groups(grid: Grid):
    """Raises ValueError if groups are too many to enumerate; `check` has seen that the sequences are not."""
    cells = grid.problems * len(grid.distances) * len(DIRECTIONS)
    sequences = grid.vocab**grid.length
    size = (grid.group + 1) * sequences * grid.length * cells * len(ADVANTAGES) * len(_group_betas(grid))
    if size > WORK_LIMIT:
        raise ValueError(
            f"a grid too large to enumerate: {sequences:,} sequences in the {grid.group + 1:,} kinds of groups of "
            f"{grid.group:,}, in {cells:,} situations for {len(ADVANTAGES)} advantages are {size:.3g} token gradients, "
            f"the limit {WORK_LIMIT:.3g}: lower --group, --length, --problems or the number of --distances"
        )


def measure(grid: Grid) -> Tradeoff:
    """The built-in forms, and every group baseline; in float64.

    Raises:
      ValueError: see `check`; or a setting that `make` refuses.
    """
    forms = built_in_forms(grid)
    check(grid, len(forms))
    check_groups(grid)
    losses = {form: _loss(form) for form in forms}  # all are checked before any is measured
    with jax.enable_x64():
        where = _situations(grid)
        groups = measure_groups(where, grid.group, _group_betas(grid))
        measurers, moments = {}, []
        for form, loss in losses.items():
            if form.family not in measurers:
                build = lambda numbers, loss=loss: with_settings(loss, numbers)  # noqa: E731
                measurers[form.family] = measurer(where, build, form.level, form.divergence)
            moments.append(measurers[form.family](_numbers(form), form.beta))
        return Tradeoff(grid, forms, moments, _shaped(where), groups)


def measure_objective(grid: Grid, name: str, objective, target: Target) -> Tradeoff:
    """A user's objective, and beside it the unclipped loss of the same target; in float64.

    Raises:
      ValueError: see `check`.
    """
    divergence = target.divergence or "urkl"  # any, at beta = 0
    mine = Form(name, divergence, "-", "-", target.level, target.beta, None, None, None)
    exact = Form("rpg", divergence, "reinforce", "none", target.level, target.beta, None, None, None)
    check(grid, 2)
    with jax.enable_x64():
        where = _situations(grid)
        loss = make(
            "rpg", divergence=divergence, level=target.level, beta=target.beta, z_old=target.z, reduction="constant"
        )
        moments = [
            measurer(where, lambda _, f=f: f, target.level, divergence, target.z)({}, target.beta)
            for f in (objective, loss)
        ]
        return Tradeoff(grid, [mine, exact], moments, _shaped(where), {})


def _situations(grid: Grid) -> Situations:
    space = every_sequence(f"{grid.vocab} tokens, length {grid.length}", grid.vocab, grid.length)
    return situations(space, grid.problems, grid.distances, grid.seed)


def _shaped(where: Situations):
    return np.asarray(where.kl_back).reshape(where.shape)


def _group_betas(grid: Grid) -> tuple:
    """The largest, at which the scale of rewards matters most, and 0."""
    return tuple(dict.fromkeys((max(grid.betas), 0.0)))


def _loss(form: Form):
    settings = form._asdict()
    return make(settings.pop("objective"), reduction="constant", **settings)


def _numbers(form: Form) -> dict:
    return {name: value for name in NUMBERS if (value := getattr(form, name)) is not None}
