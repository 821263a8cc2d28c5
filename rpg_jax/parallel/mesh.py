"""The device mesh, how host arrays become global ones on it, and how a process reads its rows back."""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")
ROWS = PartitionSpec(ROW_AXES)  # rows of a batch
MICROBATCHES = PartitionSpec(None, ROW_AXES)  # [microbatch, row, ...]
REPLICATED = PartitionSpec()


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, slices: int = 1, devices=None) -> Mesh:
    """A (data, fsdp, tensor) mesh over all devices; one axis may be -1 and takes what is left.

    Args:
      slices: groups of devices, joined by the data center's network only: `data` is laid over them, so that no other
        axis crosses it. 1 leaves the order to JAX.
      devices: those of `jax.devices()` if None.

    Axes are Auto: Linen embeddings fail under the Explicit ones that `jax.make_mesh` defaults to.

    Raises:
      ValueError: the sizes make no mesh of these devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes, there = [data, fsdp, tensor], f"there are {len(devices)} ({devices[0].device_kind})"
    asked = f"mesh data={data}, fsdp={fsdp}, tensor={tensor}"
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"{asked}: sizes must be positive, and at most one may be -1 (all remaining devices)")
    fixed = int(np.prod([size for size in sizes if size != -1]))
    if fixed > len(devices):
        raise ValueError(f"{asked} needs {fixed} devices and {there}; lower a size")
    if len(devices) % fixed or (-1 not in sizes and fixed != len(devices)):
        raise ValueError(
            f"{asked} does not cover the devices: {there}; make the product {len(devices)}, or one size -1"
        )
    sizes = [len(devices) // fixed if size == -1 else size for size in sizes]
    return Mesh(_arranged(sizes, slices, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arranged(sizes, slices, devices):
    """Devices in the shape of the mesh, neighbors in its last axes near each other."""
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    found = len({getattr(device, "slice_index", 0) for device in devices})
    if slices != found:
        raise ValueError(
            f"mesh.slices is {slices} and the {len(devices)} devices are in {found}; set mesh.slices={found}"
        )
    if sizes[0] % slices:
        raise ValueError(f"mesh.slices={slices} does not divide mesh.data={sizes[0]}, the axis laid over slices")
    within = [sizes[0] // slices, *sizes[1:]]
    return mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, allow_split_physical_axes=True)


def row_shards(mesh: Mesh) -> int:
    """Into how many parts `ROWS` splits the rows of a batch."""
    return int(np.prod([mesh.shape[axis] for axis in ROW_AXES]))


def check_rows(mesh: Mesh, counts: dict[str, int]) -> None:
    """Raises ValueError for the first count of rows, by its config key, that the mesh's data x fsdp does not divide."""
    shards = row_shards(mesh)
    for name, count in counts.items():
        if count % shards:
            near = ", ".join(str(n) for n in (count // shards * shards, -(-count // shards) * shards) if n)
            raise ValueError(
                f"{name} makes {count} rows, which do not divide over mesh.data x mesh.fsdp = {mesh.shape['data']} x "
                f"{mesh.shape['fsdp']}; make it a multiple of {shards}, such as {near}"
            )


def to_global(mesh: Mesh, spec: PartitionSpec, tree):
    """Each process's share of host arrays as global arrays; every leaf is split along `spec`."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree)


def local_rows(array: jax.Array) -> np.ndarray:
    """The rows of an array, split along `ROWS`, that this process's devices hold, in their order: what it gave."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def mesh_of(array: jax.Array) -> Mesh:
    """The mesh that an array lies on; a mesh of its one device for an array that was not laid out on any."""
    if isinstance(array.sharding, NamedSharding):
        return array.sharding.mesh
    return make_mesh(devices=list(array.devices()))
