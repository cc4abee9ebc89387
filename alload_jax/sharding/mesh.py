"""The device mesh of a run."""

import math
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alload_jax.errors import InputError

BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which rows of a batch are split; their product is the number of ranks."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh's axes; their product must be the number of devices.

    Attributes:
      data: replicas of the parameters; −1 takes the devices that are left.
      fsdp: devices that share one copy of parameters, optimizer state and EMA.
    """

    data: int = -1
    fsdp: int = 1

    def __post_init__(self) -> None:
        if self.data < 1 and self.data != -1:
            raise InputError(f"mesh.data is {self.data}; it must be at least 1, or -1 for the rest")
        if self.fsdp < 1:
            raise InputError(f"mesh.fsdp is {self.fsdp}; it must be at least 1")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices (or those given), with Auto axes: XLA places what is not said.

    Raises:
      InputError: the axes don't multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    data = len(devices) // config.fsdp if config.data == -1 else config.data
    if data * config.fsdp != len(devices):
        raise InputError(
            f"mesh.data {config.data} and mesh.fsdp {config.fsdp} do not fit "
            f"{len(devices)} {devices[0].platform} device(s); data·fsdp must be {len(devices)}"
        )
    return jax.make_mesh((data, config.fsdp), BATCH_AXES, (AxisType.Auto,) * 2, devices=devices)


def ranks_of(mesh: Mesh) -> int:
    """Data-parallel ranks: devices that each take rows of their own."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def row_shards(sharding: NamedSharding | None) -> int:
    """Among how many devices the rows of an array are split; 1 without a sharding."""
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return 1
    axes = sharding.spec[0]
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names)


def local_plan_ranks(mesh: Mesh, ranks: int) -> frozenset[int]:
    """Which of a plan's ranks this process feeds: those of its devices, which share them evenly.

    Raises:
      InputError: the plan's ranks are not a multiple of the mesh's.
    """
    if ranks % ranks_of(mesh):
        raise InputError(
            f"planning.ranks is {ranks}, not a multiple of the mesh's {ranks_of(mesh)} ranks "
            "(data·fsdp); make it one, or leave it out"
        )
    each = ranks // ranks_of(mesh)
    process = jax.process_index()
    return frozenset(
        device_rank * each + n
        for device_rank, device in enumerate(mesh.devices.flat)
        if device.process_index == process
        for n in range(each)
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over all ranks."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())
