"""The Triton kernels as an implementation: what they can do, and where they are faster."""

import jax

from pallas_kernels import devices, triton_support
from pallas_kernels.bias_gelu.differentiable import FusedImplementation
from pallas_kernels.bias_gelu.operands import CallConfig, Operands, Options
from pallas_kernels.bias_gelu.triton import tuning

# What needs Pallas's Triton lowering is imported where it runs: it is deprecated, and a JAX
# without it must still run the other implementations.


class TritonImplementation(FusedImplementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Another device or JAX, a checking shard_map, a split that does not fit."""
        return (
            triton_support.missing_lowering()
            or (None if config.options.interpret else triton_support.unsupported_device())
            or devices.unsupported_manual_axes(operands.x)
            or super().unsupported_reason(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """As measured, see `tuning.py`."""
        x, sharding = operands.x, config.sharding
        shards = devices.shards_of(sharding, 2)
        elements = devices.elements_per_device(x, sharding) // shards
        kind, width = devices.device_kind(), x.shape[-1] // shards
        return tuning.faster_than_reference(kind, elements, width, x.dtype.itemsize)

    def forward(self, operands: Operands, options: Options) -> jax.Array:
        """One kernel."""
        from pallas_kernels.bias_gelu.triton import calls

        return calls.forward(operands, options)

    def backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        """One kernel, and one that adds up the partial sums of the bias's gradient."""
        from pallas_kernels.bias_gelu.triton import calls

        return calls.backward(operands, cotangent, options)
