"""The device mesh, global arrays from each process's host arrays, and each process's rows of a global array."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rpg_jax import InputError

AXES = ("data", "fsdp", "tensor", "expert")
ROW_AXES = ("data", "fsdp", "expert")  # that divide rows
ROWS = PartitionSpec(ROW_AXES)  # rows of a batch
MICROBATCHES = PartitionSpec(None, ROW_AXES)  # [microbatch, row, ...]
REPLICATED = PartitionSpec()


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, slices: int = 1, devices: Sequence[jax.Device] | None = None,
    *, expert: int = 1, whole: bool = True,
) -> Mesh:  # fmt: skip
    """A (data, fsdp, tensor, expert) mesh over all devices; one size may be -1 and takes the remaining devices.

    Axes are Auto: under the Explicit ones that `jax.make_mesh` defaults to, a sharding constraint only asserts.

    Args:
      slices: the number of TPU slices, which only the data center's network joins: the `data` axis is laid over them,
        so that no other axis crosses that network. 1 leaves the order of devices to JAX.
      devices: `jax.devices()` if None.
      whole: whether the devices are whole slices, which are arranged by their physical places; else they are taken in
        their order, those of a process next to each other.

    Raises ValueError: the product of the sizes is not the number of devices.
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
    arranged = _arranged(sizes, slices, devices) if whole else np.asarray(devices).reshape(sizes)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_meshes(*, sampler: int = 0, devices: Sequence | None = None, **sizes: int) -> tuple[Mesh, Mesh]:
    """(The mesh that learns, the mesh that samples): the same one, or with `sampler` two on disjoint devices.

    The last `sampler` devices of every process sample, so that every process runs the programs of both meshes. The
    sizes are those of `make_mesh` for the others; sampling has the same tensor and expert axes, and the rest is `data`.

    Args:
      devices: `jax.devices()` if None; with `sampler` also a pair, those that learn and those that sample.

    Raises InputError: as `make_mesh`, or a process has no device left to learn with.
    """
    devices = jax.devices() if devices is None else devices
    if not sampler:
        mesh = make_mesh(devices=devices, **sizes)
        return mesh, mesh
    learning, sampling = devices if isinstance(devices, tuple) else _divided(devices, sampler)
    side = "learn"
    try:
        learner = make_mesh(devices=learning, **sizes, whole=False)
        side, shape = "sample", {axis: learner.shape[axis] for axis in ("tensor", "expert")}
        return learner, make_mesh(-1, devices=sampling, **shape, whole=False)
    except InputError as error:
        raise InputError(f"mesh.sampler={sampler}, the devices that {side}: {error}") from error


def _divided(devices, sampler: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """The devices that learn, and the last `sampler` of every process."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    least = min(map(len, hosts.values()))
    if least <= sampler:
        on_cpu = "; on CPU set JAX_NUM_CPU_DEVICES" if devices[0].platform == "cpu" else ""
        raise InputError(
            f"mesh.sampler={sampler} leaves no device to learn with: a process has {least} "
            f"({devices[0].device_kind}); lower it{on_cpu}"
        )
    parts = slice(-sampler), slice(-sampler, None)
    learning, sampling = ([device for host in hosts.values() for device in host[part]] for part in parts)
    return learning, sampling


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
    """Raises ValueError for the first of {config key: count of rows} that the axes of rows do not divide."""
    shards = row_shards(mesh)
    axes = [axis for axis in ROW_AXES if axis != "expert" or mesh.shape[axis] > 1]
    for name, count in counts.items():
        if count % shards:
            near = ", ".join(str(n) for n in (count // shards * shards, -(-count // shards) * shards) if n)
            raise InputError(
                f"{name} makes {count} rows, which do not divide over {' x '.join(f'mesh.{axis}' for axis in axes)} = "
                f"{' x '.join(str(mesh.shape[axis]) for axis in axes)}; make it a multiple of {shards}, such as {near}"
            )


def to_global(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    """Global arrays, split along `spec`, from the host arrays of this process's share."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf)), tree)


def move_rows(mesh: Mesh, tree: Any) -> Any:
    """The [B, ...] arrays of a tree, split along `ROWS` of another mesh, split along `ROWS` of this one.

    They go through the memory of the hosts, each of which sees them whole.
    """
    sharding = NamedSharding(mesh, ROWS)

    def moved(leaf):
        whole = np.asarray(replicated(mesh_of(leaf), leaf))
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(moved, tree)


def move(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """An array on the devices of another mesh. Each gets its piece from a device of its own process, which holds the
    array whole for that long: no other memory and no other network is needed than that of one array."""
    whole = replicated(mesh_of(array), array).addressable_data(0)
    places = sharding.addressable_devices_indices_map(array.shape).items()
    pieces = [jax.device_put(whole[index], device) for device, index in places]
    return jax.block_until_ready(jax.make_array_from_single_device_arrays(array.shape, sharding, pieces))


@partial(jax.jit, static_argnums=0)
def replicated(mesh: Mesh, array: jax.Array) -> jax.Array:
    """An array whole on every device of its mesh."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, REPLICATED))


def local_rows(array: jax.Array) -> np.ndarray:
    """The rows, in order, of an array split along `ROWS` that this process's devices hold; inverts `to_global`."""
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def mesh_of(array: jax.Array) -> Mesh:
    """The mesh of an array; a mesh of its one device for an array without a NamedSharding."""
    if isinstance(array.sharding, NamedSharding):
        return array.sharding.mesh
    return make_mesh(devices=list(array.devices()))
