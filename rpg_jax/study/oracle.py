"""Measures bias and variance of stale gradients in a transformer, by sampling.

    python -m rpg_jax.study oracle --out=FOLDER

For stale responses of 16 to 256 tokens, at policies up to 256 updates from the behavior policy, against the gradient of
fresh responses. Moments go to OUT/oracle.parquet; the same command goes on after a kill, and makes tables.md and the
figures of what is there.
"""

from absl import flags

from rpg_jax.lab.settings import SAMPLED, written
from rpg_jax.run.flags import define_settings

flags.DEFINE_string("out", "runs/oracle", "folder of moments, tables and figures")
define_settings({name: (written(default), meaning) for name, (default, meaning) in SAMPLED.items()})


def main(options):
    from rpg_jax.lab.oracle import command

    return command.main(options)
