"""Sharding is a table: parameter names to PartitionSpecs, once for training and once for sampling."""

import re

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Training: ZeRO-style over fsdp, Megatron-style over tensor. The first entry that matches the end of a leaf's path
# counts; optimizer moments carry their parameter's path and so its spec. `layers` leaves have a leading layer axis.
TRAINING = (
    (r"embed/embedding", PartitionSpec("tensor", "fsdp")),
    (r"head/kernel", PartitionSpec("fsdp", "tensor")),
    (r"layers/(q|k|v|gate|up)/kernel", PartitionSpec(None, "fsdp", "tensor")),
    (r"layers/(q|k|v)/bias", PartitionSpec(None, "tensor")),
    (r"layers/(o|down)/kernel", PartitionSpec(None, "tensor", "fsdp")),
)

# Sampling: layers are unstacked (`layers/3/q/kernel`); weights are whole but for tensor parallelism.
SAMPLING = (
    (r"embed/embedding", PartitionSpec("tensor", None)),
    (r"head/kernel", PartitionSpec(None, "tensor")),
    (r"layers/\d+/(q|k|v|gate|up)/kernel", PartitionSpec(None, "tensor")),
    (r"layers/\d+/(q|k|v)/bias", PartitionSpec("tensor")),
    (r"layers/\d+/(o|down)/kernel", PartitionSpec("tensor", None)),
)


def leaf_name(path) -> str:
    """A tree path as `layers/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(mesh: Mesh, tree, table=TRAINING):
    """The NamedSharding of every leaf of a tree of arrays or shapes; what the table does not name is replicated.

    Raises ValueError for a dimension that its mesh axis does not divide.
    """

    def sharding(path, leaf):
        name = leaf_name(path)
        spec = next((spec for pattern, spec in table if re.search(rf"(^|/){pattern}$", name)), PartitionSpec())
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{name} {tuple(leaf.shape)}: mesh axis {axis!r} of size {mesh.shape[axis]} does not divide "
                    f"{size}; choose a size that does"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, tree)
