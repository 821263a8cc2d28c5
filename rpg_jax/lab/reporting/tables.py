"""The words and tables of a report, from a comparison."""

import numpy as np

from rpg_jax.lab.reporting.comparable import differences, incomparable
from rpg_jax.lab.reporting.estimates import iqm_estimate
from rpg_jax.lab.reporting.page import Bullets, Cell, Heading, Table, Text
from rpg_jax.lab.reporting.runs import relevant
from rpg_jax.storage.settings import CODE

CURVES = (
    "Held-out accuracy of each variant: interquartile mean over runs x tasks and its 95 % stratified bootstrap band; "
    "gray: the other variants. Dashed where not all of the variant's runs were evaluated; dotted: the step of "
    "comparison."
)
INTERVALS = "Interquartile means at the step of comparison with 95 % stratified bootstrap intervals."
DYNAMICS = (
    "What training logs: interquartile mean over the runs of a variant, each smoothed by the mean over a tenth of its "
    "length; 95 % bootstrap bands where there are at most four variants."
)
LAST_AND_BEST = (
    "Means over runs of held-out mean@k. Last: at the step of comparison. Best: the best of a run's evaluations until "
    "then, for each task on its own, and so chosen on the problems that it is measured by. Bold: best, underlined: "
    "second best among variants; that says nothing of significance. A row without a number of runs is of one that is "
    "too short: at its own last evaluation."
)
IMPROVEMENTS = (
    "The chance that a run of the row's variant beats one of the column's on a task, with its 95 % interval; * where "
    "the permutation test is below 5 %, ** where it is after Holm's correction for all pairs, too. With few runs "
    "percentile intervals are too narrow: the test is what counts."
)
COSTS = (
    "A run's wall seconds in rollouts, rewards, log-probs, updates and evaluations; tokens generated for training, "
    "those of dropped groups among them; means over the runs that are finished, if any is. Wall seconds in all are "
    "those of the summary: the warm start, also where runs share one, and compilation are in them."
)
DEFINITIONS = [
    "Interquartile mean (IQM): the mean of the middle half of the scores of all runs x tasks (Agarwal et al. 2021, "
    "arXiv 2108.13264).",
    "95 % interval or band: percentile bootstrap, the runs of each task redrawn with replacement on their own "
    "(stratified); it speaks of other seeds on the same tasks and problems and, where runs share a warm start, from "
    "that one. One run has none.",
    "Probability of improvement: P(X > Y) + P(X = Y)/2 over pairs of runs, averaged over tasks (Mann and Whitney's U).",
    "Permutation test: a run is the unit, with its mean over tasks; all ways to divide the runs of two variants are "
    "counted, or 20,000 drawn where there are more. Holm's correction keeps the chance of even one false finding among "
    "all pairs below 5 %. What is not significant may differ all the same: few runs show large differences alone.",
]


def summary(found, variants) -> str:
    """One sentence on what there is."""
    runs = [run for variant in variants for run in variant.runs]
    return (
        f"{_count(len(variants), 'variant')}, {_count(len(runs), 'run')} in all, "
        f"{sum(run.is_finished for run in runs)} of them finished; held-out tasks: {', '.join(found.tasks)}. Variants "
        f"are compared at step {found.step}."
    )


def caveats(found, variants, twice) -> list[str]:
    """What a reader must know before believing any of it."""
    lines = [f"{name}: {_status(run)}, not in the comparison at step {found.step}" for name, run in found.short]
    lines += [f"{v.name}: no evaluation logged by any of its runs, so it is not compared" for v in found.unseen]
    for variant in variants:
        silent = [run for run in variant.runs if found.horizon(run) < 0 and variant not in found.unseen]
        lines += [f"{variant.name}: {_name(run)} has logged no evaluation" for run in silent]
        late = [run for run in found.members.get(variant.name, ()) if not run.is_finished]
        lines += [f"{variant.name}: {_status(run)}, compared as far as it came" for run in late]
    if found.partial:
        lines.append(f"held-out tasks that not all variants were evaluated on, left out: {', '.join(found.partial)}")
    if found.goes_on:
        lines.append(
            f"runs are of different lengths: some of {', '.join(found.goes_on)} were evaluated after step "
            f"{found.step}, the last that all came to; the curves show it, the comparison does not"
        )
    lost = [(run, run.lost) for variant in variants for run in variant.runs if run.lost]
    lines += [
        f"{run.path}/metrics.jsonl: {_count(count, 'line')} cut short or not readable, left out; the others are used"
        for run, count in lost
    ]
    lines += [
        f"{shorter.path} has the config and seed of {longest.path}, which came as far or farther: the same run again, "
        "counted once"
        for shorter, longest in twice
    ]
    nameless = [run.path for v in variants for run in v.runs if run.settings is None]
    lines += [
        f"{path} has no config.json that can be read: its settings and planned length are unknown" for path in nameless
    ]
    others = {v.name: relevant(v.settings) for v in variants if v.settings}
    lines += [f"not comparable in {line}" for line in incomparable(others)]
    counts = sorted({len(members) for members in found.members.values()})
    if len(counts) > 1:
        lines.append(f"variants have different numbers of runs: {', '.join(map(str, counts))}")
    sampled = sorted({k for variant in variants for run in variant.runs for k in run.responses})
    if len(sampled) > 1:
        lines.append(f"runs were evaluated with different k: mean@{', mean@'.join(map(str, sampled))}")
    return lines or ["every run is finished, of the same length, and evaluated alike"]


def _count(number, word) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _name(run) -> str:
    return run.path.name if run.seed is None else f"seed {run.seed}"


def _status(run) -> str:
    if run.last < 0:
        return f"{_name(run)} has logged nothing"
    if run.is_finished:
        return f"{_name(run)} is finished ({_count(run.last, 'step')})"
    return f"{_name(run)} is unfinished ({run.last} of {run.planned or 'unknown'} steps)"


def _marked(columns) -> list[list[Cell]]:
    """Columns of numbers as Cells of four decimals, the best and the second best marked as they are printed."""
    marked = []
    for column in columns:
        texts = [f"{value:.4f}" for value in column]
        order = sorted({float(text) for text in texts}, reverse=True)
        marks = dict(zip(order, ("best", "second"), strict=False)) if len(order) > 1 else {}
        marked.append([Cell(text, marks.get(float(text), "")) for text in texts])
    return marked


def last_and_best(found) -> Table:
    """The paper's table: a row a variant, two columns a task and two of their mean; then runs that are too short."""
    names = [variant.name for variant in found.variants]
    last = [_with_mean(found.last(found.members[name])) for name in names]
    best = [_with_mean(found.best(found.members[name])) for name in names]
    numbers = [column for pair in zip(zip(*last, strict=True), zip(*best, strict=True), strict=True) for column in pair]
    cells = zip(*_marked(numbers), strict=True)
    rows = [[name, str(len(found.members[name])), *row] for name, row in zip(names, cells, strict=True)]
    for name, run in found.short:
        pairs = zip(_with_mean(found.last([run])), _with_mean(found.best([run])), strict=True)
        numbers = [f"{value:.4f}" for pair in pairs for value in pair]
        rows.append([f"{name}, {_status(run)}", "-", *numbers])
    columns = [*found.tasks, "mean of tasks"] if len(found.tasks) > 1 else found.tasks
    return Table(["variant", "runs", *(f"{task} {kind}" for task in columns for kind in ("last", "best"))], rows)


def _with_mean(scores) -> list[float]:
    """Means over runs of each task and, of more than one, their mean."""
    means = scores.mean(axis=0)
    return [*means.tolist(), float(means.mean())] if len(means) > 1 else means.tolist()


def iqms(found) -> dict:
    """{variant name: Estimate} at the step of comparison."""
    return {variant.name: iqm_estimate(found.last(found.members[variant.name])) for variant in found.variants}


def interquartile_means(found) -> Table:
    last = iqms(found)
    best = {name: iqm_estimate(found.best(found.members[name])) for name in last}
    columns = _marked([[one.value for one in last.values()], [one.value for one in best.values()]])
    rows = []
    for name, at_last, at_best in zip(last, *columns, strict=True):
        rows.append(
            [name, str(len(found.members[name])), at_last, _interval(last[name], 4), at_best, _interval(best[name], 4)]
        )
    return Table(["variant", "runs", "IQM last", "95 %", "IQM best", "95 %"], rows)


def _interval(one, decimals) -> str:
    return "-" if np.isnan(one.low) else f"{one.low:.{decimals}f} – {one.high:.{decimals}f}"


def improvements(found) -> Table:
    names, rows = [variant.name for variant in found.variants], []
    for name in names:
        cells = []
        for other in names:
            pair = found.pairs.get((name, other))
            star = "*" * (pair.is_significant + pair.is_certain) if pair else ""
            sure = f" ({_interval(pair.chance, 2)})" if pair and pair.chance.low >= 0 else ""
            cells.append(f"{pair.chance.value:.2f}{star}{sure}" if pair else "")
        rows.append([name, *cells])
    return Table(["better than →", *names], rows)


def costs(variants) -> Table:
    rows = []
    for variant in variants:
        timed = [run for run in variant.runs if run.seconds]
        runs = [run for run in timed if run.is_finished] or timed
        if not runs:
            rows.append([variant.name, "0", *["-"] * 6])
            continue
        seconds, tokens = np.array([run.seconds for run in runs]), np.array([run.tokens for run in runs])
        steps = np.array([max(run.last, 1) for run in runs])
        wall = [run.wall_seconds for run in runs if run.wall_seconds]
        rows.append([
            variant.name,
            str(len(runs)),
            f"{seconds.mean():.1f}",
            f"{seconds.min():.1f} – {seconds.max():.1f}",
            f"{(seconds / steps).mean():.2f}",
            f"{tokens.mean():,.0f}",
            f"{tokens.sum() / seconds.sum():,.0f}",
            f"{np.mean(wall):.1f}" if wall else "-",
        ])  # fmt: skip
    header = ["variant", "runs", "seconds a run", "least – most", "seconds a step", "tokens a run", "tokens a second"]
    return Table([*header, "wall seconds in all"], rows)


def config_differences(variants) -> list:
    """A table of the settings in which variants differ, or a line that there are none."""
    known = {variant.name: variant.settings for variant in variants if variant.settings}
    found = differences(known)
    if not found:
        return [
            Text("The variants' configs do not differ, but for the seed." if known else "No run has a config.json.")
        ]
    rows = [[name, *(_shown(values[name]) for values in found.values())] for name in known]
    same = len(set().union(*known.values())) - len(found)
    text = f"- is unset: the objective's or schedule's own default. All other {same} settings are the same."
    if any(key.startswith(f"{CODE}.") for key in found):
        text += f" Under {CODE}: digests of files of one's own; runs of an edited one are of another variant."
    return [Table(["variant", *found], rows), Text(text)]


def _shown(value) -> str:
    return "-" if value is None else str(value)


def published(found, matches) -> list:
    """The paper's scores beside ours where a variant is one of its experiments; nothing where none is."""
    if not matches:
        return []
    rows, notes = [], []
    for name, match in matches.items():
        runs = found.members[name]
        last, best = found.last(runs).mean(axis=0), found.best(runs).mean(axis=0)
        for score in match.experiment.scores:
            ours = ["-", "-"]
            if score.task in found.tasks:
                column = found.tasks.index(score.task)
                ours = [f"{last[column]:.4f}", f"{best[column]:.4f}"]
            rows.append(
                [name, score.benchmark, str(score.table), f"{score.last:.4f}", ours[0], f"{score.best:.4f}", ours[1]]
            )
            notes += [f"{score.benchmark} of {match.experiment.name}: {score.note}"] if score.note else []
        unlike = "; ".join(match.differing) or "nothing that matters to the method"
        notes.append(f"{name} is {match.experiment.name} of the paper; it differs from it in: {unlike}")
    header = ["variant", "benchmark", "table", "paper's last", "our last", "paper's best", "our best"]
    return [Heading("Beside the paper"), Table(header, rows), Bullets(notes)]


def runs(found, variants) -> Table:
    """Every run there is, with how far it came."""
    rows = []
    for variant in variants:
        for run in variant.runs:
            state = "finished" if run.is_finished else "unfinished" if run.last >= 0 else "nothing logged"
            steps = f"{max(run.last, 0)} of {run.planned or '?'}"
            rows.append([variant.name, "-" if run.seed is None else str(run.seed), state, steps,
                         str(max(found.horizon(run), 0)) if found.horizon(run) >= 0 else "-", str(run.lost),
                         str(run.path)])  # fmt: skip
    return Table(["variant", "seed", "state", "steps", "last evaluated", "lines lost", "folder"], rows)
