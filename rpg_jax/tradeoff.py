"""Computes bias, variance and mean squared error of the gradient from N samples, exactly.

    python -m rpg_jax.tradeoff --out=FOLDER
    python -m rpg_jax.tradeoff --objective=my_file.py:my_objective --out=FOLDER

For each clip, epsilon, c, beta, level and estimator, or for --objective, at policies a given KL away. A table here, CSV
and figures in --out. `python -m rpg_jax.verify --help` says what a function of your own takes and returns.
"""

from absl import flags

from rpg_jax.lab.tradeoff.settings import GRID
from rpg_jax.run import cli

flags.DEFINE_string("out", "runs/tradeoff", "folder of CSV files and figures")
flags.DEFINE_string("json", None, "file to write every table to")
cli.define_objective()
for name, (_, default, meaning) in GRID.items():
    (flags.DEFINE_integer if isinstance(default, int) else flags.DEFINE_list)(name, default, meaning)


def main(options):
    from rpg_jax.lab.tradeoff import command

    return command.main(options)


if __name__ == "__main__":
    cli.run(main)
