"""What is compared in a report: which runs, on which tasks, at which step; and what of it is significant."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

from rpg_jax.lab.reporting.estimates import (
    Estimate,
    holm,
    improvement_estimate,
    iqm_estimate,
    least_p,
    permutation_p,
)
from rpg_jax.lab.reporting.runs import Run, Variant

SIGNIFICANT = 0.05
MOST_NAMES = 8  # in a sentence


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Variants at one step: the last one to which every finished run, and at least one run of each variant, came.

    Unfinished runs that did not come so far are in `short`; they are shown, and not averaged with the others. A variant
    none of whose runs came half as far as the finished ones does not hold up the others.
    """

    variants: list[Variant]  # those with a run that came to the step
    behind: list[Variant]  # those with an evaluated run, but none so far
    unseen: list[Variant]  # those without
    tasks: list[str]
    partial: list[str]  # tasks that only some runs were evaluated on
    step: int

    @property
    def evaluated(self) -> list[Variant]:
        return [*self.variants, *self.behind]

    def horizon(self, run: Run) -> int:
        """The last step that a run was evaluated at; -1 if none."""
        return max(run.evaluated(self.tasks), default=-1)

    @functools.cached_property
    def members(self) -> dict:
        """{variant name: its runs that came to the step}."""
        return {v.name: [run for run in v.runs if self.horizon(run) >= self.step] for v in self.variants}

    @functools.cached_property
    def short(self) -> list[tuple[str, Run]]:
        """(variant name, run) of each run that was evaluated, but not so late."""
        return [(v.name, run) for v in self.evaluated for run in v.runs if 0 <= self.horizon(run) < self.step]

    @property
    def goes_on(self) -> list[str]:
        """Variants with runs that were evaluated later."""
        return [v.name for v in self.variants if any(self.horizon(run) > self.step for run in v.runs)]

    def last(self, runs) -> np.ndarray:
        """f[runs, tasks]: scores at the step, or at each run's last evaluation before it."""
        return np.array([self._until(run)[-1] for run in runs])

    def best(self, runs) -> np.ndarray:
        """f[runs, tasks]: the best of each task's scores until the step."""
        return np.array([self._until(run).max(axis=0) for run in runs])

    def _until(self, run):
        steps = [step for step in run.evaluated(self.tasks) if step <= self.step]
        return np.array([[run.scores[task][step] for task in self.tasks] for step in steps])

    def curve(self, variant) -> dict:
        """{step: (runs, IQM)} of each step that a run was evaluated at, of the runs that were."""
        steps = sorted({step for run in variant.runs for step in run.evaluated(self.tasks)})
        return {step: self._point(variant, step) for step in steps}

    def _point(self, variant, step):
        there = [run for run in variant.runs if step in run.evaluated(self.tasks)]
        scores = np.array([[run.scores[task][step] for task in self.tasks] for run in there])
        return len(there), iqm_estimate(scores)

    @functools.cached_property
    def pairs(self) -> dict:
        """{(name, other name): `Pair`} of every two variants, both ways."""
        scores = {name: self.last(members) for name, members in self.members.items()}
        both_ways = list(itertools.combinations(scores, 2))
        p = [permutation_p(scores[a], scores[b]) for a, b in both_ways]
        found = {}
        for (a, b), alone, corrected in zip(both_ways, p, holm(p), strict=True):
            chance = improvement_estimate(scores[a], scores[b])
            gap, least = float(scores[a].mean() - scores[b].mean()), least_p(len(scores[a]), len(scores[b]))
            found[a, b] = Pair(chance, alone, float(corrected), least, gap)
            turned = Estimate(1 - chance.value, 1 - chance.high, 1 - chance.low)
            found[b, a] = found[a, b]._replace(chance=turned, gap=-gap)
        return found


class Pair(NamedTuple):
    chance: Estimate  # that a run of the one beats one of the other on a task
    p: float  # of a permutation test
    corrected: float  # that p, as Holm corrects it for all pairs
    least: float  # the smallest p that so many runs can give
    gap: float  # of mean scores

    @property
    def is_significant(self) -> bool:
        return self.p < SIGNIFICANT

    @property
    def is_certain(self) -> bool:
        """Significant among all pairs, too."""
        return self.corrected < SIGNIFICANT

    @property
    def is_suggestive(self) -> bool:
        """The interval leaves out one half, and yet the runs are too few, or too alike, for the test."""
        return not self.is_significant and (self.chance.low > 0.5 or self.chance.high < 0.5)


def compare(variants) -> Comparison:
    """Raises ValueError when nothing was evaluated, or the variants have no held-out task in common."""
    seen = [variant for variant in variants if any(run.tasks for run in variant.runs)]
    if not seen:
        raise ValueError("none of these runs has logged an evaluation (eval/TASK/mean@k) yet; wait, or name others")
    each = {variant.name: [run.tasks for run in variant.runs if run.tasks] for variant in seen}
    tasks = [t for t in each[seen[0].name][0] if all(t in some for found in each.values() for some in found)]
    if not tasks:
        told = "; ".join(f"{name}: {', '.join(found[0])}" for name, found in each.items())
        raise ValueError(f"these runs have no held-out task in common ({told}); make a report of each")
    came = {v.name: {run.path: max(run.evaluated(tasks), default=-1) for run in v.runs} for v in seen}
    ends = [came[v.name][run.path] for v in seen for run in v.runs if run.is_finished and run.tasks]
    behind = [v for v in seen if max(came[v.name].values()) < min(ends, default=0) / 2]
    ends += [max(came[v.name].values()) for v in seen if v not in behind]
    if min(ends) < 0:
        raise ValueError(f"a run has no evaluation that has all of {', '.join(tasks)}; make a report without it")
    every = dict.fromkeys(task for found in each.values() for some in found for task in some)
    return Comparison(
        variants=[v for v in seen if v not in behind],
        behind=behind,
        unseen=[v for v in variants if v not in seen],
        tasks=tasks,
        partial=[task for task in every if task not in tasks],
        step=min(ends),
    )


def verdicts(comparison: Comparison) -> list[str]:
    """What is significant and what is not, in words."""
    names, pairs = [variant.name for variant in comparison.variants], comparison.pairs
    if len(names) < 2:
        return ["There is one variant: nothing to compare it with."]
    both_ways = list(itertools.combinations(names, 2))
    lines = [_how_many(pairs, both_ways)]
    if all(pairs[pair].least >= SIGNIFICANT for pair in both_ways):
        lines.append(_too_few(comparison, pairs, both_ways))
    for name in sorted(names, key=lambda name: -comparison.last(comparison.members[name]).mean()):
        others = [other for other in names if other != name]
        better = [o for o in others if pairs[name, o].is_significant and pairs[name, o].gap > 0]
        worse = [o for o in others if pairs[name, o].is_significant and pairs[name, o].gap < 0]
        hints = [o for o in others if pairs[name, o].is_suggestive and pairs[name, o].chance.value > 0.5]
        told = [f"significantly better than {_listed(better, pairs, name)}"] if better else []
        told += [f"significantly worse than {_listed(worse, pairs, name)}"] if worse else []
        told += ["not significantly different from any other variant"] if not better + worse else []
        told += (
            [f"ahead of {_listed(hints, pairs, name)}, which these runs do not show to be more than chance"]
            if hints
            else []
        )
        lines.append(f"{name} is {'; '.join(told)}.")
    return lines


def _how_many(pairs, both_ways) -> str:
    found = sum(pairs[pair].is_significant for pair in both_ways)
    certain = sum(pairs[pair].is_certain for pair in both_ways)
    count, least = len(both_ways), min(pairs[pair].least for pair in both_ways)
    told = (
        f"{found} of {count} pair{'s' * (count != 1)} of variants differ significantly at 5 % (permutation test on the "
        f"runs' mean scores, two-sided, each pair on its own)"
    )
    if not found or count == 1:
        return f"{told}."
    told += (
        f"; up to {SIGNIFICANT * count:.1f} of {count} are to be expected by chance alone. Holm's correction for all "
        f"{count} pairs, after which even one false finding is unlikely, leaves {certain or 'none'}"
    )
    if least * count >= SIGNIFICANT:
        told += (
            f", and could not leave any: it takes a p below {SIGNIFICANT / count:.2g}, and so few runs give "
            f"{least:.2g} at the least"
        )
    return f"{told}."


def _too_few(comparison, pairs, both_ways) -> str:
    runs = sorted({len(members) for members in comparison.members.values()})
    least = min(pairs[pair].least for pair in both_ways)
    return (
        f"With {' or '.join(map(str, runs))} run{'s' * (runs != [1])} a variant nothing can be significant at 5 %: "
        f"even where every run of one beats every run of the other, chance alone does as much with probability "
        f"{least:.2g}. More seeds are needed."
    )


def _listed(names, pairs, name) -> str:
    """Names, those of one p together: "a, b (p = 0.0079), c (p = 0.02)"; of many, how many there are."""
    if len(names) > MOST_NAMES:
        return f"{len(names)} others (p at most {spelled(max(pairs[name, other].p for other in names))})"
    by_p = {}
    for other in sorted(names, key=lambda other: pairs[name, other].p):
        by_p.setdefault(spelled(pairs[name, other].p), []).append(other)
    return ", ".join(f"{', '.join(others)} (p = {p})" for p, others in by_p.items())


def spelled(p: float) -> str:
    """With two digits, or as many more as keep it on its side of 5 %."""
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in texts if (float(text) < SIGNIFICANT) == (p < SIGNIFICANT))
