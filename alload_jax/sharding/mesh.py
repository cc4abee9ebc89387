"""The device mesh of a run, rules by which arrays are split over it, and its shape groups.

Shape groups are slices of the mesh that each run their own programs between global updates.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from alload_jax.errors import InputError, require_fields, require_positive
from alload_jax.planning.plan import Plan

AXES = ("data", "fsdp", "context", "tensor")
"""The axes of every mesh, from those over the slowest links to those over the fastest."""

CONTEXT, TENSOR = AXES[2:]

BATCH_AXES = ("data", "fsdp", "context")
"""Mesh axes over which rows of a batch are split; their product is the number of ranks."""
AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or of none in particular."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; their product must be the number of devices.

    Attributes:
      data: replicas of the parameters; −1 takes all devices that the other axes leave.
      fsdp: devices over which one copy of the parameters is sharded.
      context: ranks of a group over which long samples are split (packed plans).
      tensor: devices over which the heads and the hidden width of one rank are split.
    """

    data: int = -1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        bound = "at least 1, or -1 for the rest"
        require_fields("mesh.", self, "data", lambda value: value >= 1 or value == -1, bound)
        require_positive("mesh.", self, *(part.name for part in fields(self)[1:]))


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices, or those given. Its axes are Auto: XLA infers missing shardings.

    Raises:
      InputError: the product of the axes is not the number of devices, or processes have different
        numbers of devices.
    """
    devices = jax.devices() if devices is None else devices
    counts = Counter(device.process_index for device in devices)
    for process, count in counts.items():
        if count != counts[0]:
            raise InputError(
                f"process {process} has {count} device(s), but process 0 has {counts[0]}; give all "
                "processes the same number (set CUDA_VISIBLE_DEVICES)"
            )
    others = config.fsdp * config.context * config.tensor
    data = len(devices) // others if config.data == -1 else config.data
    if data * others != len(devices):
        sizes = ", ".join(f"{name} {getattr(config, name)}" for name in AXES)
        raise InputError(
            f"mesh ({sizes}) does not fit {len(devices)} {devices[0].platform} device(s); the "
            "product of its axes must be their number"
        )
    shape = (data, config.fsdp, config.context, config.tensor)
    # Not by jax.make_mesh, which refuses GPUs of several hosts (jax-ml/jax issue 37769).
    placed = mesh_utils.create_device_mesh(shape, devices)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def ranks_of(mesh: Mesh) -> int:
    """Number of data-parallel ranks: devices, or groups of devices, that take separate rows."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def row_shards(sharding: NamedSharding | None) -> int:
    """Number of shards that the rows of an array are split into; 1 without a sharding."""
    return _size(sharding.mesh, sharding.spec[0]) if sharding and sharding.spec else 1


def with_tensor_axis(sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of [B, S, D] whose width tensor parallelism splits, by that of its tokens."""
    if sharding is None or sharding.mesh.shape.get(TENSOR, 1) == 1:
        return sharding
    rows, tokens, *_ = (*sharding.spec, None, None)
    return NamedSharding(sharding.mesh, PartitionSpec(rows, tokens, TENSOR))


def local_plan_ranks(mesh: Mesh, ranks: int, context: int = 1) -> frozenset[int]:
    """The plan's ranks that run on this process's devices. Each rank of the mesh gets as many.

    Args:
      mesh: all devices.
      ranks: number of ranks of the plan.
      context: number of ranks over which the plan splits a sample.

    Raises:
      InputError: the plan's ranks are not a multiple of the mesh's, or there are more of them and
        samples are split.
    """
    if ranks % ranks_of(mesh):
        raise InputError(
            f"planning.ranks is {ranks}, not a multiple of the mesh's {ranks_of(mesh)} ranks "
            "(data·fsdp·context); make it a multiple, or leave it out"
        )
    each = ranks // ranks_of(mesh)
    if each > 1 and context > 1:
        raise InputError(
            f"planning.ranks is {ranks}, but with samples split over mesh.context {context} it "
            f"must be the number of the mesh's ranks, {ranks_of(mesh)}; leave it out"
        )
    is_own = np.array(processes_of(mesh)) == jax.process_index()
    local = np.flatnonzero(is_own.reshape(ranks_of(mesh), -1).any(axis=1)).tolist()
    return frozenset(rank * each + n for rank in local for n in range(each))


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Splits rows over all ranks."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Puts the same values on every device."""
    return NamedSharding(mesh, PartitionSpec())


Rules = tuple[tuple[str, PartitionSpec], ...]
"""(pattern, rule) pairs of a model family; the first pattern found in a path decides. Paths of
optimizer state and EMA end as those of their parameters."""

ZERO_AXES = ("context", "data")
"""Over which optimizer state and EMA are split beyond their parameters, from the fastest links."""


def path_name(path: tuple[object, ...]) -> str:
    """`blocks/self_attention/query/kernel` from a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def tree_shardings(tree: PyTree, mesh: AnyMesh, rules: Rules) -> PyTree:
    """A NamedSharding for every leaf of a tree of arrays (or of their shapes).

    Raises:
      InputError: an axis to be split is not a multiple of the mesh axis.
    """

    def sharding(path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        name = path_name(path)
        spec = _first_match(name, rules) if leaf.ndim else PartitionSpec()
        for size, axes in zip(leaf.shape, spec, strict=False):
            if size % (parts := _size(mesh, axes)):
                wide = (axis for axis in _names(axes) if mesh.shape[axis] > 1)
                what = "·".join(f"mesh.{axis}" for axis in wide)
                raise InputError(
                    f"{what} is {parts}, which does not divide {size} of {name} {leaf.shape}; "
                    f"choose {what} or the model's widths so that it does"
                )
        return NamedSharding(mesh, spec)

    return jax.tree.map_with_path(sharding, tree)


def zero_shardings(
    tree: PyTree, mesh: AnyMesh, rules: Rules, over: tuple[str, ...] = ZERO_AXES
) -> PyTree:
    """`tree_shardings`, split over replicas too where that goes (ZeRO, arXiv 1910.02054).

    For what only the update needs: gradients, optimizer state, EMA. Each replica updates its own
    part of the parameters: the axis that `fsdp` splits is split over more mesh axes, as far as they
    divide. Some optimizers keep arrays of other shapes for a parameter, such as means over an axis
    or scales of blocks: these are split where its rule fits, else replicated.
    """

    def sharding(path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        spec = _first_match(path_name(path), rules)
        if len(spec) > leaf.ndim:
            return replicated(mesh)
        split: list[str | tuple[str, ...] | None] = []
        for size, axes in zip(leaf.shape, spec, strict=False):
            names = _names(axes) if size % _size(mesh, axes) == 0 else ()
            for more in over if "fsdp" in names else ():
                if size % _size(mesh, (*names, more)) == 0:
                    names += (more,)
            split.append(names[0] if len(names) == 1 else names or None)
        return NamedSharding(mesh, PartitionSpec(*split))

    return jax.tree.map_with_path(sharding, tree)


def _first_match(name: str, rules: Rules) -> PartitionSpec:
    array = name.removesuffix("/values")  # of a kernel with values and scale
    for pattern, spec in rules:
        if re.search(pattern, array):
            return spec
    raise ValueError(f"no partition rule matches {name}; end the rules with one for '.'")


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return axes if isinstance(axes, tuple) else (axes,) if axes else ()


def _size(mesh: AnyMesh, axes: str | tuple[str, ...] | None) -> int:
    """Number of parts into which mesh axes split an axis of an array."""
    return math.prod(mesh.shape[axis] for axis in _names(axes))


HOST_MEMORY = "pinned_host"
"""JAX's name of the host's memory from which devices copy by themselves."""


def in_host_memory(array: jax.Array | np.ndarray) -> bool:
    """Whether an array on a mesh is in the host's memory."""
    return isinstance(array, jax.Array) and array.sharding.memory_kind == HOST_MEMORY


def on_device(array: jax.Array) -> jax.Array:
    """The array, copied to its devices where it is in the host's memory."""
    if not in_host_memory(array):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind("device"))


# ---------------------------------------------------------------- shape groups

GROUP_AXIS = "data"
"""The mesh axis whose indices number the shape groups."""


def ranks_per_group(mesh: Mesh) -> int:
    """Number of ranks in a shape group of the mesh."""
    return ranks_of(mesh) // mesh.shape[GROUP_AXIS]


def split_mesh(mesh: Mesh) -> tuple[Mesh, ...]:
    """The mesh of each shape group: it has the same axes, and `data` has size 1."""
    return tuple(
        Mesh(mesh.devices[n : n + 1], mesh.axis_names, axis_types=mesh.axis_types)
        for n in range(mesh.shape[GROUP_AXIS])
    )


def group_meshes(mesh: Mesh, plan: Plan) -> tuple[Mesh, ...]:
    """The mesh that runs each of a plan's shape groups; empty if all ranks form one group.

    If the plan has more groups than the mesh, consecutive groups of the plan share a mesh.

    Raises:
      InputError: the plan's groups do not fit those of the mesh, or a group of the mesh spans
        several processes.
    """
    if plan.shape_groups == 1:
        return ()
    if plan.group_ranks % ranks_per_group(mesh):
        raise InputError(
            f"planning.ranks_per_group is {plan.group_ranks}, not a multiple of the "
            f"{ranks_per_group(mesh)} ranks (fsdp·context) of a shape group of the mesh; make it "
            "a multiple, or leave it out"
        )
    meshes = split_mesh(mesh)
    for number, group in enumerate(meshes):
        if len(spanned := sorted(set(processes_of(group)))) > 1:
            raise InputError(
                f"mesh.data makes shape group {number} span processes {spanned}, and "
                "planning.ranks_mode independent needs every group to lie within one process; make "
                "fsdp·context·tensor divide the devices of a process, or set ranks_mode synchronous"
            )
    if plan.shape_groups % len(meshes):
        raise InputError(
            f"planning.ranks_per_group is {plan.group_ranks}, so the plan has "
            f"{plan.shape_groups} shape groups, which mesh.data = {len(meshes)} does not divide; "
            "choose a smaller value, or leave it out"
        )
    each = plan.shape_groups // len(meshes)
    return tuple(group for group in meshes for _ in range(each))


def can_group(mesh: Mesh) -> bool:
    """Whether ranks may have shapes of their own: no shape group spans several processes."""
    return all(len(set(processes_of(group))) == 1 for group in split_mesh(mesh))


def processes_of(mesh: Mesh) -> list[int]:
    """The process of each device of a mesh."""
    return [device.process_index for device in mesh.devices.flat]


def is_local(mesh: Mesh) -> bool:
    """Whether this process has devices of the mesh."""
    return jax.process_index() in processes_of(mesh)


def part_of_group(tree: PyTree, shardings: PyTree) -> PyTree:
    """The part of a tree of global arrays that lies on a group's devices. Copies nothing.

    The arrays of a group of one device have the sharding of that device, which is quicker to make.

    Args:
      tree: arrays that are replicated over the groups, or whose first axis numbers the groups; or
        their shapes.
      shardings: of the result, over the group's mesh; a first axis of groups is split over `data`.
    """

    def part(array: PyTree, sharding: NamedSharding) -> jax.Array | jax.ShapeDtypeStruct:
        stacked = len(sharding.spec) > 0 and sharding.spec[0] == GROUP_AXIS
        shape = (1, *array.shape[1:]) if stacked else array.shape
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)
        own = [s.data for s in array.addressable_shards if s.device in sharding.device_set]
        if sharding.mesh.size == 1:
            return own[0]
        return jax.make_array_from_single_device_arrays(shape, sharding, own)

    return jax.tree.map(part, tree, shardings)


def join_groups(parts: Sequence[PyTree], shardings: PyTree) -> PyTree:
    """The inverse of `part_of_group` for arrays with a first axis of groups. Copies nothing.

    Args:
      parts: a tree of arrays [1, ...] for each group with devices of this process.
      shardings: of the result [groups, ...], over the whole mesh; the first axis is split over
        `data`.
    """

    def join(sharding: NamedSharding, *arrays: jax.Array) -> jax.Array:
        shape = (sharding.mesh.shape[GROUP_AXIS], *arrays[0].shape[1:])
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    return jax.tree.map(join, shardings, *parts)
