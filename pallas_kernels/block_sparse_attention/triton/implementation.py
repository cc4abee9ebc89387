"""The Triton kernels as an implementation."""

from pallas_kernels import triton_support
from pallas_kernels.block_sparse_attention.differentiable import Kernels
from pallas_kernels.block_sparse_attention.kernel_implementation import KernelImplementation
from pallas_kernels.block_sparse_attention.operands import CallConfig

# What needs Pallas's Triton lowering is imported where it runs: it is deprecated, and a JAX
# without it must still run the reference.


class TritonImplementation(KernelImplementation):
    """The kernels of this folder, on NVIDIA GPUs since Ampere."""

    name = "triton"
    interpretable = True

    def kernels(self) -> Kernels:
        """The calls of this folder."""
        from pallas_kernels.block_sparse_attention.triton import calls

        return Kernels(calls.forward, calls.query_gradient, calls.key_gradients)

    def unsupported_here(self, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, or another device."""
        return triton_support.unsupported_here(interpret=config.options.interpret)
