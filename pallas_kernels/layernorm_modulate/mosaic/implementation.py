"""The Mosaic kernel as an implementation, beside the Triton kernels."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from pallas_kernels import devices, mosaic_support
from pallas_kernels.layernorm_modulate.mosaic.tuning import (
    PER_CORE,
    Norm,
    Way,
    faster_than_triton,
    way_for,
)
from pallas_kernels.layernorm_modulate.mosaic.walks import walks_of
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands, Options, Residuals
from pallas_kernels.layernorm_modulate.triton import TritonImplementation

# What needs Pallas's Mosaic lowering is imported where it runs: a JAX without it must still run
# the other implementations.


class MosaicImplementation(TritonImplementation):
    """The Triton kernels, but this folder's for the backward of rows that it takes."""

    name = "mosaic"
    interpretable = False

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """A JAX without the lowering, another device, or where the Triton kernels cannot run."""
        return (
            mosaic_support.missing_lowering()
            or mosaic_support.unsupported_device()
            or super().unsupported_reason(operands, config)
        )

    def faster_than_reference(self, operands: Operands, config: CallConfig) -> bool:
        """As the Triton kernels are, where the backward here was faster than theirs."""
        x, options, norm = operands.x, config.options, _norm(operands, config)
        if not faster_than_triton(options.layout, norm, x.shape[-1]):
            return False
        y = x if operands.y is None else operands.y
        streams = {"plain": (x, y), "sum": (x, y, x), "gated": (x, y, x, y)}[norm]
        # Wider dtypes were not compared.
        if any(each.dtype.itemsize > 2 for each in streams) or _way(streams, options) is None:
            return False
        return super().faster_than_reference(operands, config)

    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> dict[str, Any]:
        """The row blocks of each Triton kernel, and the walks of the one here."""
        # Each device has the programs for its own rows.
        shards = devices.shards_of(sharding, 0)
        cores = devices.core_count() * shards
        walks = {
            _walks(per_core): walks_of(segment_ids, table_rows, None, per_core * cores)
            for per_core in PER_CORE
        }
        return super().prepare_segments(segment_ids, table_rows, width, sharding) | walks

    def backward(
        self,
        residuals: Residuals,
        dh: jax.Array | None,
        dout: jax.Array | None,
        options: Options,
    ) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
        """The kernel here, and Triton's that adds up the partial sums of the tables' gradients."""
        streams = [each for each in (residuals.h, dout, dh, residuals.y) if each is not None]
        way = _way(streams, options)
        if dout is None or way is None:
            return super().backward(residuals, dh, dout, options)
        from pallas_kernels.layernorm_modulate.mosaic import calls

        walks = residuals.prepared and residuals.prepared[_walks(way.per_core)]
        return calls.backward(residuals, dh, dout, options, way, walks)


def _norm(operands: Operands, config: CallConfig) -> Norm:
    if config.options.h is None:
        return "plain"
    return "sum" if operands.gate is None else "gated"


def _way(streams: Sequence[jax.Array], options: Options) -> Way | None:
    """Of the kernel, for rows of these arrays; None if it does not take them."""
    # Gradients are written where h and dout stood.
    if options.layout == "token" or options.x_dtype != options.residual_dtype:
        return None
    return way_for(streams[0].shape[-1], _bytes_per_column(streams))


def _bytes_per_column(streams: Sequence[jax.Array]) -> int:
    return sum(each.dtype.itemsize for each in streams)


def _walks(per_core: int) -> str:
    """The name of what is prepared for a `Way`, beside the row blocks of the Triton kernels."""
    return f"walks of {per_core} a core"
