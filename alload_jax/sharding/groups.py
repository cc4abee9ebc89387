"""Shape groups: slices of the mesh that each run their own programs between global updates."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile
from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import ranks_of

GROUP_AXIS = "data"
"""The mesh axis whose indices number the shape groups."""


def ranks_per_group(mesh: Mesh) -> int:
    """Number of ranks in a shape group of the mesh."""
    return ranks_of(mesh) // mesh.shape[GROUP_AXIS]


def plan_on(
    mesh: Mesh,
    config: PlanningConfig,
    samples: Samples,
    seed: int,
    costs: CostFile | None = None,
) -> Plan:
    """The plan that a config asks for, for the ranks and shape groups of a mesh.

    Args:
      mesh: the devices.
      config: the settings.
      samples: the samples of the data set.
      seed: seed of the order of samples.
      costs: the cost model's file; None reads what the config names.

    Raises:
      InputError: a sample cannot be placed, or a bound is missing.
    """
    group_size = ranks_per_group(mesh)
    return make_plan(config, samples, ranks_of(mesh), seed, costs, group_size)


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
        refuse_spanning(number, [device.process_index for device in group.devices.flat])
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
    return all(
        len({device.process_index for device in group.devices.flat}) == 1
        for group in split_mesh(mesh)
    )


def refuse_spanning(group: int, processes: Sequence[int]) -> None:
    """Refuses a shape group whose devices belong to several processes.

    Args:
      group: number of the group.
      processes: the process of each of its devices.

    Raises:
      InputError: they differ.
    """
    if len(set(processes)) > 1:
        raise InputError(
            f"mesh.data makes shape group {group} span processes {sorted(set(processes))}, and "
            "planning.ranks_mode independent needs every group to lie within one process; make "
            "fsdp·context·tensor divide the devices of a process, or set ranks_mode synchronous"
        )


def is_local(mesh: Mesh) -> bool:
    """Whether this process has devices of the mesh."""
    return any(device.process_index == jax.process_index() for device in mesh.devices.flat)


def part_of_group(tree: Any, shardings: Any) -> Any:
    """The part of a tree of global arrays that lies on a group's devices. Copies nothing.

    Args:
      tree: arrays that are replicated over the groups, or whose first axis numbers the groups.
      shardings: of the result, over the group's mesh; a first axis of groups is split over `data`.
    """

    def part(array: jax.Array, sharding: NamedSharding) -> jax.Array:
        stacked = len(sharding.spec) > 0 and sharding.spec[0] == GROUP_AXIS
        shape = (1, *array.shape[1:]) if stacked else array.shape
        own = [s.data for s in array.addressable_shards if s.device in sharding.device_set]
        return jax.make_array_from_single_device_arrays(shape, sharding, own)

    return jax.tree.map(part, tree, shardings)


def join_groups(parts: Sequence[Any], shardings: Any) -> Any:
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
