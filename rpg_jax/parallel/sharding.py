"""Sharding is tables: names of parameters and activations to PartitionSpecs, and what runs shard by shard."""

import functools
import math
import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax.parallel.mesh import REPLICATED, ROW_AXES, ROWS

# Training: ZeRO-style over fsdp, Megatron-style over tensor. The first entry that matches the end of a leaf's path
# counts; optimizer moments carry their parameter's path and so its spec. `layers` leaves have a leading layer axis.
TRAINING = (
    (r"embed/embedding", PartitionSpec("tensor", "fsdp")),
    (r"head/kernel", PartitionSpec("fsdp", "tensor")),
    (r"layers/(q|k|v|gate|up)/kernel", PartitionSpec(None, "fsdp", "tensor")),
    (r"layers/(q|k|v)/bias", PartitionSpec(None, "tensor")),
    (r"layers/(o|down)/kernel", PartitionSpec(None, "tensor", "fsdp")),
    (r"kv_heads", PartitionSpec("tensor")),  # no parameter: heads are whole on a device (`check_model`)
)

# Sampling: layers are unstacked (`layers/3/q/kernel`); weights are whole but for tensor parallelism.
SAMPLING = (
    (r"embed/embedding", PartitionSpec("tensor", None)),
    (r"head/kernel", PartitionSpec(None, "tensor")),
    (r"layers/\d+/(q|k|v|gate|up)/kernel", PartitionSpec(None, "tensor")),
    (r"layers/\d+/(q|k|v)/bias", PartitionSpec("tensor")),
    (r"layers/\d+/(o|down)/kernel", PartitionSpec("tensor", None)),
)

# Activations that a model pins: batches stay split by rows, and what lies between two projections by tensor.
ACTIVATIONS = {
    "lookup": PartitionSpec("data", None, "fsdp"),  # [rows, T, hidden], as the embedding lies: an all-to-all away from
    "residual": PartitionSpec(ROW_AXES, None, None),  # [rows, T, hidden]
    "heads": PartitionSpec(ROW_AXES, None, "tensor", None),  # [rows, T, heads, head_dim]
    "mlp": PartitionSpec(ROW_AXES, None, "tensor"),  # [rows, T, mlp]
}


def leaf_name(path) -> str:
    """A tree path as `layers/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_of(path, table) -> PartitionSpec:
    """The table's entry for a leaf; what it does not name is replicated."""
    name = leaf_name(path)
    return next((spec for pattern, spec in table if re.search(rf"(^|/){pattern}$", name)), REPLICATED)


def shardings(mesh: Mesh, tree, table=TRAINING):
    """The NamedSharding of every leaf of a tree of arrays or shapes; what the table does not name is replicated.

    Raises:
      ValueError: a mesh axis does not divide a dimension; the sizes named are those that would do for the whole tree.
    """
    split = [
        (leaf_name(path), leaf.shape, axis, size)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        for axis, size in zip(spec_of(path, table), leaf.shape, strict=False)
        if axis is not None
    ]
    for name, shape, axis, size in split:
        if size % mesh.shape[axis]:
            common = math.gcd(*(size for *_, other, size in split if other == axis))
            do = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ValueError(
                f"{name} {tuple(shape)}: mesh.{axis}={mesh.shape[axis]} does not divide {size}; for this model "
                f"mesh.{axis} may be {do}"
            )
    return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, spec_of(path, table)), tree)


def check_model(mesh: Mesh, model) -> None:
    """Raises ValueError, as `shardings` does, for a mesh that does not divide a model's parameters or its KV heads."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shardings(mesh, shapes | {"kv_heads": jax.ShapeDtypeStruct((model.config.kv_heads,), int)})


def _without(spec, axes) -> PartitionSpec:
    """A spec with other axes only."""

    def kept(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name is not None and name not in axes) or None

    return PartitionSpec(*map(kept, spec))


@functools.cache
def make_constrain(mesh: Mesh):
    """Builds the `constrain(array, name)` of a `Model`, which pins an activation of that name to the mesh.

    Inside `over_rows` arrays are a shard's own rows, and the axes over which it is one are left out.
    """

    def constrain(array, name):
        here = jax.sharding.get_abstract_mesh()
        spec, where = ACTIVATIONS[name], mesh
        if here.manual_axes:
            spec, where = _without(spec, here.manual_axes), here
        return jax.lax.with_sharding_constraint(array, NamedSharding(where, spec))

    return constrain


def over_rows(mesh: Mesh, function, in_specs, out_specs):
    """`function` run on each data shard's own rows; `tensor` stays with the compiler, collectives may name ROW_AXES."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(ROW_AXES), check_vma=False
    )


@functools.cache
def make_per_shard(mesh: Mesh):
    """Builds the `per_shard(function, weights, shared, rows, sums=None)` of a `Model`.

    It runs `function(weights, shared, rows) -> (partial sums, values)` on each data shard's own rows. `weights`, a part
    of the training tree, are gathered over the shards first, once. `sums`, a tree like them, tells what the partial
    sums are: they are added up over the shards at the end, and laid out as the weights are. What is split over `tensor`
    stays so. Neither can be differentiated.
    """

    def pin(tree, spec):
        def pin_leaf(path, leaf):
            sharding = NamedSharding(mesh, spec(spec_of(path, TRAINING)))
            return jax.lax.with_sharding_constraint(leaf, sharding)

        return jax.tree_util.tree_map_with_path(pin_leaf, tree)

    def per_shard(function, weights, shared, rows, sums=None):
        def local(weights, shared, rows):
            sums, values = function(weights, shared, rows)
            return jax.tree.map(lambda leaf: leaf[None, None], sums), values

        weights = pin(weights, lambda spec: _without(spec, ROW_AXES))
        run = over_rows(mesh, local, (REPLICATED, REPLICATED, ROWS), (PartitionSpec(*ROW_AXES), ROWS))
        parts, values = run(weights, shared, rows)  # parts [data, fsdp, ...]
        # Not by collectives inside, which make whole what is split over an axis that is left to the compiler.
        parts = pin(parts, lambda spec: PartitionSpec(*ROW_AXES, *_without(spec, ROW_AXES)))
        scattered = pin(jax.tree.map(lambda leaf: leaf.sum(1), parts), lambda spec: PartitionSpec("data", *spec))
        return pin(jax.tree.map(lambda leaf: leaf.sum(0), scattered), lambda spec: spec), values

    return per_shard
