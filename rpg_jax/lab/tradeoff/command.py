"""The work of `python -m rpg_jax.tradeoff`: from its flags to a grid, a table and figures."""

import json
import time
from types import SimpleNamespace

import numpy as np

from rpg_jax import InputError
from rpg_jax.lab import verification
from rpg_jax.lab.tradeoff import measure, tables
from rpg_jax.lab.tradeoff.settings import parsed
from rpg_jax.run.target import json_file, writable
from rpg_jax.storage.logs import jsonable, write_text_atomic

_OF_FORMS = ("epsilons", "ceilings", "betas", "divergences")  # what an objective of one's own settles


def main(options: SimpleNamespace) -> None:
    """Measures the built-in forms, or --objective; writes into --out and --json, and prints the clips."""
    started, output = time.monotonic(), json_file(options.json)
    grid, folder, case = parsed(options), writable("out", options.out), verification.chosen_case(options)
    for name in _OF_FORMS if case else ():
        if name in options.given:
            raise InputError(f"--{name} cannot matter: an objective of your own is measured as it is")
    table = measure.measure(grid, case)
    own = table[table["clip"] == measure.OWN]
    if broken := (~np.isfinite(own.variance + own.bias_squared)).sum():
        raise InputError(f"the gradient of {case.name} is not finite in {broken} of {len(own)} situations")
    medians = tables.tradeoff(table, grid.samples)
    print("Squared bias and variance of one sample over |∇J|², and N*: with fewer samples the clip lowers the error.")
    at = tables.like_first(tables.shown(medians), ["samples"])  # none of the three depends on N
    columns = ["level", "label", "direction", "kl", "bias_squared", "variance", "n_star"]
    print(at[columns].to_string(index=False, float_format="{:.3g}".format, na_rep="-"))
    files = {"tradeoff.csv": medians.to_csv(index=False, float_format="%.8g")}
    files |= {f"{name}.svg": svg + "\n" for name, svg in tables.draw(table, medians, grid.samples).items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_text_atomic(folder / name, text)
    if output:
        rows = {"grid": grid._asdict(), "tradeoff": medians.to_dict("records")}
        output.write_text(json.dumps(jsonable(rows)))
    forms = len(table[tables.FORM].drop_duplicates())
    print(f"\nIn {folder}: {', '.join(files)}\nForms: {forms}, in {time.monotonic() - started:.0f} s.")
