"""The Triton kernels as an implementation: what they can do, and where they are faster."""

from collections.abc import Sequence
from typing import get_args

import jax
from jax.sharding import NamedSharding

from pallas_kernels import devices, triton_support
from pallas_kernels.layernorm_modulate.differentiable import FusedImplementation
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands, Options, Residuals
from pallas_kernels.layernorm_modulate.triton import tuning
from pallas_kernels.layernorm_modulate.triton.division import Pass
from pallas_kernels.layernorm_modulate.triton.row_blocks import RowBlocks, segment_row_blocks

# What needs Pallas's Triton lowering is imported where it runs: it is deprecated, and a JAX
# without it must still run the other implementations.


class TritonImplementation(FusedImplementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, another device, a shard_map that checks, a split width."""
        return (
            triton_support.missing_lowering()
            or (None if config.options.interpret else triton_support.unsupported_device())
            or devices.unsupported_manual_axes(operands.x)
            or super().unsupported_reason(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """As measured, see `tuning.py`."""
        return tuning.faster_than_reference(
            devices.device_kind(),
            config.options.layout,
            devices.elements_per_device(operands.x, config.sharding),
            operands.x.shape[-1],
        )

    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> dict[Pass, RowBlocks]:
        """The row blocks of each kernel."""
        # Each device has the programs for its own rows.
        shards = devices.shards_of(sharding, 0)
        return {
            kernel: segment_row_blocks(
                segment_ids, table_rows, None, tuning.blocks_for(kernel, width).programs * shards
            )
            for kernel in get_args(Pass)
        }

    def forward(
        self, operands: Operands, options: Options, *, statistics: bool
    ) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """One kernel; statistics are mean and 1/deviation of each row, [B, S, 2] float32."""
        from pallas_kernels.layernorm_modulate.triton import primitive

        kernel: Pass = "forward" if operands.y is None else "residual_forward"
        blocks = tuning.blocks_for(kernel, operands.x.shape[-1])
        own = operands.prepared and operands.prepared[kernel]
        return primitive.forward(
            operands._replace(prepared=own), options, blocks, statistics=statistics
        )

    def backward(
        self,
        residuals: Residuals,
        dh: jax.Array | None,
        dout: jax.Array | None,
        options: Options,
    ) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
        """One kernel, and one that adds up the partial sums of the tables' gradients."""
        from pallas_kernels.layernorm_modulate.triton import calls

        kernel: Pass = "backward" if dh is None else "residual_backward"
        blocks = tuning.blocks_for(kernel, residuals.h.shape[-1])
        own = residuals.prepared and residuals.prepared[kernel]
        return calls.backward(residuals._replace(prepared=own), dh, dout, options, blocks)
