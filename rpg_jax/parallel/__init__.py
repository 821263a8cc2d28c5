"""Meshes and shardings."""

from rpg_jax.parallel.mesh import (
    MICROBATCHES,
    REPLICATED,
    ROW_AXES,
    ROWS,
    check_rows,
    local_rows,
    make_mesh,
    make_meshes,
    mesh_of,
    move,
    move_rows,
    row_shards,
    to_global,
)
from rpg_jax.parallel.sharding import (
    SAMPLING,
    TRAINING,
    UNSTACKED,
    check_model,
    held,
    leaf_name,
    make_constrain,
    make_per_expert,
    make_per_shard,
    named_leaves,
    over_rows,
    shardings,
)
