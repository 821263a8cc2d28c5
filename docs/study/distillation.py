"""Measures the runs of docs/study/distillation.md against their teacher, and draws its figure.

    python docs/study/distillation.py measure runs/distillation [MORE ...]    # distillation.parquet, in minutes
    python docs/study/distillation.py measure runs/full --file=distillation_full.parquet
    python docs/study/distillation.py draw            # distillation.svg and all tables and tests, from both files

A row of a file is a policy: a run's after its last step, or one of the two that all runs share, `before` and
`teacher`. Each answers the held-out problems, eight times each.
"""

import argparse
import collections
import functools
import itertools
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np
import pandas as pd
from scipy import stats

HERE = pathlib.Path(__file__).parent
ARMS = {
    "ufkl": "ufkl", "fkl": "fkl", "js": "js", "rkl": "rkl", "urkl": "urkl", "rkl-full": "rkl, full",
}  # fmt: skip
FULL = {"rkl-full": "rkl, full", "fkl-full": "fkl, full", "js-full": "js, full", "rkl-control": "rkl, control=kl"}
MEASURED = {  # column -> what it is, and the digits that the page prints
    "score": ("held-out mean@8", 3),
    "pass": ("held-out pass@8", 3),
    "entropy": ("entropy, nats a token", 3),
    "reverse": ("KL(student, teacher), nats a token", 3),
    "forward": ("KL(teacher, student), nats a token", 3),
}
LOGGED = {"step", "eval/all/mean@8", "eval/all/pass@8"} | {  # of metrics.jsonl, what the file keeps
    f"train/{name}"
    for name in ("accuracy", "entropy", "grad_norm", "kl_reference_forward", "kl_reference_reverse", "response_length")
}
RATE = 2e-3  # of the planned runs
SEED = 1  # of the responses that divergences are measured on; another one than that of evaluations


def measure(file: str, *outs: str) -> None:
    """Writes a row for every finished run in the folders, and for what all of them share, to a file beside this one."""
    from etils import epath

    from rpg_jax.run import build, cli, states, warm_start
    from rpg_jax.sampling import Sampling, generate
    from rpg_jax.storage.logs import read_jsonl
    from rpg_jax.training import collect, evaluation, packing
    from rpg_jax.training.experience import make_score
    from rpg_jax.training.policies import BEHAVIOR, REFERENCE, make_policies
    from rpg_jax.types import Policy

    folders = [path.parent for out in outs for path in sorted(pathlib.Path(out).glob("*/seed*/summary.json"))]
    config = cli.read_config("configs/distill.py", "measure")
    run = build.build_run(config)
    problems = list(run.data.problems("heldout"))
    frozen = states.load_frozen(config, run)
    teacher = frozen["frozen"][REFERENCE]
    shapes = states.abstract(run, functools.partial(states.build_state, run))
    of_student = make_policies(run.model, run.optimizer, run.mesh, shapes.state)
    of_teacher = make_policies(run.teacher, run.optimizer, run.mesh, jax_state(run))
    sizes = dict(max_prompt=run.rollout.max_prompt, max_new=run.rollout.max_new)
    k, rows, columns = config.evaluation.k, 64, run.loop.packed_columns
    score = make_score(run.mesh, rows=rows, temperature=1.0, logprob_chunk=56, packed_columns=columns, teacher=True)
    sampling = Sampling.make(stop_ids=run.data.tokenizer.stop_ids)
    alone = functools.partial(collect.prompts_of, run.mesh, run.data.tokenizer, problems, range(len(problems)))

    def drawn(policies, policy):
        params = policies.sampling_params(policy, {})
        return generate(
            policy.model, params, alone(samples=k, **sizes), samples=k, max_new=sizes["max_new"],
            decoding=run.rollout.decoding, sampling=sampling, key=build.noise_key(SEED, build.EVALUATION), step=0,
        )  # fmt: skip

    def compared(student, responses):
        """Means over the tokens of some responses, by name."""
        plan = packing.plan(np.asarray(responses.length), rows, columns)
        scores = score({BEHAVIOR: student, REFERENCE: teacher}, responses, plan)
        mask = np.asarray(responses.loss_mask)
        mean = lambda x: float(np.asarray(x, np.float64)[mask].mean())  # noqa: E731
        (_, entropy), (_, own, reverse, forward, agree) = scores[BEHAVIOR], scores[REFERENCE]
        return dict(
            entropy=mean(entropy), of_teacher=mean(own), reverse=mean(reverse), forward=mean(forward), agree=mean(agree)
        )

    def scored(policies, policy):
        evaluate = evaluation.make_evaluate(
            policy.model, run.data.tokenizer, run.scorer, run.mesh, k=k, rows=len(problems), temperature=1.0,
            decoding=run.rollout.decoding, key=build.noise_key(0, build.EVALUATION), **sizes,
        )  # fmt: skip
        answered = list(evaluate(policies.sampling_params(policy, {}), problems=problems))
        return evaluation.metrics(answered, run.scorer.vote)

    of_its_own = drawn(of_teacher, teacher)

    def measured(student):
        on_student, on_teacher = compared(student, drawn(of_student, student)), compared(student, of_its_own)
        both = {"entropy": on_student["entropy"], "reverse": on_student["reverse"], "forward": on_teacher["forward"]}
        return both | {"student_samples": on_student, "teacher_samples": on_teacher}

    table = []
    with run.scorer:
        for path in folders:
            _, found = states.restore_state(epath.Path(path), run, "last", frozen)
            metrics, _ = read_jsonl(path / "metrics.jsonl", {"step": int})
            last = metrics[-1]
            values = dict(score=last[f"eval/all/mean@{k}"], **{"pass": last[f"eval/all/pass@{k}"]})
            values |= measured(of_student.current(found.state))
            columns_ = {name: [row.get(name) for row in metrics] for row in metrics for name in row if name in LOGGED}
            settings = (path / "config.json").read_text()
            name = dict(arm=path.parent.name, seed=int(path.name[4:]))
            rate = json.loads(settings)["optimizer"]["learning_rate"]
            kept = dict(metrics=json.dumps(columns_), settings=settings, summary=(path / "summary.json").read_text())
            table.append(name | dict(rate=rate) | values | kept)
            print(path, {name: round(values[name], 4) for name in MEASURED}, flush=True)
        params, _ = warm_start.warm_started(config, run, epath.Path(folders[0]) / "warm_start", lambda: False)
        before = Policy(run.model, params, teacher.version)
        for arm, policies, policy in (("before", of_student, before), ("teacher", of_teacher, teacher)):
            eval_row = scored(policies, policy)
            values = dict(score=eval_row[f"all/mean@{k}"], **{"pass": eval_row[f"all/pass@{k}"]})
            values |= measured(before) if arm == "before" else dict(entropy=compared(before, of_its_own)["of_teacher"])
            table.append(dict(arm=arm, seed=0, **values, metrics=json.dumps(eval_row)))
        table.append(dict(arm="constant", seed=0, score=constant(run, problems)))
    frame = pd.DataFrame(table)
    for name in ("student_samples", "teacher_samples"):
        frame[name] = [json.dumps(value) if isinstance(value, dict) else None for value in frame[name]]
    frame.to_parquet(HERE / file, index=False)


def jax_state(run):
    """The shapes of a training state of the teacher, which is never trained: what `make_policies` lays out."""
    import dataclasses

    from rpg_jax.run import states

    alone = dataclasses.replace(run, model=run.teacher, teacher=None)
    return states.abstract(alone, functools.partial(states.build_state, alone)).state


def constant(run, problems) -> float:
    """The score of one answer for each task, that which most worked solutions of its training problems have."""
    answers = collections.defaultdict(collections.Counter)
    for problem in run.data.problems("train"):
        answers[problem.task][problem.solution.rsplit("Answer: ", 1)[1]] += 1
    pairs = [(problem, f"Answer: {answers[problem.task].most_common(1)[0][0]}") for problem in problems]
    return float(np.mean(run.scorer.submit(pairs, rewards=False).result().correct))


def intervals(frame: pd.DataFrame, arms=ARMS) -> pd.DataFrame:
    """Mean and half of the 95 % t interval over seeds, a row for each arm and two columns for each measure."""
    groups = frame[frame.arm.isin(arms)].groupby("arm")[list(MEASURED)]
    half = groups.sem().mul(stats.t.ppf(0.975, groups.size() - 1), axis=0)
    return pd.concat({"mean": groups.mean(), "half": half}, axis=1).loc[list(arms)]


def pairs(frame: pd.DataFrame, column: str, arms=ARMS) -> pd.DataFrame:
    """Arm by arm: the mean of a − b over seeds, half of its 95 % t interval, and p of the paired t-test after Holm."""
    values, rows = frame[frame.arm.isin(arms)].pivot(index="seed", columns="arm", values=column), []
    for a, b in itertools.combinations(arms, 2):
        gap = values[a] - values[b]
        half = stats.t.ppf(0.975, len(gap) - 1) * stats.sem(gap)
        rows.append((a, b, gap.mean(), half, stats.ttest_1samp(gap, 0).pvalue))
    table = pd.DataFrame(rows, columns=["a", "b", "mean", "half", "p"]).sort_values("p")
    table["p"] = (table.p * np.arange(len(table), 0, -1)).cummax().clip(upper=1)
    return table


def markdown(frame: pd.DataFrame, arms=ARMS) -> str:
    """A table of the page."""
    table, alone = intervals(frame, arms), frame.set_index("arm")
    lines = ["| | " + " | ".join(text for text, _ in MEASURED.values()) + " |", "|---" * (len(MEASURED) + 1) + "|"]
    for arm, name in arms.items():
        cells = (f"{table['mean', c][arm]:.{d}f} ± {table['half', c][arm]:.{d}f}" for c, (_, d) in MEASURED.items())
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    for arm in ("before", "teacher", "constant"):
        cells = ("" if pd.isna(x := alone[c][arm]) else f"{x:.{d}f}" for c, (_, d) in MEASURED.items())
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def slow(frame: pd.DataFrame) -> str:
    """The page's table of the runs at another rate: each seed's figures."""
    lines = []
    for arm, name in ARMS.items():
        seeds = frame[(frame.arm == arm) & (frame.rate != RATE)].sort_values("seed")
        cells = (", ".join(f"{value:.{digits}f}" for value in seeds[c]) for c, (_, digits) in MEASURED.items())
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(axes, frame: pd.DataFrame) -> None:
    from rpg_jax.lab.reporting import style

    table, alone = intervals(frame), frame.set_index("arm")
    for axis, (column, (title, _)) in zip(axes, MEASURED.items(), strict=False):
        for row, arm in enumerate(reversed(ARMS)):
            mean, half = table["mean", column][arm], table["half", column][arm]
            seeds = frame[frame.arm == arm][column]
            axis.plot(seeds, [row - 0.22] * len(seeds), color=style.COLORS[2], marker=".", markersize=4, linestyle="")
            axis.plot([mean - half, mean + half], [row, row], color=style.INK, linewidth=1.4, marker="|", markersize=8)
            axis.plot([mean], [row], color=style.INK, marker="o", markersize=5)
        for arm, dashes in (("before", ":"), ("teacher", "--")):
            if not pd.isna(value := alone[column][arm]):
                axis.axvline(value, color=style.COLORS[1], linestyle=dashes, linewidth=1.2, label=arm)
        style.frame(axis, title, "", "")
        axis.set_yticks(range(len(ARMS)), list(reversed(ARMS.values())))
    axes[0].legend(fontsize=7, frameon=False, loc="lower left")
    last = axes[len(MEASURED)]
    for number, (arm, name) in enumerate(ARMS.items()):
        curves = []
        for text in frame[frame.arm == arm].metrics:
            columns = json.loads(text)
            curves.append(pd.Series(columns["train/kl_reference_reverse"], columns["step"], dtype=float).dropna())
        mean = pd.concat(curves, axis=1).mean(axis=1)
        color, dash = style.COLORS[number % len(style.COLORS)], ("-", "--")[number % 2]
        last.plot(mean.index, mean, color=color, linestyle=dash, linewidth=1.2, label=name)
    style.frame(last, "KL(student, teacher) in training", "RL step", "")
    style.logarithmic(last, y=True)
    last.set_xscale("linear")
    last.legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=["measure", "draw"])
    parser.add_argument("folders", nargs="*", help="of runs, to measure")
    parser.add_argument("--file", default="distillation.parquet", help="beside this program, to write the measures to")
    options = parser.parse_args()
    if options.work == "measure":
        measure(options.file, *options.folders)
    else:
        from rpg_jax.lab.reporting.figures import svg_figure

        everything = pd.read_parquet(HERE / "distillation.parquet")
        read = everything[everything.rate.isna() | (everything.rate == RATE)]
        for frame, arms in (read, ARMS), (pd.read_parquet(HERE / "distillation_full.parquet"), FULL):
            print(markdown(frame, arms) + "\n")
            for measure_ in MEASURED:
                print(f"{measure_}\n{pairs(frame, measure_, arms).to_string(index=False)}\n")
        print(slow(everything))
        drawn_axes = functools.partial(draw, frame=read)
        (HERE / "distillation.svg").write_text(
            svg_figure("distillation", len(MEASURED) + 1, drawn_axes, height=2.8, columns=3) + "\n"
        )
