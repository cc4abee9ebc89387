"""What the implementations by kernels have in common."""

from abc import abstractmethod

import jax

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention.differentiable import Kernels, attention
from pallas_kernels.block_sparse_attention.implementation import Implementation
from pallas_kernels.block_sparse_attention.operands import (
    CallConfig,
    Operands,
    unsupported_by_kernels,
)
from pallas_kernels.block_sparse_attention.shards import unsupported_sharding

_MOST_ELEMENTS = 2**31
"""Offsets within an array are 32-bit counts of elements."""


class KernelImplementation(Implementation):
    """Kernels on NVIDIA GPUs."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """Imports the calls, which need a JAX that can lower them."""

    @abstractmethod
    def unsupported_here(self, config: CallConfig) -> Exception | None:
        """Why this JAX or this device cannot run them; None if it can."""

    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array, jax.Array]:
        """See `Implementation.run`."""
        return attention(*operands, config, self.kernels())

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, another device, dtype, width or sharding, or too much."""
        return (
            self.unsupported_here(config)
            or unsupported_by_kernels(operands)
            or devices.unsupported_manual_axes(operands.q)
            or unsupported_sharding(operands.q, config.sharding)
            or _too_large(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """Always: the reference copies the keys of every list."""
        return True


def _too_large(operands: Operands, config: CallConfig) -> Exception | None:
    shards = devices.shards_of(config.sharding, 0) * devices.shards_of(config.sharding, 2)
    arrays = {"q": operands.q, "k": operands.k, "blocks.indices": operands.blocks.indices}
    for name, array in arrays.items():
        if array.size // shards >= _MOST_ELEMENTS:
            return NotImplementedError(
                f"{name} {array.shape} has 2³¹ elements or more on a device; split it over "
                "more devices or calls"
            )
    return None
