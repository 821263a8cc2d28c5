"""The tables of a report, from a comparison, as Markdown."""

import re

import numpy as np
import pandas as pd

from rpg_jax.lab.reporting.comparison import SIGNIFICANT, equal_pairs, spelled
from rpg_jax.storage.settings import CODE

MOST_PAIRS = 60  # in a table
# Texts of the page, whose lines `plain` joins.
CURVES = """Held-out mean@k: mean over runs with its 95 % t interval; gray: the other variants. Dashed: not all runs of
the variant; dotted: the step of comparison."""
INTERVALS = "Mean over runs and tasks at the step of comparison, with its 95 % t interval over runs."
DYNAMICS = """Training: mean over the runs of a variant, smoothed over a tenth of a run; 95 % t bands of at most four
variants."""
LAST_AND_BEST = """Mean over runs of held-out mean@k: at the step of comparison, and the best of the evaluations until
then for each task on its own. 95 %: t interval over runs of the mean of tasks. Bold: best; underlined: second best.
Without a number of runs: a run that ended earlier."""
PAIRS = """Differences with Welch's 95 % t interval. p: of the permutation test, alone and after Holm's correction for
all pairs. Alone, one pair in twenty is below 0.05 by chance: only what stays below it after the correction is a
finding."""
COSTS = """Means over finished runs. Seconds: rollouts, rewards, log-probs, updates, evaluations. Wall seconds in all
include compilation and the warm start, also a shared one. Where some devices only sample: the mean seconds of a step
that they waited for those that learn, and these for them."""


def plain(text: str) -> str:
    """Text that Markdown shows as it is: no marks, no formulas, and at its start no list, heading or quote."""
    text = re.sub(r"([\\`*_\[\]<|~$&])", r"\\\1", " ".join(text.split()))
    return re.sub(r"^(\d*)(>|[-+.)#]+ )", r"\1\\\2", text)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table of cells in Markdown; all columns but the first are numbers."""
    lines = [list(map(plain, header)), ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _p(p: float, text: str) -> str:
    return f"**{text}**" if p < SIGNIFICANT else text


def summary(comparison, variants) -> str:
    """One line on what there is."""
    runs = [run for variant in variants for run in variant.runs]
    return (
        f"{_count(len(variants), 'variant')}, {_count(len(runs), 'run')}, {sum(run.is_finished for run in runs)} "
        f"finished; held-out tasks: {', '.join(comparison.scores)}; compared at step {comparison.step}."
    )


def notes(comparison, variants) -> list[str]:
    """What limits the comparison, a line each."""
    lines = []
    if comparison.partial:
        names = ", ".join(comparison.partial)
        lines.append(f"held-out tasks that not all variants were evaluated on, left out: {names}")
    left_out = sum(len(variant.runs) for variant in variants) - int(comparison.means["runs"].sum())
    if left_out:
        lines.append(f"{_count(left_out, 'run')} not compared, for no evaluation at step {comparison.step}: see Runs")
    return lines


def _count(number, word) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _marked(column: pd.Series) -> list[str]:
    """Numbers with four decimals, the best bold and the second best underlined, as they are printed."""
    texts = [f"{value:.4f}" for value in column]
    order = sorted(set(texts), key=float, reverse=True)
    marks = dict(zip(order, ("**{}**", "<ins>{}</ins>"), strict=False)) if len(order) > 1 else {}  # GitHub takes no <u>
    return [marks.get(text, "{}").format(text) for text in texts]


def last_and_best(comparison) -> str:
    """The paper's table: a row a variant, two columns a task and two of their mean, whose interval is the last column;
    then runs that ended earlier."""
    reached, ended = (_interleaved(comparison.until_step(which)) for which in (True, False))
    means = reached.groupby(level="variant", sort=False).mean()
    cells = zip(*(_marked(means[column]) for column in means), strict=True)
    named = zip(comparison.means.itertuples(), cells, strict=True)
    rows = [[plain(mean.Index), str(mean.runs), *row, _interval(mean)] for mean, row in named]
    for (name, run), values in ended.iterrows():
        rows.append(
            [plain(f"{name}, step {comparison.horizon[name, run]}"), "-", *(f"{value:.4f}" for value in values), "-"]
        )
    return table(["variant", "runs", *means.columns, "95 %"], rows)


def _interleaved(scores) -> pd.DataFrame:
    """Columns "TASK last", "TASK best" of each task and, of more than one, of their mean; of scores by run."""
    last, best = scores.last(), scores.max()
    if last.shape[1] > 1:
        last, best = (scores.assign(**{"mean of tasks": scores.mean(axis=1)}) for scores in (last, best))
    return pd.DataFrame({f"{t} {kind}": scores[t] for t in last for kind, scores in (("last", last), ("best", best))})


def _interval(estimate) -> str:
    return "-" if np.isnan(estimate.low) else f"{estimate.low:.4f} – {estimate.high:.4f}"


def pairs(comparison) -> str:
    """Every two variants, the better one first, p below 5 % in bold; of very many pairs the `MOST_PAIRS` of least p."""
    rows = [
        [*map(plain, names), f"{pair.gap:.4f}", _interval(pair), *(_p(p, spelled(p)) for p in (pair.p, pair.holm))]
        for names, pair in comparison.pairs.sort_values("p", kind="stable").head(MOST_PAIRS).iterrows()
    ]
    return table(["better", "worse", "difference of means", "95 %", "p", "p after Holm"], rows)


def costs(variants) -> list:
    """Heading, table and text of what runs cost; nothing where no run was timed."""
    if not any(run.seconds for variant in variants for run in variant.runs):
        return []
    rows = []
    for variant in variants:
        timed = [run for run in variant.runs if run.seconds]
        runs = [run for run in timed if run.is_finished] or timed
        seen = pd.DataFrame([(r.seconds, r.tokens, max(r.last, 1), r.wall_seconds) for r in runs], dtype=float)
        if seen.empty:
            rows.append([plain(variant.name), "0", *["-"] * 7])
            continue
        seconds, tokens, steps, wall = (seen[column] for column in seen)
        waited = pd.DataFrame([run.waited for run in runs if run.waited is not None]).mean()
        rows.append([
            plain(variant.name), str(len(seen)), f"{seconds.mean():.1f}", f"{seconds.min():.1f} – {seconds.max():.1f}",
            f"{(seconds / steps).mean():.2f}", f"{tokens.mean():,.0f}", f"{tokens.sum() / seconds.sum():,.0f}",
            f"{wall.mean():.1f}" if wall.notna().any() else "-", ", ".join(f"{x:.2f}" for x in waited) or "-",
        ])  # fmt: skip
    header = ["variant", "runs", "seconds a run", "least – most", "seconds a step", "tokens a run", "tokens a second"]
    return ["## Cost", table([*header, "wall seconds in all", "sampler, trainer waited"], rows), plain(COSTS)]


def config_differences(variants) -> list:
    """A table of the settings in which variants differ; nothing where there are none."""
    settings = {variant.name: variant.settings for variant in variants if variant.settings}
    every = {key: [own.get(key) for own in settings.values()] for own in settings.values() for key in own}
    unlike = {key: values for key, values in every.items() if len(set(map(repr, values))) > 1}
    if not unlike:
        return []
    columns = [["-" if value is None else plain(str(value)) for value in values] for values in unlike.values()]
    rows = [[plain(name), *row] for name, *row in zip(settings, *columns, strict=True)]
    same = len(every) - len(unlike)
    text = f"- is unset. All other {same} settings are the same."
    if any(key.startswith(f"{CODE}.") for key in unlike):
        text += f" Under {CODE}: digests of files of one's own."
    return ["## Differences of configs", table(["variant", *unlike], rows), plain(text)]


def runs(comparison, variants) -> str:
    """Every run there is: how far it came, and whether it is compared."""
    rows = []
    for variant in variants:
        for run in variant.runs:
            horizon = comparison.horizon.get((variant.name, str(run.path)), -1)
            state = "finished" if run.is_finished else "unfinished" if run.last >= 0 else "nothing logged"
            compared = "yes" if variant.name in comparison.variants and horizon >= comparison.step else "no"
            rows.append([
                plain(variant.name), "-" if run.seed is None else str(run.seed), state,
                f"{max(run.last, 0)} of {run.planned or '?'}", "-" if horizon < 0 else str(horizon), compared,
                plain(str(run.path)),
            ])  # fmt: skip
    return table(["variant", "seed", "state", "steps", "last evaluated", "compared", "folder"], rows)


def equal(comparison, variants, margin: float) -> list[str]:
    """Heading, text and table of which variants are equal to within a margin; nothing of a single variant."""
    found = equal_pairs(comparison, variants, margin)
    if found.empty:
        return []
    equal, different = ((found[key] < SIGNIFICANT).sum() for key in ("holm", "holm_different"))
    text = (
        f"Of {len(found)} pairs {equal} are equal to within {margin:.3g} and {different} differ, after Holm's "
        f"correction for all {len(found)} pairs; of the others nothing is known. Runs of the same seed are paired and "
        f"a run's score is its mean over tasks. Equality: two one-sided t-tests; difference: a paired t-test."
    )
    columns = ["p", "holm", "p_different", "holm_different"]
    rows = [
        [*map(plain, names), f"{pair.difference:+.4f}", f"{pair.low:+.4f} – {pair.high:+.4f}", f"{pair.deviation:.4f}"]
        + [_p(p, f"{p:.2g}") for p in pair[columns]]
        for names, pair in found.sort_values("p", kind="stable").iterrows()
    ]
    header = ["variant", "other", "mean difference", "90 % interval", "deviation of a pair", "p equal"]
    header += ["after Holm", "p different", "after Holm"]
    return ["## What is equal", plain(text), table(header, rows)]
