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


def table_of_constants(folder: pathlib.Path) -> pd.DataFrame:
    """What always giving a family's commonest training answer scores, of all held-out problems and of the new ones.

    A problem is new if no training problem has its answer and, in any order, its words: swapped operands are not new.
    A family that is not trained has the answers of 100 problems of its training split, and all of its problems are new.
    """
    files = {families: folder / f"{EVALUATIONS[0]}-{families}" / "settings.json" for families in SETS}
    sets = {title: families for families, file in files.items() for title in json.loads(file.read_text())["data"]}
    parts = {part.family: (part, families) for title, families in sets.items() for part in gym.parse(title)}
    given = [part for part, _ in parts.values()]
    training = [part._replace(size=TRAINED.get(part.family, 100)) for part in given]
    seen = [described(problem)[1] for problem in gym.drawn(training, "train", "training problems")]
    problems = dict(described(problem) for problem in gym.drawn(given, "heldout", "held-out problems"))
    rows = {}
    for family, (_, families) in parts.items():
        constant = statistics.mode(answer for of, answer, _ in seen if of == family)
        right = {digest: float(answer == constant) for digest, (of, answer, _) in problems.items() if of == family}
        new = [digest for digest in right if family not in TRAINED or problems[digest] not in seen]
        rows[family] = [constant, mean(right, right), str(len(right)), str(len(new)), mean(right, new)]
        rows[family] += [mean(correct(folder / f"{evaluation}-{families}"), new) for evaluation in EVALUATIONS]
    header = ["constant answer", "scores", "problems", "of them new", "constant, new"]
    columns = [*header, *(f"{evaluation}, new" for evaluation in EVALUATIONS)]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def described(problem: dict) -> tuple[str, tuple]:
    """A digest of a problem of reasoning-gym; its family, answer and sorted words."""
    record = json.loads(problem["answer"])
    return record["digest"], (record["family"], record["answer"], sorted(re.findall(r"\w+", problem["question"])))


def correct(place: pathlib.Path) -> dict[str, float]:
    """digest -> mean score of its responses in an evaluation's folder."""
    rows = pd.read_json(place / "responses.jsonl", lines=True, dtype=False)
    return rows.groupby(rows.answer.map(lambda answer: json.loads(answer)["digest"])).correct.mean().to_dict()


def mean(scores: dict[str, float], digests) -> str:
    return f"{statistics.mean(scores[digest] for digest in digests):.1%}" if digests else "-"


if __name__ == "__main__":
    places = list(map(pathlib.Path, sys.argv[1:]))
    tables = [*map(table, places), table_of_seeds(places) if places[1:] else table_of_constants(*places)]
    print("\n\n".join(found.to_string() for found in tables))
