"""Checks by enumeration that every objective has the gradient it claims, and says how far it is where it does not.

    python -m rpg_jax.verify
    python -m rpg_jax.verify --json=out.json
    python -m rpg_jax.verify --objective=my_file.py:my_objective --divergence=urkl --beta=0.1
    python -m rpg_jax.verify --tradeoff --out=FOLDER

Sums over every outcome of small policies (a softmax, and sequences of fixed and of varying length), in float64, with
the policy equal to the behavior policy or not, and the reference equal to it or not. Two measures: each sample's
gradient against −(wA − beta·r·kappa(u)) ∇log policy, and the expected gradient against the derivative of the exact
objective. Of what is biased off policy, a second table says how far off it is at growing KL from the behavior policy.

A function of your own takes (logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None),
all [B, T] but the scalar denominator, and returns (loss, metrics); further keyword-only parameters are its settings.
What it is held against comes from the flags, or from such settings or attributes of the function: `divergence` (None:
reward only), `beta`, `level` ("token" or "sequence"), `z_old`. Its attribute `declares`, or --declares, is what it
claims: "exact per sample", "exact in expectation" or "biased", or a pair of them for on and off policy. Without it
nothing is claimed. `train` and sweeps take the same FILE.py:NAME as objective.name.

With --tradeoff: the exact bias, variance and mean squared error of the gradient from N samples for each clip, epsilon,
c, beta, level and estimator, or of --objective, at policies a given KL away. Tables here, CSV and figures in --out.

Exit status: 0; 1 if something is not what it declares itself to be; 2 for a mistake in the call.
"""

import contextlib
import json
import math
import pathlib
import shutil
import statistics
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from rich.console import Console
from rich.table import Table

from rpg_jax import objectives
from rpg_jax.exact import (
    CONDITIONS,
    MOVED,
    SPACES,
    VERDICTS,
    Condition,
    Gap,
    Target,
    contract_faults,
    examine,
    level_gap,
    worst,
)
from rpg_jax.lab.tradeoff import command as verify_tradeoff
from rpg_jax.objectives import DIVERGENCES, Claim, own
from rpg_jax.objectives.advantages import kl_penalty, to_go
from rpg_jax.objectives.objective import BIASED, EXACT_MEAN
from rpg_jax.objectives.registry import RPG_FORMS, checked, of_function
from rpg_jax.run import cli

_OBJECTIVE = flags.DEFINE_string(
    "objective", None, "FILE.py:NAME of a function to examine instead of the built-in ones"
)
_DIVERGENCE = flags.DEFINE_string("divergence", None, "with --objective: the divergence of its target; default none")
_BETA = flags.DEFINE_float("beta", None, "with --objective: its coefficient; default 0")
_LEVEL = flags.DEFINE_string("level", None, "with --objective: token or sequence; default token")
_DECLARES = flags.DEFINE_string(
    "declares", None, "with --objective: what it claims to be; with a comma, on and off policy"
)
_JSON = flags.DEFINE_string("json", None, "file to write every measurement to")
flags.adopt_module_key_flags(verify_tradeoff)

PROBLEMS = 6  # random ones in each situation
BETA = 0.3  # large enough that a wrong regularizer shows
NO_DEFAULT = {"cispo": dict(clip_high=0.28)}  # settings that must be given
MASSES = (1.0, 0.5, 2.0)  # of the reference, for the forms that take an unnormalized one


class Case(NamedTuple):
    """Losses that share a line of the table: one form, at every mass Z of the reference."""

    name: str
    divergence: str
    estimator: str
    clip: str
    level: str
    members: tuple  # ((objective, Target), ...)
    declares: Claim | None


class Finding(NamedTuple):
    case: Case
    gaps: list  # of each member, (space name, condition) -> a Gap of each problem

    def verdict(self, on_policy: bool) -> Gap:
        """Worst over masses, spaces, references and problems."""
        return worst(gap for c in CONDITIONS if c.on_policy == on_policy for gap in self.at(c))

    def at(self, condition: Condition) -> list[Gap]:
        """Of every member, space and problem."""
        return [gap for gaps in self.gaps for (_, c), each in gaps.items() if c == condition for gap in each]

    def drift(self) -> dict[float, float]:
        """Distance -> bias of the median problem, of |∇J|; 0 where the verdict is exact."""
        return {
            c.distance: statistics.median(0 if gap.verdict != BIASED else gap.expected for gap in self.at(c))
            for c in MOVED
        }

    def holds(self) -> bool:
        """Whether nothing falls short of what is declared."""
        if self.case.declares is None:
            return True
        pairs = zip(self.case.declares, (self.verdict(True), self.verdict(False)), strict=True)
        return all(VERDICTS.index(gap.verdict) <= VERDICTS.index(claim) for claim, gap in pairs)


def built_in_cases() -> list[Case]:
    """Every objective × divergence × estimator × clip × level × mass, reduced by a constant; then other reductions."""
    cases = []
    for level in ("token", "sequence"):
        for divergence in DIVERGENCES:
            for clip, estimator in RPG_FORMS:
                settings = dict(divergence=divergence, estimator=estimator, clip=clip, level=level, beta=BETA)
                masses = MASSES if clip == "none" else (1.0,)
                losses = [objectives.make("rpg", reduction="constant", z_old=z, **settings) for z in masses]
                cases.append(_case("rpg", losses))
    for divergence in ("rkl", "urkl"):  # Algorithm 1 unclipped
        bounds = dict(clip_low=1.0, clip_high=1e9, clip_c=1e9)
        loss = objectives.make("rpg", divergence=divergence, clip="dual", beta=BETA, reduction="constant", **bounds)
        claim = Claim("exact in expectation", "exact in expectation")
        cases.append(_case("rpg", [loss])._replace(clip="dual, out of reach", declares=claim))
    for name, recipe in objectives.RECIPES.items():
        if name != "rpg":
            given = NO_DEFAULT.get(name, {}) | (dict(beta=BETA) if recipe.defaults.get("beta") else {})
            clips = [dict(clip=clip) for clip in recipe.clips] if "clip" in recipe.defaults else [{}]
            losses = [objectives.make(name, reduction="constant", **given, **clip) for clip in clips]
            cases += [_case(name, [loss]) for loss in losses]
            if losses[0].reward_beta:
                cases.append(_kl_in_reward(losses[-1]))
    for reduction in ("token_mean", "sequence_mean", "sequence_mean_token_mean"):
        cases.append(_case(f"rpg, {reduction}", [objectives.make("rpg", beta=BETA, reduction=reduction)]))
    return cases


def _kl_in_reward(objective) -> Case:
    """The loss, with its KL taken out of the reward: on policy that is the gradient of `rkl` over sequences."""

    def loss(logp, behavior_logp, advantage, mask, reference_logp=None, weight=None, denominator=None):
        penalty = kl_penalty(behavior_logp, reference_logp, mask, objective.reward_beta)
        mean = jnp.sum(jnp.where(mask, advantage, 0), axis=1, keepdims=True) / jnp.sum(mask, axis=1, keepdims=True)
        cost = penalty.sum(axis=1, keepdims=True) if objective.level == "sequence" else to_go(penalty)
        return objective(logp, behavior_logp, mean - cost, mask, reference_logp, weight, denominator)

    case = _case(f"{objective.name}, KL in the reward", [objective])
    target = Target("sequence", "rkl", objective.reward_beta)
    return case._replace(divergence="rkl", members=((loss, target),), declares=Claim(EXACT_MEAN, BIASED))


def _case(name, losses) -> Case:
    first, get = losses[0], losses[0].settings.get
    members = tuple((loss, Target(loss.level, loss.divergence, loss.beta, loss.z_old)) for loss in losses)
    return Case(
        name, first.divergence or "-", get("estimator") or "-", get("clip") or "-", first.level, members, first.declares
    )


def user_case(spec: str) -> Case:
    """A user's function and what it is held against: flags first, then what its settings or attributes say."""
    given = {flag.name: flag.value for flag in (_DIVERGENCE, _BETA, _LEVEL, _DECLARES) if flag.value is not None}
    if "," in given.get("declares", ""):
        given["declares"] = [claim.strip() for claim in given["declares"].split(",")]
    with cli.door():
        function = own.load(spec)
        settings = own.settings_of(function)
        settings |= {name: value for name, value in given.items() if name in settings}
        facts = checked(own.facts_of(function, settings) | given)
        made = of_function(spec, function, {name: settings[name] for name in given if name in settings})
    divergence, level, beta = (facts[name] for name in ("divergence", "level", "beta"))
    if (divergence is None) != (not beta):
        raise cli.Mistake(
            f"{spec} has divergence {divergence} and beta {beta}: give both (--divergence, --beta) or neither"
        )
    target = Target(level, divergence, beta, facts["z_old"])
    loss = getattr(made, "function", made)  # as it is, on inputs that nobody has cleaned
    return Case(spec, divergence or "-", "-", "-", level, ((loss, target),), facts["declares"])


def as_json(finding: Finding) -> list[dict]:
    """One object a member: its settings, verdicts, and every measurement."""

    def number(x):
        return x if math.isfinite(x) else None

    case, objects = finding.case, []
    for (loss, target), gaps in zip(case.members, finding.gaps, strict=True):
        one = Finding(case, [gaps])
        verdicts = {"on_policy": one.verdict(True), "off_policy": one.verdict(False)}
        measured = [
            {
                "space": space,
                "on_policy": condition.on_policy,
                "reference_is_behavior": condition.reference_is_behavior,
                "verdict": gap.verdict,
                "per_sample_gap": number(gap.per_sample),
                "expected_gap": number(gap.expected),
                "expected_gap_after_rescaling": number(gap.residual),
                "best_scale": number(gap.scale),
            }
            for (space, condition), each in gaps.items()
            if condition in CONDITIONS
            for gap in [worst(each)]
        ]
        objects.append(
            {
                "objective": case.name,
                "divergence": target.divergence,
                "estimator": case.estimator,
                "clip": case.clip,
                "level": target.level,
                "beta": target.beta,
                "z_old": target.z,
                "settings": dict(getattr(loss, "settings", {})),
                "declares": case.declares and case.declares._asdict(),
                "verdict": {name: gap.verdict for name, gap in verdicts.items()},
                "bias_percent": {
                    name: number(100 * gap.expected) if gap.verdict == BIASED else 0.0 for name, gap in verdicts.items()
                },
                "bias_percent_by_kl": {f"{kl:g}": number(100 * bias) for kl, bias in one.drift().items()},
                "holds": one.holds(),
                "measurements": measured,
            }
        )
    return objects


HEADER = ("objective", "divergence", "estimator", "clip", "level", "on policy", "off policy", "as declared")


def row(finding: Finding) -> tuple:
    declared = "-" if finding.case.declares is None else "yes" if finding.holds() else "NO"
    return (*finding.case[:5], str(finding.verdict(True)), str(finding.verdict(False)), declared)


def print_table(header: tuple, rows: list[tuple]):
    """A table on a terminal wide enough for it; else, and in a pipe, aligned lines."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    framed = sum(widths) + 3 * len(widths) + 1
    if not sys.stdout.isatty() or shutil.get_terminal_size().columns < framed:
        for cells in (header, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        return
    table = Table(*header)
    for cells in rows:
        table.add_row(*cells, style="bold red" if cells[-1] == "NO" else None)
    Console().print(table)


def print_drift(findings):
    """Of what is biased off policy, how far off it is at each distance."""
    rows = [
        (*finding.case[:5], *(f"{100 * bias:.3g} %" for bias in finding.drift().values()))
        for finding in findings
        if finding.verdict(False).verdict == BIASED
    ]
    if rows:
        print("\nBias as the policy moves away, by KL(behavior || policy) in nats a sequence (median problem):")
        print_table((*HEADER[:5], *map(str, MOVED)), rows)


def print_levels(gaps: dict):
    print("\nHow far the token-level objective's gradient is from the sequence-level one's (worst):")
    print(f"  {'':37}reward part    urkl part")
    for condition, (reward, divergence) in gaps.items():
        print(f"  {str(condition):37}{100 * reward:9.1f} %{100 * divergence:11.1f} %")


def _summary(findings, failures) -> str:
    if failures:
        return f"Not what they declare: {len(failures)}."
    silent = all(finding.case.declares is None for finding in findings)
    return "Nothing was declared." if silent else "All are what they declare."


@contextlib.contextmanager
def running(spec: str):
    """Where a user's function runs: what it raises becomes a `cli.Mistake`."""
    try:
        yield
    except cli.Mistake:
        raise
    except Exception as error:
        raise cli.Mistake(
            f"{spec} does not run as {own.CONTRACT} -> (loss, metrics): {own.in_a_line(error)}"
        ) from error


def tradeoff(started: float, output):
    """--tradeoff, of the built-in forms or of --objective."""
    case, faults = None, []
    if (spec := _OBJECTIVE.value) is not None:
        case = user_case(spec)
        with running(spec):
            faults = contract_faults(case.members[0][0])
            result = verify_tradeoff.measure(case)
    else:
        result = verify_tradeoff.measure()
    verify_tradeoff.report(print_table, result, output)
    for fault in faults:
        print(f"contract: {fault}")
    print(f"Forms: {len(result.forms)}, in {time.monotonic() - started:.0f} s.")


def main(argv):
    del argv
    jax.config.update("jax_platforms", "cpu")  # small, and in float64, which accelerators lack or slow down
    started = time.monotonic()
    only = [flag.name for flag in (_DIVERGENCE, _BETA, _LEVEL, _DECLARES) if flag.value is not None]
    if only and _OBJECTIVE.value is None:
        raise cli.Mistake(f"--{only[0]} goes with --objective=FILE.py:NAME")
    output = pathlib.Path(_JSON.value) if _JSON.value else None
    if output and not output.parent.is_dir():
        raise cli.Mistake(f"--json={output}: there is no folder {output.parent}")
    if verify_tradeoff.asked():
        return tradeoff(started, output)
    faults, levels = [], None
    with jax.enable_x64():
        if _OBJECTIVE.value is not None:
            cases = [user_case(_OBJECTIVE.value)]
            with running(_OBJECTIVE.value):
                faults = contract_faults(cases[0].members[0][0])
                findings = [Finding(case, [examine(*member, PROBLEMS) for member in case.members]) for case in cases]
        else:
            findings = [
                Finding(case, [examine(*member, PROBLEMS) for member in case.members]) for case in built_in_cases()
            ]
            levels = level_gap("urkl", PROBLEMS)
    print_table(HEADER, [row(finding) for finding in findings])
    print_drift(findings)
    if levels:
        print_levels(levels)
    for fault in faults:
        print(f"contract: {fault}")
    failures = [finding for finding in findings if not finding.holds()]
    if output:
        report = {
            "ok": not failures,
            "objectives": [entry for finding in findings for entry in as_json(finding)],
            "contract_faults": faults,
            "token_level_against_sequence_level": levels
            and [{**c._asdict(), "reward_gap": a, "divergence_gap": b} for c, (a, b) in levels.items()],
        }
        with cli.door():
            output.write_text(json.dumps(report, indent=1))
    situations = len(SPACES) * len(CONDITIONS)
    print(f"\nForms: {len(findings)}, each in {situations} situations of {PROBLEMS} problems, in ", end="")
    print(f"{time.monotonic() - started:.0f} s. A bias is that of the worst problem. {_summary(findings, failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    cli.run(main)
