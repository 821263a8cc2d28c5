"""What is examined and what is found: losses with the target that they claim, of which a user's function is one."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rpg_jax import InputError
from rpg_jax.exact.batches import entangled, miscounted
from rpg_jax.exact.certify import VERDICTS, Gap, Target, examine, worst
from rpg_jax.exact.enumeration import CONDITIONS, FAR, LARGE, MOVED, Condition
from rpg_jax.objectives import Claim, own
from rpg_jax.objectives.objective import BIASED
from rpg_jax.objectives.registry import of_function
from rpg_jax.objectives.settings import checked

PROBLEMS = 6  # random problems in each situation
# Groups of situations by name; those of the table need none.
GROUPS = {"": CONDITIONS, **{str(moved): (moved,) for moved in MOVED}, "far ratios": FAR, "large advantages": LARGE}


class Case(NamedTuple):
    """Losses that share a line of the table: one form, at every mass Z of the reference."""

    name: str
    divergence: str
    estimator: str
    clip: str
    level: str
    members: tuple[tuple[Callable, Target], ...]
    declares: Claim | None
    mixture: str | None = None  # one of `MIXTURES`: which log-probs, where different policies drew a sequence's tokens
    companion: int = 0  # how many others each sequence is in a batch with
    mixes: tuple[str, ...] = ()  # what a gradient depends on beside its own inputs, in words
    faults: tuple[str, ...] = ()  # what no declaration allows


class Finding(NamedTuple):
    """What enumeration says of a case: for each member, (space name, condition) -> a Gap of each problem."""

    case: Case
    gaps: list[dict[tuple[str, Condition], list[Gap]]]

    def verdict(self, on_policy: bool) -> Gap:
        """The worst of all situations: the gap of `seen`."""
        return self.seen(on_policy)[1]

    def seen(self, on_policy: bool) -> tuple[str, Gap]:
        """Where the worst verdict of all situations is, a name of `GROUPS`, and its gap, worst over masses, spaces,
        references and problems: those of `CONDITIONS` if they have that verdict, else the largest of the others."""
        found = []
        for name, group in GROUPS.items():
            if gaps := [gap for c in group if c.on_policy == on_policy for gap in self.at(c)]:
                found.append((name, worst(gaps)))
        return max(found, key=lambda pair: (VERDICTS.index(pair[1].verdict), not pair[0], pair[1].expected))

    def at(self, condition: Condition) -> list[Gap]:
        """Of every member, space and problem."""
        return [gap for gaps in self.gaps for (_, c), each in gaps.items() if c == condition for gap in each]

    def drift(self) -> dict[float | None, float]:
        """Distance -> bias of the median problem, of |∇J|; 0 where the verdict is exact."""
        return {
            c.distance: statistics.median(0 if gap.verdict != BIASED else gap.expected for gap in self.at(c))
            for c in MOVED
        }

    def holds(self) -> bool:
        """Whether nothing falls short of what is declared, all gradients are finite, and the case has no faults."""
        gaps = [gap for gaps in self.gaps for each in gaps.values() for gap in each]
        if self.case.faults or not all(math.isfinite(gap.per_sample) for gap in gaps):
            return False
        if self.case.declares is None:
            return True
        pairs = zip(self.case.declares, (self.verdict(True), self.verdict(False)), strict=True)
        return all(VERDICTS.index(gap.verdict) <= VERDICTS.index(claim) for claim, gap in pairs)


def find(case: Case, names: Sequence[str]) -> Finding:
    """Examines every member of a case, in float64; `names` are the divergences of all cases to come."""
    how: dict[str, Any] = dict(mixture=case.mixture, companion=case.companion, names=tuple(names))
    return Finding(case, [examine(loss, target, PROBLEMS, **how) for loss, target in case.members])


def user_case(spec: str, facts: Mapping[str, Any]) -> Case:
    """A user's function FILE.py:NAME and what it is held against: `facts`, then its own settings or attributes.

    Raises ValueError: there is no such function, its signature is another one, or facts that make no sense.
    """
    function = own.load(spec)
    settings = own.settings_of(function)
    settings |= {name: value for name, value in facts.items() if name in settings}
    complete = checked(own.facts_of(function, settings) | dict(facts))
    made = of_function(spec, function, {name: settings[name] for name in facts if name in settings})
    divergence, level, beta = (complete[name] for name in ("divergence", "level", "beta"))
    if (divergence is None) != (not beta):
        raise InputError(
            f"{spec} has divergence {divergence} and beta {beta}: give both (--divergence, --beta) or neither"
        )
    target, by, counted = Target(level, divergence, beta, complete["z_old"]), entangled(made), miscounted(made)
    mixes = [f"mixes rows: three have other gradients in one call than in three, from {by.rows}"] if by.rows else []
    mixes += [f"mixes tokens: a token's gradient depends on {by.tokens}"] if by.tokens else []
    faults = [f"a gradient depends on {by.padding}"] if by.padding else []
    faults += [f"reduction {made.reduction!r}: {counted}"] if counted else []
    case = Case(spec, divergence or "-", "-", "-", level, ((made, target),), complete["declares"])
    return case._replace(companion=2 if by.rows else 0, mixes=tuple(mixes), faults=tuple(faults))


def unfinite(loss: Callable) -> str | None:
    """Says whether a loss or its gradient is NaN or infinite for finite inputs, off policy or on it; else None.

    Such a loss has no bias to measure. Call it with x64 enabled.
    """
    rng = np.random.default_rng(0)
    logp, behavior_logp, reference_logp = -rng.exponential(size=(3, 3, 4))
    advantage, one = rng.normal(size=logp.shape), np.ones_like(logp)

    @jax.jit
    @jax.value_and_grad
    def of_policy(logp, behavior, reference):
        return loss(logp, behavior, advantage, one > 0, reference, one, 3.0)[0]

    for where, behavior, reference in (("", behavior_logp, reference_logp), (", on policy", logp, logp)):
        for name, array in zip(("loss", "gradient"), of_policy(logp, behavior, reference), strict=True):
            if not np.isfinite(array).all():
                return f"the {name} is {'NaN' if np.isnan(array).any() else 'infinite'} for finite inputs{where}"
    return None
