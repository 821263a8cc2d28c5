"""The device mesh, and how host arrays become global ones on it."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))  # rows of a batch
MICROBATCHES = PartitionSpec(None, ("data", "fsdp"))  # [microbatch, row, ...]
REPLICATED = PartitionSpec()


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A (data, fsdp, tensor) mesh over all devices; one axis may be -1 and takes what is left.

    Axes are Auto: Linen embeddings fail under the Explicit ones that `jax.make_mesh` defaults to.
    """
    sizes, devices = [data, fsdp, tensor], jax.device_count()
    asked = f"mesh data={data}, fsdp={fsdp}, tensor={tensor}"
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{asked}: sizes must be positive, and at most one may be -1 (all remaining devices)")
    fixed = int(np.prod([size for size in sizes if size != -1]))
    sizes = [devices // fixed if size == -1 else size for size in sizes]
    if int(np.prod(sizes)) != devices:
        raise ValueError(f"{asked} does not cover the {devices} devices there are; make the product {devices}")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def to_global(mesh: Mesh, spec: PartitionSpec, tree):
    """Each process's share of host arrays as global arrays; every leaf is split along `spec`."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree)
