"""The work of `python -m rpg_jax.study oracle`: measures what is missing, then writes tables and figures of all."""

import pathlib
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd

from rpg_jax import InputError
from rpg_jax.lab.oracle import figures, measure, tables
from rpg_jax.lab.settings import Sampled, parsed
from rpg_jax.run.target import writable
from rpg_jax.storage.logs import write_text_atomic

MOMENTS = "oracle.parquet"
GROUP = 8  # responses to a prompt in tables and figures of one group size


def main(options: SimpleNamespace) -> None:
    """Measures the lengths and ages that OUT/oracle.parquet lacks, and writes tables.md and the figures of all."""
    folder, wanted = writable("out", options.out), parsed(Sampled, options)
    measure.check(wanted)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / MOMENTS
    try:
        kept = pd.read_parquet(file) if file.exists() else pd.DataFrame(columns=list(measure.KEYS))
    except (OSError, ValueError) as error:  # Arrow's errors are among these
        raise InputError(f"{file} cannot be read ({error}); remove it, or name another --out") from None
    done = set(zip(kept.length, kept.updates, strict=True))
    for rows in measure.measured(wanted, done, lambda text: print(text, file=sys.stderr, flush=True)):
        kept = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
        save(kept, file)
    names = write(kept, folder)
    print((folder / "tables.md").read_text())
    print(f"In {folder}: {', '.join([MOMENTS, *names])}")


def save(kept: pd.DataFrame, file: pathlib.Path) -> None:
    """Writes the moments, whole or not at all."""
    draft = file.with_name(f".{file.name}.draft")
    kept.to_parquet(draft, compression="zstd")
    draft.replace(file)


def write(kept: pd.DataFrame, folder: pathlib.Path) -> list[str]:
    """tables.md and the figures of kept moments; their names."""
    table = tables.estimates(kept)
    sizes = np.sort(table.group.unique())
    group = int(GROUP if GROUP in sizes else sizes[0])
    sections = {
        "Points": tables.points(table),
        f"Estimators, G = {group}": tables.comparison(table, group),
        "Unclipped token weights, and N* of RPG-Style Clip": tables.groups(table, "token, RPG-Style Clip"),
    }
    write_text_atomic(folder / "tables.md", "\n\n".join(f"## {name}\n\n{text}" for name, text in sections.items()))
    drawn = figures.draw(table, group)
    for name, svg in drawn.items():
        write_text_atomic(folder / f"oracle-{name}.svg", svg + "\n")
    return ["tables.md", *(f"oracle-{name}.svg" for name in drawn)]
