"""Tables that map parameters and activations to PartitionSpecs, and functions that run on each data shard."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rpg_jax import InputError
from rpg_jax.parallel.mesh import REPLICATED, ROW_AXES, ROWS

Table = tuple[tuple[str, PartitionSpec], ...]  # the first pattern that matches the end of a leaf's path decides
DATA, SHARDS = ROW_AXES[0], ROW_AXES[1:]  # of weights in training: copies over the one, divided over the others
# Training: ZeRO-style over fsdp, which `shardings` makes all of SHARDS; Megatron-style over tensor. Leaves of `layers`
# have a leading layer axis. Paths of optimizer moments end with their parameter's path, so they have its spec. A
# quantized matrix, of a teacher, has two leaves, values and the scales of its channels, which are whole on each device.
TRAINING: Table = (
    (r"embed/embedding(/values)?", PartitionSpec("tensor", "fsdp")),
    (r"head/kernel(/values)?", PartitionSpec("fsdp", "tensor")),
    (r"layers/(q|k|v|gate|up)/kernel(/values)?", PartitionSpec(None, "fsdp", "tensor")),
    (r"layers/(q|k|v)/bias", PartitionSpec(None, "tensor")),
    (r"layers/(o|down)/kernel(/values)?", PartitionSpec(None, "tensor", "fsdp")),
    (r"layers/experts/(gate|up)/kernel(/values)?", PartitionSpec(None, "expert", "fsdp", "tensor")),
    (r"layers/experts/down/kernel(/values)?", PartitionSpec(None, "expert", "tensor", "fsdp")),
    (r"layers/router/kernel", PartitionSpec(None, "fsdp", None)),
    (r"layers/(q|k|v|gate|up)/lora_a", PartitionSpec(None, "fsdp", None)),
    (r"layers/(q|k|v|gate|up)/lora_b", PartitionSpec(None, None, "tensor")),
    (r"layers/(o|down)/lora_a", PartitionSpec(None, "tensor", None)),
    (r"layers/(o|down)/lora_b", PartitionSpec(None, None, "fsdp")),
    (r"kv_heads", PartitionSpec("tensor")),  # no parameter: a head is never split (`check_model`)
)

# As in training, layers unstacked (`layers/3/q/kernel`).
UNSTACKED: Table = tuple(
    (pattern.replace("layers/", r"layers/\d+/"), PartitionSpec(*spec[1:]) if pattern.startswith("layers/") else spec)
    for pattern, spec in TRAINING
)
# Sampling: the same, but nothing is divided over fsdp, and scales are divided as the channels that they are of.
SAMPLING: Table = (
    *((pattern, PartitionSpec(*(None if x == "fsdp" else x for x in spec))) for pattern, spec in UNSTACKED),
    (r"(embed/embedding|head/kernel)/scales", PartitionSpec("tensor")),
    (r"layers/\d+/(q|k|v|gate|up)/kernel/scales", PartitionSpec("tensor")),
    (r"layers/\d+/experts/(gate|up)/kernel/scales", PartitionSpec("expert", "tensor")),
    (r"layers/\d+/experts/down/kernel/scales", PartitionSpec("expert", None)),
)
# The kernels of a layer's experts while they multiply, [experts, I, O].
EXPERTS = {"gate": PartitionSpec("expert", None, "tensor"), "up": PartitionSpec("expert", None, "tensor")}
EXPERTS |= {"down": PartitionSpec("expert", "tensor", None)}

# Activations: batches stay split by rows; heads and MLP, between two projections, are also split over tensor.
ACTIVATIONS = {
    "lookup": PartitionSpec(DATA, None, SHARDS),  # [rows, T, hidden], like the embedding; one all-to-all to the next
    "residual": PartitionSpec(ROW_AXES, None, None),  # [rows, T, hidden]
    "heads": PartitionSpec(ROW_AXES, None, "tensor", None),  # [rows, T, heads, head_dim]
    "mlp": PartitionSpec(ROW_AXES, None, "tensor"),  # [rows, T, mlp]
}


def leaf_name(path: tuple) -> str:
    """A tree path as `layers/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """{`leaf_name`: leaf}, in the tree's order."""
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def spec_of(path: tuple, table: Table) -> PartitionSpec:
    """The table's spec of a leaf; leaves that it does not name are replicated."""
    name = leaf_name(path)
    return next((spec for pattern, spec in table if re.search(rf"(^|/){pattern}$", name)), REPLICATED)


def _widened(mesh, spec, shape):
    """The spec with SHARDS in place of fsdp, if the leaf has no other use of them and they divide the dimension."""
    if SHARDS[0] not in spec or {*SHARDS[1:]} & {*spec} or math.prod(mesh.shape[axis] for axis in SHARDS[1:]) == 1:
        return spec
    count = math.prod(mesh.shape[axis] for axis in SHARDS)
    sizes = zip(spec, shape, strict=False)
    return PartitionSpec(*(SHARDS if axis == SHARDS[0] and size % count == 0 else axis for axis, size in sizes))


def shardings(mesh: Mesh, tree: Any, table: Table = TRAINING) -> Any:
    """The NamedSharding of every leaf of a tree of arrays or shapes; leaves that `table` does not name are replicated.

    Raises ValueError: a mesh axis does not divide a dimension; the message names sizes that divide the whole tree.
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
            divisors = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise InputError(
                f"{name} {tuple(shape)}: mesh.{axis}={mesh.shape[axis]} does not divide {size}; for this model "
                f"mesh.{axis} may be {divisors}"
            )

    def place(path, leaf):
        return NamedSharding(mesh, _widened(mesh, spec_of(path, table), leaf.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def held(tree: Any) -> Any:
    """The specs that `over_rows` takes weights laid out by SAMPLING with: a shard of rows has experts of its own."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _without(spec_of(path, SAMPLING), {"tensor"}), tree)


def check_model(mesh: Mesh, model: Any) -> None:
    """Raises ValueError, as `shardings` does, for a mesh that does not divide a model's parameters or its KV heads."""
    if mesh.shape["expert"] > 1 and not model.config.experts:
        raise InputError(
            f"mesh.expert={mesh.shape['expert']} divides the experts of a layer, and a {model.config.model_type} has "
            f"none: set mesh.expert=1"
        )
    shardings(mesh, model.shapes | {"kv_heads": jax.ShapeDtypeStruct((model.config.kv_heads,), int)})


def _without(spec: PartitionSpec, axes) -> PartitionSpec:
    """The spec without some mesh axes."""

    def kept(entry):
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name is not None and name not in axes) or None

    return PartitionSpec(*map(kept, spec))


@functools.cache
def make_constrain(mesh: Mesh) -> Callable[[jax.Array, str], jax.Array]:
    """Builds the `constrain(array, name)` of a `Model`, which pins an activation to its spec in `ACTIVATIONS`.

    Inside `over_rows` an array holds one shard's rows, so the axes that split rows are left out of the spec; and one
    device's numbers where nothing splits them further.
    """

    def constrain(array, name):
        current, sharding = jax.sharding.get_abstract_mesh(), NamedSharding(mesh, ACTIVATIONS[name])
        if "tensor" in current.manual_axes:
            return array
        if current.manual_axes:
            sharding = NamedSharding(current, _without(sharding.spec, current.manual_axes))
        return jax.lax.with_sharding_constraint(array, sharding)

    return constrain


def over_rows(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """A shard_map of `function` over ROW_AXES, which its collectives may name; the compiler partitions `tensor`.

    Axes of one device partition nothing and are mapped over, too. As long as an axis is left to the compiler,
    JAX annotates every operation inside: two fifths of the instructions of the sampler's program.
    """
    names = ROW_AXES if mesh.shape["tensor"] > 1 else mesh.axis_names
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(names), check_vma=False
    )


@functools.cache
def make_per_shard(mesh: Mesh) -> Callable:
    """Builds the `per_shard(function, weights, shared, rows)` of a `Model`.

    It runs `function(weights, shared, rows) -> (partial sums, values)` on each data shard's rows. `weights`, a part of
    the training tree, are gathered over the data shards once, before that. The partial sums, a tree like `weights` or
    an empty one, are added over the shards afterwards and laid out like the weights. Arrays that are split over
    `tensor` stay so. The result cannot be differentiated.
    """

    def pin(tree, spec, leading=0):
        def pin_leaf(path, leaf):
            own = _widened(mesh, spec_of(path, TRAINING), leaf.shape[leading:])
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec(own)))

        return jax.tree_util.tree_map_with_path(pin_leaf, tree)

    def per_shard(function, weights, shared, rows):
        def local(weights, shared, rows):
            sums, values = function(weights, shared, rows)
            return jax.tree.map(lambda leaf: leaf[None, None], sums), values

        weights = pin(weights, lambda spec: _without(spec, ROW_AXES))
        run = over_rows(mesh, local, (REPLICATED, REPLICATED, ROWS), (PartitionSpec(DATA, SHARDS), ROWS))
        parts, values = run(weights, shared, rows)  # parts [data, shards, ...]
        # Summed outside of shard_map: a collective inside would gather what the compiler has split over tensor.
        parts = pin(parts, lambda spec: PartitionSpec(DATA, SHARDS, *_without(spec, ROW_AXES)), 2)
        # Reduce-scatter over shards, then all-reduce over data: leaves [data, ...], then [...].
        scattered = pin(jax.tree.map(lambda leaf: leaf.sum(1), parts), lambda spec: PartitionSpec(DATA, *spec), 1)
        return pin(jax.tree.map(lambda leaf: leaf.sum(0), scattered), lambda spec: spec), values

    return per_shard


@functools.cache
def make_per_expert(mesh: Mesh) -> Callable:
    """Builds the `per_expert(function, kernels, rows)` of a `Model`.

    It runs `function(kernels, first, *rows) -> out` where experts are: with the kernels of a device's experts, those
    from number `first` on, and the rows of all devices that divide experts. What they give is added up, also over those
    that divide hidden units, and each has the sums of its own rows. The result can be differentiated.
    """

    def local(function, kernels, *rows):
        first = jax.lax.axis_index("expert") * kernels["gate"].shape[0]
        gathered = (jax.lax.all_gather(x, "expert", tiled=True) for x in rows)
        here = jax.lax.psum_scatter(function(kernels, first, *gathered), "expert", tiled=True)
        return jax.lax.psum(here, "tensor")

    def per_expert(function, kernels, rows):
        run, manual = functools.partial(local, function), jax.sharding.get_abstract_mesh().manual_axes
        if "tensor" in manual:  # inside `over_rows`, whose rows and experts are a device's
            return run(kernels, *rows)
        own = {name: _without(spec, manual) for name, spec in EXPERTS.items()}
        by_rows = _without(ROWS, manual)
        return jax.shard_map(
            run, mesh=None if manual else mesh, in_specs=(own, *(by_rows,) * len(rows)), out_specs=by_rows,
            axis_names={*mesh.axis_names} - {*manual}, check_vma=False,
        )(kernels, *rows)  # fmt: skip

    return per_expert
