"""The Mosaic kernels as an implementation."""

from pallas_kernels import mosaic_support
from pallas_kernels.block_sparse_attention.differentiable import Kernels
from pallas_kernels.block_sparse_attention.kernel_implementation import KernelImplementation
from pallas_kernels.block_sparse_attention.operands import CallConfig

# What needs Pallas's Mosaic lowering is imported where it runs: a JAX without it must still run
# the other implementations.


class MosaicImplementation(KernelImplementation):
    """The kernels of this folder, on NVIDIA Hopper GPUs."""

    name = "mosaic"

    def kernels(self) -> Kernels:
        """The calls of this folder."""
        from pallas_kernels.block_sparse_attention.mosaic import calls

        return Kernels(calls.forward, calls.query_gradient, calls.key_gradients)

    def unsupported_here(self, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, or another device."""
        return mosaic_support.missing_lowering() or mosaic_support.unsupported_device()
