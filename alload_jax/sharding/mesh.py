"""The device mesh of a run."""

import math
from collections import Counter
from dataclasses import dataclass, fields

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alload_jax.errors import InputError

AXES = ("data", "fsdp", "context", "tensor")
"""Of every mesh, whatever their sizes; from the slowest links to the fastest."""

CONTEXT, TENSOR = AXES[2:]

BATCH_AXES = ("data", "fsdp", "context")
"""Mesh axes over which rows of a batch are split; their product is the number of ranks."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; their product must be the number of devices.

    Attributes:
      data: replicas of the parameters; −1 takes the devices that are left.
      fsdp: devices that share one copy of the parameters.
      context: ranks of a group over which long samples are split (packed plans).
      tensor: devices that share the heads and the hidden width of one rank's work.
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
    """The mesh over all devices (or those given), with Auto axes: XLA places what is not said.

    Raises:
      InputError: the axes don't multiply to the number of devices, or processes have more devices
        than others.
    """
    devices = jax.devices() if devices is None else devices
    counts = Counter(device.process_index for device in devices)
    for process, count in counts.items():
        if count != counts[0]:
            raise InputError(
                f"process {process} has {count} device(s), but process 0 has {counts[0]}; give all "
                "as many (CUDA_VISIBLE_DEVICES chooses)"
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
    """Data-parallel ranks: (groups of) devices that each take rows of their own."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def row_shards(sharding: NamedSharding | None) -> int:
    """Among how many devices the rows of an array are split; 1 without a sharding."""
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return 1
    axes = sharding.spec[0]
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def local_plan_ranks(mesh: Mesh, ranks: int, context: int = 1) -> frozenset[int]:
    """Which of a plan's ranks this process feeds: those of its devices, which share them evenly.

    Args:
      mesh: all devices.
      ranks: of the plan.
      context: over how many of them the plan splits samples.

    Raises:
      InputError: the plan's ranks are not a multiple of the mesh's, or are more and samples are
        split.
    """
    if ranks % ranks_of(mesh):
        raise InputError(
            f"planning.ranks is {ranks}, not a multiple of the mesh's {ranks_of(mesh)} ranks "
            "(data·fsdp·context); make it one, or leave it out"
        )
    each = ranks // ranks_of(mesh)
    if each > 1 and context > 1:
        raise InputError(
            f"planning.ranks is {ranks}, but where samples are split over mesh.context {context} "
            f"each of the mesh's {ranks_of(mesh)} ranks is one of the plan's; leave it out"
        )
    process = jax.process_index()
    of_rank = mesh.devices.reshape(ranks_of(mesh), -1)
    local = np.vectorize(lambda device: device.process_index == process)(of_rank).any(axis=1)
    return frozenset(
        rank * each + n for rank in np.flatnonzero(local).tolist() for n in range(each)
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over all ranks."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())
