"""What `python -m rpg_jax.verify` prints and writes of the forms of `lab.forms`, or of a user's function."""

import json
import time

import jax
from rich.table import Table

from rpg_jax import InputError
from rpg_jax.exact import CONDITIONS, MOVED, SPACES, Condition, level_gap, worst
from rpg_jax.exact.certify import EXTREME, NEAR, TOLERANCE, full_vocabulary_gaps, reach
from rpg_jax.exact.generators import GENERATORS, divergence_faults
from rpg_jax.exact.natural_gradient import natural_gradient_gaps, natural_gradient_holds
from rpg_jax.exact.verification import PROBLEMS, Case, Finding, find, unfinite, user_case
from rpg_jax.lab.forms import BETA, built_in_cases, reduction_faults
from rpg_jax.objectives import DIVERGENCES, make
from rpg_jax.objectives.objective import BIASED
from rpg_jax.run.target import json_file, print_table
from rpg_jax.storage.logs import Progress, jsonable

HEADER = ("objective", "divergence", "estimator", "clip", "level", "on policy", "off policy", "as declared")
FACTS = ("divergence", "beta", "level", "declares")  # flags that say what a function of the user's is held against


def main(options) -> int:
    """Verifies as the flags of `rpg_jax.verify` say; the exit status."""
    started, output = time.monotonic(), json_file(options.json)
    levels, natural, full, counts, case = None, {}, {}, {}, chosen_case(options)
    with jax.enable_x64():
        if case is None:
            names = list(DIVERGENCES)
            levels, cases, findings = level_gap("urkl", PROBLEMS), built_in_cases(), []
            with Progress("forms", 0, len(cases), process_index=0) as progress:
                for each in cases:
                    findings.append(find(each, names))
                    progress(len(findings))
            natural = {name: natural_gradient_gaps(name) for name in ("fkl", "rkl")}
            whole = make("rpg", divergence="rkl", kl="full", beta=BETA, reduction="constant")
            full = {str(condition): gap for condition, gap in full_vocabulary_gaps(whole, PROBLEMS).items()}
            counts = reduction_faults()
        else:
            names = [case.divergence] if case.divergence in DIVERGENCES else []
            if fault := unfinite(case.members[0][0]):  # of which nothing can be measured
                print(f"{case.name}: {fault}")
                if output:
                    output.write_text(json.dumps({"ok": False, "objectives": [], "fault": fault}, indent=1))
                return 1
            findings = [find(case, names)]
    wrong = {name: faults for name in names if (faults := divergence_faults(name))}
    print_rows(HEADER, [row(finding) for finding in findings])
    print_drift(findings)
    for finding in findings:
        for words in finding.case.mixes + finding.case.faults:
            print(f"{finding.case.name}: {words}")
        if finding.case.mixes and finding.case.companion:
            print(f"{finding.case.name}: examined in batches of {finding.case.companion + 1} responses")
    if levels:
        print_levels(levels)
    for name, gaps in natural.items():
        spelled = " and ".join(f"{100 * gap:.2g} %" for gap in gaps)
        print(f"Appendix B, {name}: the best step is {spelled} from F⁻¹∇J / beta at beta 10 and 100")
    if full:
        print(f"rpg, kl='full', rkl: the expected gradient is within {max(full.values()):.0e} of the token level's")
    for name, faults in wrong.items():
        print(*(f"divergence {name}: {fault}" for fault in faults), sep="\n")
    for name, fault in counts.items():
        print(f"reduction {name!r}: {fault}")
    for name in (name for name in names if name not in GENERATORS and name != "alpha"):
        print(f"divergence {name}: held against its own rho only; rpg_jax/exact/generators.py has no generator of it")
    failures = [finding for finding in findings if not finding.holds()]
    beside = {  # what else is wrong: words -> names
        "Divergences with the faults named above": list(wrong),
        "kl='full' is not exact in expectation": [at for at, gap in full.items() if not gap < TOLERANCE],
        "Steps that are not natural policy gradient steps": [
            name for name, gaps in natural.items() if not natural_gradient_holds(gaps)
        ],
        "Reductions with the faults named above": list(counts),
    }
    ok = not (failures or any(beside.values()))
    if output:
        report = {
            "ok": ok,
            "objectives": [entry for finding in findings for entry in as_json(finding)],
            "divergence_faults": wrong,
            "natural_gradient_gaps": natural,
            "full_vocabulary_gaps": full,
            "token_level_against_sequence_level": levels
            and [{**_named(c), "distance": None, "reward_gap": a, "divergence_gap": b} for c, (a, b) in levels.items()],
        }
        report |= {"reduction_faults": counts} if counts else {}
        output.write_text(json.dumps(jsonable(report), indent=1))
    situations, (token, response, advantage) = len(SPACES) * len(NEAR + EXTREME), reach(PROBLEMS)
    print(f"\nForms: {len(findings)}, each in {situations} situations of {PROBLEMS} problems, in ", end="")
    print(f"{time.monotonic() - started:.0f} s. A bias is that of the worst problem.")
    print(f"Far ratios reach e^±{token:.0f} for a token and e^±{response:.0f} for a response, ", end="")
    print(f"large advantages ±{advantage:.0f}; what shows there alone says so.\n{_summary(findings, failures)}")
    print(*(f"{words}: {', '.join(names)}.\n" for words, names in beside.items() if names), sep="", end="")
    if case is not None and case.declares is None:
        print(f"Declare what it is: {_declaration(findings[0])}")
    return 0 if ok else 1


def chosen_case(options) -> Case | None:
    """The function of --objective with what other flags say of it; None without one. Computes on the CPU from here."""
    jax.config.update("jax_platforms", "cpu")  # small, and in float64, which accelerators lack or slow down
    facts = {name: getattr(options, name) for name in FACTS if getattr(options, name) is not None}
    if options.objective is None:
        if facts:
            raise InputError(f"--{next(iter(facts))} goes with --objective=FILE.py:NAME")
        return None
    if "," in facts.get("declares", ""):
        facts["declares"] = [claim.strip() for claim in facts["declares"].split(",")]
    return user_case(options.objective, facts)


def row(finding: Finding) -> tuple[str, ...]:
    """The line of a finding under `HEADER`."""
    declared = "NO" if not finding.holds() else "declares nothing" if finding.case.declares is None else "yes"
    seen = [finding.seen(on_policy) for on_policy in (True, False)]
    return (*finding.case[:5], *(f"{gap}, {where}" if where else str(gap) for where, gap in seen), declared)


def print_rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """A table of aligned columns."""
    table = Table(*header, box=None, pad_edge=False, header_style="bold")
    for cells in rows:
        table.add_row(*cells, style="bold red" if cells[-1] == "NO" else None)
    print_table(table)


def print_drift(findings: list[Finding]) -> None:
    """Of what is biased off policy, how far off it is at each distance."""
    rows = [
        (*finding.case[:5], *(f"{100 * bias:.3g} %" for bias in finding.drift().values()))
        for finding in findings
        if finding.verdict(False).verdict == BIASED
    ]
    if rows:
        print("\nBias as the policy moves away, by KL(behavior || policy) in nats a sequence (median problem):")
        print_rows((*HEADER[:5], *map(str, MOVED)), rows)


def print_levels(gaps: dict) -> None:
    """How far apart the two levels' gradients are, by condition."""
    print("\nHow far the token-level objective's gradient is from the sequence-level one's (worst):")
    print(f"  {'':37}reward part    urkl part")
    for condition, (reward, divergence) in gaps.items():
        print(f"  {str(condition):37}{100 * reward:9.1f} %{100 * divergence:11.1f} %")


def _declaration(finding: Finding) -> str:
    """What a user should write who declares nothing."""
    on, off = (finding.verdict(on_policy).verdict for on_policy in (True, False))
    name = finding.case.name.rpartition(":")[2]
    return f'{name}.declares = ("{on}", "{off}"), on and off policy, or --declares="{on}, {off}"'


def _named(condition: Condition) -> dict:
    return {"on_policy": condition.on_policy, "reference_is_behavior": condition.reference_is_behavior}


def _summary(findings, failures) -> str:
    if failures:
        return f"Not what they declare: {len(failures)}."
    silent = all(finding.case.declares is None for finding in findings)
    return "Nothing was declared, so nothing was held against it." if silent else "All are what they declare."


def as_json(finding: Finding) -> list[dict]:
    """One object a member: its settings, verdicts, and every measurement."""
    case, objects = finding.case, []
    for (loss, target), gaps in zip(case.members, finding.gaps, strict=True):
        member = Finding(case, [gaps])
        seen = {"on_policy": member.seen(True), "off_policy": member.seen(False)}
        verdicts = {name: gap for name, (_, gap) in seen.items()}
        measured = [
            {
                "space": space,
                **_named(condition),
                **({} if condition in CONDITIONS else {"situation": str(condition)}),
                "verdict": gap.verdict,
                "per_sample_gap": gap.per_sample,
                "expected_gap": gap.expected,
                "expected_gap_after_rescaling": gap.residual,
                "best_scale": gap.scale,
            }
            for (space, condition), each in gaps.items()
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
                    name: 100 * gap.expected if gap.verdict == BIASED else 0.0 for name, gap in verdicts.items()
                },
                "bias_percent_by_kl": {f"{kl:g}": 100 * bias for kl, bias in member.drift().items()},
                **({"mixes": case.mixes} if case.mixes else {}),
                **({"faults": case.faults} if case.faults else {}),
                "holds": member.holds(),
                "measurements": measured,
            }
        )
    return objects
