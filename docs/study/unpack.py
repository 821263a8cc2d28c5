"""Writes the runs of a study, one row of FILE.parquet each, as folders that `report` reads.

python docs/study/unpack.py docs/study/equivalence.parquet runs/equivalence
python -m rpg_jax.report runs/equivalence --margin=0.01
"""

import argparse
import json
import pathlib

import pandas as pd

BASE = 5e-4  # the learning rate of the sweeps' config; a trial ran at the same share of its own base


def main(file: str, out: str) -> None:
    for row in pd.read_parquet(file).itertuples():
        folder = pathlib.Path(out, *pathlib.Path(row.path).parts[-2:])
        folder.mkdir(parents=True, exist_ok=True)
        columns = json.loads(row.metrics)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        settings = json.loads(row.settings)
        if {"trial.learning_rate", "optimizer.learning_rate"} <= settings.keys():
            settings["optimizer.learning_rate"] *= settings["trial.learning_rate"] / BASE
        (folder / "config.json").write_text(json.dumps(settings))
        (folder / "summary.json").write_text(row.summary)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="FILE.parquet")
    parser.add_argument("out", help="folder of the folders")
    main(**vars(parser.parse_args()))
