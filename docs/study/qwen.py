"""Keeps the run of qwen.md as qwen.parquet and qwen_steps.parquet, prints the page's table and draws its figure.

python docs/study/qwen.py runs/real_model_qwen    # reads the run first
python docs/study/qwen.py                         # from the files alone
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import pandas as pd

from configs.real_model import EVALUATIONS, SETS
from launch import real_model_scores
from rpg_jax.lab.reporting import runs
from rpg_jax.lab.reporting.figures import MARKERS, svg_figure
from rpg_jax.lab.reporting.style import COLORS, frame, smoothed
from rpg_jax.training.evaluation import bootstrap_interval

HERE = pathlib.Path(__file__).parent
RESPONSES, STEPS = HERE / "qwen.parquet", HERE / "qwen_steps.parquet"
LOGGED = {
    "train/accuracy": "share of right responses",
    "train/response_length": "tokens of a response",
    "train/surprisal": "surprisal of the drawn tokens, nats",
}
SHOWN = {"before-sampled": "sampled, before", "after-sampled": "sampled, after"}
COLUMNS = SHOWN | {
    "before-sampled, pass@8": "pass@8, before", "after-sampled, pass@8": "pass@8, after",
    "before-greedy": "greedy, before", "after-greedy": "greedy, after",
}  # fmt: skip


def read(folder: pathlib.Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(a row for each response of the evaluations, one for each step of the training)."""
    of_problems = real_model_scores.problems(folder).drop(columns="constant")
    every = []
    for evaluation in EVALUATIONS:
        for families in SETS:
            rows = real_model_scores.responses(folder / f"{evaluation}-{families}")
            rows = rows[["digest", "sample", "correct", "tokens", "finished"]]
            every.append(rows.join(of_problems, on="digest").assign(evaluation=evaluation))
    metrics = runs.read(folder / "run").metrics.reindex(columns=[*LOGGED, "train/entropy"])
    metrics["train/surprisal"] = metrics["train/surprisal"].fillna(metrics["train/entropy"])  # of steps 1 and 2
    steps = metrics[list(LOGGED)].dropna().reset_index()
    return pd.concat(every, ignore_index=True), steps


def scores(responses: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Each evaluation's mean score, and pass@8 of the sampled ones, with 95 % bootstrap intervals over problems."""
    found = {}
    for evaluation, of in responses.groupby("evaluation"):
        by_problem = of.groupby("digest", sort=False).correct
        measures = {evaluation: by_problem.mean()}
        if evaluation.endswith("sampled"):
            measures[f"{evaluation}, pass@8"] = (by_problem.max() == 1).astype(float)
        found |= {name: (x.mean(), *bootstrap_interval(x)) for name, x in measures.items()}
    return found


def table(responses: pd.DataFrame) -> pd.DataFrame:
    """The page's table: all trained families, each family, and those that are not trained."""
    groups = {"trained, together": responses[responses.set == SETS[0]]}
    groups |= {family: of for family, of in responses.groupby("family", sort=False)}
    rows = {}
    for name, of in groups.items():
        problems, found = of.drop_duplicates("digest"), scores(of)
        rows[name] = {"problems": len(problems), "constant": f"{100 * problems.right.mean():.1f} %"}
        for key, title in COLUMNS.items():
            mean, low, high = (100 * x for x in found[key])
            rows[name][title] = f"{mean:.1f} % ({low:.1f} – {high:.1f})"
    return pd.DataFrame(rows).T


def markdown(responses: pd.DataFrame) -> str:
    """`table` as Markdown."""
    found = table(responses)
    head = "| | " + " | ".join(found.columns) + " |\n" + "|---" * (len(found.columns) + 1) + "|"
    return "\n".join([head, *(f"| {name} | " + " | ".join(map(str, row)) + " |" for name, *row in found.itertuples())])


def draw(responses: pd.DataFrame, steps: pd.DataFrame) -> str:
    """Scores of each family before and after, then what training logged."""
    families = list(dict.fromkeys(responses.family))

    def panels(axes):
        for number, (evaluation, name) in enumerate(SHOWN.items()):
            for row, family in enumerate(families[::-1]):
                of = responses[(responses.family == family) & (responses.evaluation == evaluation)]
                mean, low, high = (100 * x for x in scores(of)[evaluation])
                style = dict(color=COLORS[number], marker=MARKERS[number], capsize=2, label=None if row else name)
                axes[0].errorbar(mean, row + 0.15 - 0.3 * number, xerr=[[mean - low], [high - mean]], **style)
        for row, family in enumerate(families[::-1]):
            constant = responses[responses.family == family].drop_duplicates("digest").right.mean()
            axes[0].plot(
                100 * constant, row, "|", color="black", markersize=14, label=None if row else "constant answer"
            )
        axes[0].set_yticks(range(len(families)), families[::-1])
        axes[0].legend(fontsize=7, frameon=False, loc="center right")
        frame(axes[0], "held-out problems", "right responses of 8, %, and 95 % interval", "")
        for axis, (key, name) in zip(axes[1:], LOGGED.items(), strict=True):
            axis.plot(steps.step, steps[key], color="#b0b0b0", linewidth=0.8)
            axis.plot(steps.step, smoothed(steps[key]), color=COLORS[0])
            frame(axis, name, "RL step", "")

    return svg_figure("qwen", 4, panels, height=2.8, columns=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="of the run, which is read first")
    if folder := parser.parse_args().folder:
        for kept, file in zip(read(folder), (RESPONSES, STEPS), strict=True):
            kept.to_parquet(file, index=False)
    responses, steps = map(pd.read_parquet, (RESPONSES, STEPS))
    print(markdown(responses))
    RESPONSES.with_suffix(".svg").write_text(draw(responses, steps) + "\n")
