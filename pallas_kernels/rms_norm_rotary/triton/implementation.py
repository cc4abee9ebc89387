"""The Triton kernels as an implementation: what they can do, and where they are faster."""

import jax

from pallas_kernels import devices, triton_support
from pallas_kernels.rms_norm_rotary.differentiable import FusedImplementation
from pallas_kernels.rms_norm_rotary.operands import CallConfig, Operands, Options
from pallas_kernels.rms_norm_rotary.triton import tuning

# What needs Pallas's Triton lowering is imported where it runs: it is deprecated, and a JAX
# without it must still run the other implementations.


class TritonImplementation(FusedImplementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Another device or JAX, a checking shard_map, an odd head, a split that does not fit."""
        head_dim = config.options.head_dim
        if head_dim & (head_dim - 1) or head_dim < 2:
            return NotImplementedError(
                f"head_dim={head_dim} is not a power of two from 2 on; use 'xla' or 'auto'"
            )
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
        width, head_dim = x.shape[-1] // shards, config.options.head_dim
        kind = devices.device_kind()
        return tuning.faster_than_reference(kind, elements, width, head_dim, x.dtype.itemsize)

    def forward(self, operands: Operands, options: Options) -> jax.Array:
        """One kernel."""
        from pallas_kernels.rms_norm_rotary.triton import calls

        return calls.forward(operands, options)

    def backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, jax.Array]:
        """One kernel, and one that adds up the partial sums of the weight's gradient."""
        from pallas_kernels.rms_norm_rotary.triton import calls

        return calls.backward(operands, cotangent, options)
