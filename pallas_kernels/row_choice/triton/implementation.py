"""The Triton kernel as an implementation: what it can do, and where it is faster."""

from importlib import import_module

import jax

from pallas_kernels import devices, triton_support
from pallas_kernels.row_choice.implementation import Implementation
from pallas_kernels.row_choice.operands import Operands

_LEAST_BYTES = 2**20
"""Of a part, below which a launch takes longer than XLA's selects."""


class TritonImplementation(Implementation):
    """The kernel of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    def unsupported_reason(self, operands: Operands, interpret: bool) -> Exception | None:
        """Another device or JAX, a checking shard_map."""
        return triton_support.unsupported_here(
            interpret=interpret
        ) or devices.unsupported_manual_axes(operands.parts[0])

    def faster_than_reference(self, operands: Operands, interpret: bool) -> bool:
        """It moves a part of what XLA's selects move."""
        return operands.parts[0].nbytes >= _LEAST_BYTES

    def run(self, operands: Operands, interpret: bool) -> jax.Array:
        """See `Implementation.run`."""
        # Imported where it runs: a JAX without Pallas's Triton lowering must run the other one.
        return import_module("pallas_kernels.row_choice.triton.calls").choose(operands, interpret)
