"""The device mesh of a run."""

import math
from collections import Counter
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from alload_jax.errors import InputError

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
        if self.data < 1 and self.data != -1:
            raise InputError(f"mesh.data is {self.data}; it must be at least 1, or -1 for the rest")
        for part in fields(self)[1:]:
            value = getattr(self, part.name)
            if value < 1:
                raise InputError(f"mesh.{part.name} is {value}; it must be at least 1")


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
    return jax.make_mesh(shape, AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def ranks_of(mesh: Mesh) -> int:
    """Number of data-parallel ranks: devices, or groups of devices, that take separate rows."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def row_shards(sharding: NamedSharding | None) -> int:
    """Number of shards that the rows of an array are split into; 1 without a sharding."""
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return 1
    axes = sharding.spec[0]
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)


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
    process = jax.process_index()
    devices_by_rank = mesh.devices.reshape(ranks_of(mesh), -1)
    is_own = np.vectorize(lambda device: device.process_index == process)
    local = is_own(devices_by_rank).any(axis=1)
    return frozenset(
        rank * each + n for rank in np.flatnonzero(local).tolist() for n in range(each)
    )


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Splits rows over all ranks."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Puts the same values on every device."""
    return NamedSharding(mesh, PartitionSpec())
