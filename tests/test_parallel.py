"""Meshes, and the tables from parameter names to shardings."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from rpg_jax import parallel
from rpg_jax.models import Model, ModelConfig, unstack_layers
from rpg_jax.training.optimizer import make_optimizer

MODEL = Model(ModelConfig(64, 16, 32, 2, 4, 2, 8, qk_norm=True, qkv_bias=True, tied_embeddings=False))


def shapes():
    return jax.eval_shape(MODEL.init, jax.random.key(0))


def specs(tree, table, mesh=(2, 2, 2)):
    """Leaf name -> PartitionSpec on a mesh of that many devices, none of which need exist."""
    mesh = AbstractMesh(mesh, parallel.mesh.AXES, axis_types=(AxisType.Auto,) * 3)
    leaves = jax.tree_util.tree_leaves_with_path(parallel.shardings(mesh, tree, table))
    return {parallel.leaf_name(path): sharding.spec for path, sharding in leaves}


def test_every_matrix_is_named_by_both_tables():
    training, unstacked = specs(shapes(), parallel.TRAINING), jax.eval_shape(unstack_layers, shapes())
    sampling = specs(unstacked, parallel.SAMPLING)
    assert training["layers/q/kernel"] == PartitionSpec(None, "fsdp", "tensor")
    assert training["layers/down/kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert sampling["layers/1/down/kernel"] == PartitionSpec("tensor", None)
    for found in (training, sampling):
        for name, spec in found.items():
            assert (spec == PartitionSpec()) == ("norm" in name), name


def test_optimizer_moments_are_laid_out_like_their_parameters():
    optimizer = make_optimizer("schedule_free_adamw", learning_rate=1e-3).transformation
    found = specs(jax.eval_shape(optimizer.init, shapes()), parallel.TRAINING)
    moments = {name: spec for name, spec in found.items() if name.endswith("layers/gate/kernel")}
    assert len(moments) == 2  # z, and the second moment
    assert set(moments.values()) == {PartitionSpec(None, "fsdp", "tensor")}


def test_a_mesh_that_does_not_divide_names_the_parameter():
    with pytest.raises(ValueError, match=r"layers/down/kernel \(2, 32, 16\).*'fsdp' of size 3.*16"):
        specs(shapes(), parallel.TRAINING[2:], mesh=(1, 3, 1))


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, -1, 1), (0, 1, 1)])
def test_meshes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="mesh data="):
        parallel.make_mesh(*sizes)


def test_host_arrays_become_global_ones():
    mesh = parallel.make_mesh()
    array = parallel.to_global(mesh, parallel.ROWS, {"x": np.arange(4)})["x"]
    assert array.tolist() == [0, 1, 2, 3] and array.sharding.spec == parallel.ROWS
