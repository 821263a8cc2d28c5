"""Arithmetic word problems in the paper's parquet format: the messages, the answer, a worked solution, no repeats."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
THINGS = ("apples", "books", "coins", "stamps", "marbles", "pens", "shells", "cards")


def problem(rng) -> tuple[str, str, str]:
    """(problem, worked solution, answer): three small numbers, added and taken away."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    first, gained = (int(n) for n in rng.integers(1, 10, 2))
    lost = int(rng.integers(1, first + gained))
    between, left = first + gained, first + gained - lost
    text = (
        f"{name} has {first} {thing}. {name} finds {gained} more and then gives away {lost}. How many {thing} does "
        f"{name} have now?"
    )
    return text, f"{first} + {gained} = {between}. {between} - {lost} = {left}.\nAnswer: {left}", str(left)


def write(file, rows, template, repeats=1) -> None:
    """Writes rows of `problem` as the paper's scripts do, each `repeats` times."""
    records = [
        {
            "data_source": "word_problems",
            "prompt": [{"role": "user", "content": template(text)}],
            "ability": "MATH",
            "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": index, "raw_problem": text, "solution": solution},
        }
        for index, (text, solution, answer) in enumerate(rows)
        for _ in range(repeats)
    ]
    pq.write_table(pa.Table.from_pylist(records), file)


def distinct(count, seed=0) -> list:
    """`count` problems, no two with the same text."""
    rng, found = np.random.default_rng(seed), {}
    while len(found) < count:
        text, *rest = problem(rng)
        found[text] = (text, *rest)
    return list(found.values())
