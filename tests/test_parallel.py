"""Meshes, and the tables from parameter names to shardings."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from rpg_jax import parallel
from rpg_jax.models import Model, ModelConfig, unstack_layers
from rpg_jax.training.optimizer import make_optimizer

MODEL = Model(ModelConfig(64, 16, 32, 2, 4, 2, 8, qk_norm=True, qkv_bias=True, tied_embeddings=False))


def shapes():
    return jax.eval_shape(MODEL.init, jax.random.key(0))


def mesh_of_sizes(*sizes):
    """A mesh of devices of which none need exist."""
    return AbstractMesh(sizes, parallel.mesh.AXES, axis_types=(AxisType.Auto,) * 3)


def specs(tree, table, mesh=(2, 2, 2)):
    """Leaf name -> PartitionSpec."""
    leaves = jax.tree_util.tree_leaves_with_path(parallel.shardings(mesh_of_sizes(*mesh), tree, table))
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


def test_a_mesh_that_does_not_divide_names_the_parameter_and_what_would_do():
    with pytest.raises(ValueError) as error:
        specs(shapes(), parallel.TRAINING, mesh=(1, 3, 1))
    assert str(error.value) == (
        "embed/embedding (64, 16): mesh.fsdp=3 does not divide 16; for this model mesh.fsdp may be 1, 2, 4, 8, 16"
    )
    # A tensor axis of 4 divides every parameter, but would cut each of the 2 KV heads in two.
    parallel.shardings(mesh_of_sizes(1, 1, 4), shapes())
    with pytest.raises(
        ValueError, match=r"kv_heads \(2,\): mesh.tensor=4 does not divide 2;.*mesh.tensor may be 1, 2$"
    ):
        parallel.check_model(mesh_of_sizes(1, 1, 4), MODEL)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_the_sizes_named_are_those_that_are_accepted(hidden, mlp, fsdp):
    tree = {
        "gate": jax.ShapeDtypeStruct((1, hidden, mlp), float),
        "down": jax.ShapeDtypeStruct((1, mlp, hidden), float),
    }
    tree = {"layers": {name: {"kernel": leaf} for name, leaf in tree.items()}}
    try:
        parallel.shardings(mesh_of_sizes(1, fsdp, 1), tree)
    except ValueError as error:
        *_, listed = str(error).partition("may be ")
        assert [int(n) for n in listed.split(", ")] == [n for n in range(1, hidden + 1) if hidden % n == 0]
        assert hidden % fsdp
    else:
        assert hidden % fsdp == 0


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 5))
def test_rows_that_do_not_divide_name_their_key_and_multiples(count, data, fsdp):
    mesh, shards = mesh_of_sizes(data, fsdp, 2), data * fsdp
    if count % shards == 0:
        return parallel.check_rows(mesh, {"rollout.slots": count})
    with pytest.raises(ValueError, match=f"^rollout.slots makes {count} rows.*= {data} x {fsdp}; ") as error:
        parallel.check_rows(mesh, {"fine": 7 * shards, "rollout.slots": count})
    *_, listed = str(error.value).partition("such as ")
    near = [int(n) for n in listed.split(", ")]
    assert all(n % shards == 0 and abs(n - count) < shards and n > 0 for n in near) and len(near) == 1 + (
        count > shards
    )


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, -1, 1), (0, 1, 1)])
def test_meshes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="mesh data="):
        parallel.make_mesh(*sizes)


def test_host_arrays_become_global_ones():
    mesh = parallel.make_mesh()
    array = parallel.to_global(mesh, parallel.ROWS, {"x": np.arange(4)})["x"]
    assert array.tolist() == [0, 1, 2, 3] and array.sharding.spec == parallel.ROWS
