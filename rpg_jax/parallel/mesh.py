"""The device mesh, global arrays from each process's host arrays, and each process's rows of a global array."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rpg_jax import InputError

AXES = ("data", "fsdp", "tensor", "expert")
ROW_AXES = ("data", "fsdp")
ROWS = PartitionSpec(ROW_AXES)  # rows of a batch
MICROBATCHES = PartitionSpec(None, ROW_AXES)  # [microbatch, row, ...]
REPLICATED = PartitionSpec()


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, slices: int = 1, devices: Sequence[jax.Device] | None = None,
    *, expert: int = 1,
) -> Mesh:  # fmt: skip
    """A (data, fsdp, tensor, expert) mesh over all devices; one size may be -1 and takes the remaining devices.

    Axes are Auto: under the Explicit ones that `jax.make_mesh` defaults to, a sharding constraint only asserts.

    Args:
      slices: the number of TPU slices, which only the data center's network joins: the `data` axis is laid over them,
        so that no other axis crosses that network. 1 leaves the order of devices to JAX.
      devices: `jax.devices()` if None.

    Raises:
      ValueError: the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes, there = [data, fsdp, tensor, expert], f"there are {len(devices)} ({devices[0].device_kind})"
    asked = f"mesh data={data}, fsdp={fsdp}, tensor={tensor}" + (f", expert={expert}" if expert != 1 else "")
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise InputError(f"{asked}: sizes must be positive, and at most one may be -1 (all remaining devices)")
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if fixed > len(devices):
        raise InputError(f"{asked} needs {fixed} devices and {there}; lower a size")
    if len(devices) % fixed or (-1 not in sizes and fixed != len(devices)):
        raise InputError(
            f"{asked} does not cover the devices: {there}; make the product {len(devices)}, or one size -1"
        )
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    return Mesh(_arranged(sizes, slices, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arranged(sizes, slices, devices) -> np.ndarray:
    """Devices [data, fsdp, tensor, expert], with neighbors along the last axes physically near each other."""
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    actual = len({getattr(device, "slice_index", 0) for device in devices})
    if slices != actual:
        raise InputError(
            f"mesh.slices is {slices} and the {len(devices)} devices are in {actual}; set mesh.slices={actual}"
        )
    if sizes[0] % slices:
        raise InputError(f"mesh.slices={slices} does not divide mesh.data={sizes[0]}, the axis laid over slices")
    within = [sizes[0] // slices, *sizes[1:]]
    return mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1, 1), devices, allow_split_physical_axes=True)


def row_shards(mesh: Mesh) -> int:
    """The number of parts into which `ROWS` splits the rows of a batch."""
    return int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))


def check_rows(mesh: Mesh, counts: dict[str, int]) -> None:
    """Raises ValueError for the first of {config key: count of rows} that the mesh's data x fsdp does not divide."""
    shards = row_shards(mesh)
    for name, count in counts.items():
        if count % shards:
            near = ", ".join(str(n) for n in (count // shards * shards, -(-count // shards) * shards) if n)
            raise InputError(
                f"{name} makes {count} rows, which do not divide over mesh.data x mesh.fsdp = {mesh.shape['data']} x "
                f"{mesh.shape['fsdp']}; make it a multiple of {shards}, such as {near}"
            )


def to_global(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    """Global arrays, split along `spec`, from the host arrays of this process's share."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree)


def local_rows(array: jax.Array) -> np.ndarray:
    """The rows, in order, of an array split along `ROWS` that this process's devices hold; inverts `to_global`."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def mesh_of(array: jax.Array) -> Mesh:
    """The mesh of an array; a mesh of its one device for an array without a NamedSharding."""
    if isinstance(array.sharding, NamedSharding):
        return array.sharding.mesh
    return make_mesh(devices=list(array.devices()))
