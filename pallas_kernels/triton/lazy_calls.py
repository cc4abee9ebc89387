"""Kernels whose calls are imported where they run.

They need Pallas's Triton lowering, which is deprecated, and a JAX without it must still run the
other implementations.
"""

from importlib import import_module

import jax

from pallas_kernels.shardwise import Operands, Options, ShardwiseKernels


class LazyCalls(ShardwiseKernels[Operands, Options]):
    """Forward and backward are the functions of these names in a module.

    Attributes:
      calls: the module's name.
    """

    calls: str

    def forward(self, operands: Operands, options: Options) -> jax.Array:
        """See `ShardwiseKernels.forward`."""
        return import_module(self.calls).forward(operands, options)

    def backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, ...]:
        """See `ShardwiseKernels.backward`."""
        return import_module(self.calls).backward(operands, cotangent, options)
