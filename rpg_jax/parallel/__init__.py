"""Meshes and shardings."""

from rpg_jax.parallel.mesh import (
    MICROBATCHES,
    REPLICATED,
    ROW_AXES,
    ROWS,
    check_rows,
    local_rows,
    make_mesh,
    mesh_of,
    row_shards,
    to_global,
)
from rpg_jax.parallel.sharding import (
    SAMPLING,
    TRAINING,
    check_model,
    leaf_name,
    make_constrain,
    make_per_shard,
    over_rows,
    shardings,
)

__all__ = [
    "MICROBATCHES",
    "REPLICATED",
    "ROWS",
    "ROW_AXES",
    "SAMPLING",
    "TRAINING",
    "check_model",
    "check_rows",
    "leaf_name",
    "local_rows",
    "make_constrain",
    "make_mesh",
    "make_per_shard",
    "mesh_of",
    "over_rows",
    "row_shards",
    "shardings",
    "to_global",
]
