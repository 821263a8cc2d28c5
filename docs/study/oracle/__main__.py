"""Measures bias and variance of stale gradients in a transformer, by sampling.

    python docs/study/oracle --out=FOLDER

For stale responses of 16 to 256 tokens, at policies up to 256 updates from the behavior policy, against the gradient of
fresh responses. Moments go to OUT/oracle.parquet; the same command goes on after a kill, and makes oracle.csv and the
figures of what is there.
"""

import argparse
import pathlib
import sys

import numpy as np
import pandas as pd

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # rpg_jax
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # this folder

from resumable import save

from oracle import figures, measure, tables
from rpg_jax.storage.logs import write_text_atomic

MOMENTS = "oracle.parquet"
GROUP = 8  # responses to a prompt in figures of one group size


def main(folder: pathlib.Path, wanted: measure.Sampled) -> None:
    """Measures the lengths and ages that `oracle.parquet` lacks, and writes oracle.csv and the figures of all."""
    measure.check(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MOMENTS
    kept = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=list(measure.KEYS))
    done = set(zip(kept.length, kept.updates, strict=True))
    for rows in measure.measured(wanted, done, lambda text: print(text, file=sys.stderr, flush=True)):
        kept = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
        save(kept, file)
    print(f"In {folder}: {', '.join([MOMENTS, *write(kept, folder)])}")


def write(kept: pd.DataFrame, folder: pathlib.Path) -> list[str]:
    """oracle.csv, all that is known of each estimator, and the figures of kept moments; their names."""
    table = tables.estimates(kept)
    write_text_atomic(folder / "oracle.csv", table.to_csv(index=False, float_format="%.6g"))
    sizes = np.sort(table.group.unique())
    drawn = figures.draw(table, int(GROUP if GROUP in sizes else sizes[0]))
    for name, svg in drawn.items():
        write_text_atomic(folder / f"oracle-{name}.svg", svg + "\n")
    return ["oracle.csv", *(f"oracle-{name}.svg" for name in drawn)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default="runs/oracle")
    for name, default in measure.Sampled()._asdict().items():
        kind = type(default) if isinstance(default, int | str) else lambda text: tuple(map(int, text.split(",")))
        parser.add_argument(f"--{name}", type=kind, default=default)
    options = vars(parser.parse_args())
    main(options.pop("out"), measure.Sampled(**options))
