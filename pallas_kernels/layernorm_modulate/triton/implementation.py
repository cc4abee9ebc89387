"""The Triton kernels as an implementation: what they can do, and where they are faster."""

from collections.abc import Sequence
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels import devices, triton_support
from pallas_kernels.first_use import COMPARISONS, ELEMENTS, compared
from pallas_kernels.layernorm_modulate.differentiable import FusedImplementation
from pallas_kernels.layernorm_modulate.operands import (
    CallConfig,
    ModulationLayout,
    Operands,
    Options,
    Residuals,
)
from pallas_kernels.layernorm_modulate.reference import XlaImplementation
from pallas_kernels.layernorm_modulate.row_blocks import segment_row_blocks
from pallas_kernels.layernorm_modulate.triton import tuning
from pallas_kernels.layernorm_modulate.triton.division import Pass

# What needs Pallas's Triton lowering is imported where it runs: it is deprecated, and a JAX
# without it must still run the other implementations.

_SEGMENTS = 8
"""Of the row that a comparison with segments takes."""


class TritonImplementation(FusedImplementation):
    """The kernels of this folder, on NVIDIA GPUs."""

    name = "triton"
    interpretable = True

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, another device, a shard_map that checks, a split width."""
        return (
            triton_support.unsupported_here(interpret=config.options.interpret)
            or devices.unsupported_manual_axes(operands.x)
            or super().unsupported_reason(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """As measured, see `tuning.py`; where nothing was, as it is at first use."""
        x, layout = operands.x, config.options.layout
        elements = devices.elements_per_device(x, config.sharding)
        dim, kind = x.shape[-1], devices.device_kind()
        known = tuning.measured_as_faster(kind, layout, elements, dim)
        if known is not None:
            return known
        case = f"layernorm_modulate {dim} {x.dtype} {layout}"
        return COMPARISONS.faster(case, partial(self._times, dim, x.dtype, layout))

    def _times(self, dim: int, dtype: jnp.dtype, layout: ModulationLayout) -> tuple[float, float]:
        """Seconds of XLA's fusion and of the kernels here, which those derived from it share."""
        tokens, keys = max(1, ELEMENTS // dim), jax.random.split(jax.random.key(0), 3)
        tables: dict[ModulationLayout, tuple[int, ...]] = {
            "row": (1, dim),
            "token": (1, tokens, dim),
            "segment": (1, _SEGMENTS, dim),
        }
        x = jax.random.normal(keys[0], (1, tokens, dim), dtype)
        scale, shift = (jax.random.normal(key, tables[layout]) for key in keys[1:])
        ids = None
        if layout == "segment":
            ids = (jnp.arange(tokens, dtype=jnp.int32) * _SEGMENTS // tokens)[None]
        rounded = jnp.dtype(dtype)
        options = Options(layout, 1e-6, rounded, rounded, rounded)

        def operands(x: jax.Array, scale: jax.Array, shift: jax.Array) -> Operands:
            return Operands(x, scale, shift, segment_ids=ids)

        config = CallConfig(options, None)
        return compared(
            (XlaImplementation(), TritonImplementation()), operands, config, (x, scale, shift)
        )

    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> dict[str, Any]:
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

        # Without the norm, a program holds no more than the plain backward's.
        kernel: Pass = "backward"
        if dh is not None and dout is not None:
            kernel = "sum_backward" if residuals.gate is None else "residual_backward"
        blocks = tuning.blocks_for(kernel, residuals.h.shape[-1])
        own = residuals.prepared and residuals.prepared[kernel]
        return calls.backward(residuals._replace(prepared=own), dh, dout, options, blocks)
