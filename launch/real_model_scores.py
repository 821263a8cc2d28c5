"""Prints the scores that launch/real_model.sh has written.

    python -m launch.real_model_scores FOLDER...

Of several folders, runs of other seeds, their mean, too; of one, what a constant answer scores, and the scores of
problems whose operands were not seen in training.
"""

import json
import pathlib
import re
import statistics
import sys

import pandas as pd

from configs.real_model import EVALUATIONS, SETS, TRAINED
from rpg_jax import gym


def scores(folder: pathlib.Path, evaluation: str, families: str) -> dict[str, tuple[float, float, float]]:
    """name -> (mean score, and its 95 % bootstrap interval over problems), of all families together first."""
    values = json.loads((folder / f"{evaluation}-{families}" / "evaluation.json").read_text())
    keys = [key for key in values if key.endswith(f"/mean@{values['k']}")]
    named = {key.partition("/")[0].replace("all", families): key for key in keys}
    return {name: (values[key], values[f"{key}_low"], values[f"{key}_high"]) for name, key in named.items()}


def table(folder: pathlib.Path) -> pd.DataFrame:
    """Mean scores before and after training, sampled and greedy, with 95 % bootstrap intervals over problems."""
    return pd.DataFrame({
        evaluation: {
            name: f"{mean:.1%} ({low:.1%} - {high:.1%})"
            for families in SETS
            for name, (mean, low, high) in scores(folder, evaluation, families).items()
        }
        for evaluation in EVALUATIONS
    })  # fmt: skip


def table_of_seeds(folders: list[pathlib.Path]) -> pd.DataFrame:
    """Mean scores of runs that differ in their seeds, then their mean with the least and the highest."""
    rows = {}
    for families in SETS:
        means = {f: [scores(f, evaluation, families)[families][0] for evaluation in EVALUATIONS] for f in folders}
        rows |= {f"{families}, {folder}": [f"{mean:.1%}" for mean in of] for folder, of in means.items()}
        columns = list(zip(*means.values(), strict=True))
        spread = [f"{statistics.mean(of):.1%} ({min(of):.1%} - {max(of):.1%})" for of in columns]
        rows[f"{families}, {len(folders)} runs"] = spread
    return pd.DataFrame.from_dict(rows, orient="index", columns=EVALUATIONS)


def problems(folder: pathlib.Path) -> pd.DataFrame:
    """A row for each held-out problem, by digest: its family, whether that is trained, the family's constant answer,
    whether that is right, and whether the problem is new.

    A family's constant is the commonest answer of its training problems; a family that is not trained has 100 of its
    training split. A problem is new if no training problem has its answer and, in any order, its words: swapped
    operands are not new. All problems of families that are not trained are new.
    """
    files = {families: folder / f"{EVALUATIONS[0]}-{families}" / "settings.json" for families in SETS}
    sets = {title: families for families, file in files.items() for title in json.loads(file.read_text())["data"]}
    parts = {part.family: (part, families) for title, families in sets.items() for part in gym.parse(title)}
    given = [part for part, _ in parts.values()]
    training = [part._replace(size=TRAINED.get(part.family, 100)) for part in given]
    seen = [described(problem)[1] for problem in gym.drawn(training, "train", "training problems")]
    constants = {family: statistics.mode(answer for of, answer, _ in seen if of == family) for family in parts}
    rows = {}
    for digest, known in map(described, gym.drawn(given, "heldout", "held-out problems")):
        family, answer, _ = known
        new = family not in TRAINED or known not in seen
        rows[digest] = family, parts[family][1], constants[family], float(answer == constants[family]), new
    return pd.DataFrame.from_dict(rows, orient="index", columns=["family", "set", "constant", "right", "new"])


def table_of_constants(folder: pathlib.Path) -> pd.DataFrame:
    """What a constant answer scores, of all held-out problems of a family and of the new ones, beside the model."""
    rows = {}
    for family, of in problems(folder).groupby("family", sort=False):
        new = of[of.new]
        rows[family] = [of.constant.iloc[0], percent(of.right), str(len(of)), str(len(new)), percent(new.right)]
        for evaluation in EVALUATIONS:
            rows[family].append(percent(correct(folder / f"{evaluation}-{of.set.iloc[0]}").reindex(new.index)))
    header = ["constant answer", "scores", "problems", "of them new", "constant, new"]
    columns = [*header, *(f"{evaluation}, new" for evaluation in EVALUATIONS)]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def described(problem: dict) -> tuple[str, tuple]:
    """A digest of a problem of reasoning-gym; its family, answer and sorted words."""
    record = json.loads(problem["answer"])
    return record["digest"], (record["family"], record["answer"], sorted(re.findall(r"\w+", problem["question"])))


def responses(place: pathlib.Path) -> pd.DataFrame:
    """The responses in an evaluation's folder, with the digest of the problem of each."""
    rows = pd.read_json(place / "responses.jsonl", lines=True, dtype=False)
    return rows.assign(digest=rows.answer.map(lambda answer: json.loads(answer)["digest"]))


def correct(place: pathlib.Path) -> pd.Series:
    """The mean score of the responses to each problem in an evaluation's folder, by digest."""
    return responses(place).groupby("digest").correct.mean()


def percent(scores: pd.Series) -> str:
    """Their mean, or a dash if there are none."""
    return f"{scores.mean():.1%}" if len(scores) else "-"


if __name__ == "__main__":
    if {"--help", "-h"} & {*sys.argv}:
        sys.exit(print(__doc__))
    places = list(map(pathlib.Path, sys.argv[1:]))
    tables = [*map(table, places), table_of_seeds(places) if places[1:] else table_of_constants(*places)]
    print("\n\n".join(found.to_string() for found in tables))
