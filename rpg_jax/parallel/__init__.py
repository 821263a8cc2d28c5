"""Meshes and shardings."""

from rpg_jax.parallel.mesh import MICROBATCHES, REPLICATED, ROWS, make_mesh, to_global
from rpg_jax.parallel.sharding import SAMPLING, TRAINING, leaf_name, shardings

__all__ = [
    "MICROBATCHES",
    "REPLICATED",
    "ROWS",
    "SAMPLING",
    "TRAINING",
    "leaf_name",
    "make_mesh",
    "shardings",
    "to_global",
]
