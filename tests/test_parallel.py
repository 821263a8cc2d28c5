"""Meshes, and the tables from parameter names to shardings."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from configs import quickstart
from rpg_jax import parallel
from rpg_jax.models import Model, ModelConfig, unstack_layers
from rpg_jax.run import build
from rpg_jax.training.optimizer import make_optimizer
from rpg_jax.training.settings import RolloutSettings

MODEL = Model(ModelConfig(64, 16, 32, 2, 4, 2, 8, qk_norm=True, qkv_bias=True, tied_embeddings=False))


def shapes():
    return jax.eval_shape(MODEL.init, jax.random.key(0))


def mesh_of_sizes(*sizes):
    """A mesh of devices of which none need exist."""
    return AbstractMesh((*sizes, 1), parallel.mesh.AXES, axis_types=(AxisType.Auto,) * 4)


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
    assert "embed/embedding (64, 16): mesh.fsdp=3 does not divide 16;" in str(error.value)
    assert str(error.value).endswith("mesh.fsdp may be 1, 2, 4, 8, 16")
    # A tensor axis of 4 divides every parameter, but would cut each of the 2 KV heads in two.
    parallel.shardings(mesh_of_sizes(1, 1, 4), shapes())
    with pytest.raises(ValueError, match=r"kv_heads .*: mesh.tensor=4 does not divide 2;.*mesh.tensor may be 1, 2$"):
        parallel.check_model(mesh_of_sizes(1, 1, 4), MODEL)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_the_sizes_named_are_those_that_are_accepted(hidden, mlp, fsdp):
    sizes = dict(gate=(1, hidden, mlp), down=(1, mlp, hidden))
    tree = {"layers": {name: {"kernel": jax.ShapeDtypeStruct(size, float)} for name, size in sizes.items()}}
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
    assert all(n % shards == 0 and abs(n - count) < shards and n > 0 for n in near)
    assert len(near) == 1 + (count > shards)


@pytest.mark.parametrize(("changes", "said"), [
    ({"rollout.prompts": 6}, "rollout.prompts makes 6 rows"),
    ({"rollout.dynamic_sampling": True, "rollout.oversample": 1.5}, "oversample x rollout.prompts makes 12 rows"),
    ({"rollout.slots": 4}, "rollout.slots makes 4 rows.*multiple of 8, such as 8$"),
    ({"learner.microbatch_rows": 12}, "learner.microbatch_rows makes 12 rows.*such as 8, 16$"),
    ({"warm_start.microbatch_rows": 2}, "warm_start.microbatch_rows makes 2 rows"),
])  # fmt: skip
def test_rows_of_a_config_that_a_mesh_does_not_divide_are_refused(changes, said):
    config, mesh = quickstart.get_config("smoke"), mesh_of_sizes(4, 2, 2)

    def check(settings):
        config.update_from_flattened_dict(settings)
        rollout = RolloutSettings(**build.set_keys(config.rollout, "delay", "overlap"))
        loop = SimpleNamespace(**dict.fromkeys(("microbatch_rows", "scoring_rows"), config.learner.microbatch_rows))
        build.check_rows(config, SimpleNamespace(mesh=mesh, sampler_mesh=mesh, rollout=rollout, loop=loop))

    check({"rollout.prompts": 8, "rollout.slots": 16, "learner.microbatch_rows": 8, "warm_start.microbatch_rows": 8})
    with pytest.raises(ValueError, match=said):
        check(changes)


@pytest.mark.parametrize(("sizes", "said"), {
    (3, 1, 1): "mesh data=3, fsdp=1, tensor=1 needs 3 devices and there are 1 .cpu", (-1, -1, 1): "at most one may be",
    (-1, 2, 1): "needs 2 devices and there are 1", (1, 1, 1, 2): "mesh.slices is 2 and the 1 devices are in 1; set mes",
}.items())  # fmt: skip
def test_meshes_that_cannot_be(sizes, said):
    with pytest.raises(ValueError, match=said):
        parallel.make_mesh(*sizes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What meshes ask of a device."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "a chip"


def test_rows_of_a_process_are_in_order_wherever_its_devices_stand():
    shards = [SimpleNamespace(index=(slice(2 * n, 2 * n + 2),), data=[2 * n, 2 * n + 1]) for n in (1, 0, 1)]
    assert parallel.local_rows(SimpleNamespace(addressable_shards=shards)).tolist() == [0, 1, 2, 3]


def test_only_the_data_axis_crosses_slices():
    chips = [Chip(i, slice_index=i % 2) for i in range(8)]
    mesh = parallel.make_mesh(-1, 2, 1, slices=2, devices=chips)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1, "expert": 1}
    slices = np.vectorize(lambda chip: chip.slice_index, otypes=[int])(mesh.devices)
    assert (slices == slices[:, :1, :1]).all() and slices[:, 0, 0, 0].tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="mesh.slices=2 does not divide mesh.data=1"):
        parallel.make_mesh(1, 8, 1, slices=2, devices=chips)
    with pytest.raises(ValueError, match="does not cover the devices: there are 8 .a chip.; make the product 8"):
        parallel.make_mesh(1, 4, 1, devices=chips)
