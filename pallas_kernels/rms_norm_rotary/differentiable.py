"""The kernels of this function on the shards of a mesh: what they support, how arrays are split."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.devices import mesh_axes, undivided, unseen_split
from pallas_kernels.rms_norm_rotary.implementation import Implementation
from pallas_kernels.rms_norm_rotary.operands import CallConfig, Operands, Options
from pallas_kernels.shardwise import ShardwiseKernels, run_shardwise


class FusedImplementation(Implementation, ShardwiseKernels[Operands, Options]):
    """An implementation with a forward and a backward of its own, each on one device's arrays."""

    function = "rms_norm_rotary"
    vectors = 2

    def specs(self, operands: Operands, config: CallConfig) -> tuple[Operands, P]:
        """See `ShardwiseKernels.specs`."""
        spec = () if config.sharding is None else tuple(config.sharding.spec)
        batch, sequence, width, *_ = (*spec, None, None, None)
        table: Any = None
        if operands.cos is not None:
            table = P(sequence, None) if operands.cos.ndim == 2 else P(batch, sequence, None)
        of_x: Any = P(batch, sequence, width)
        weight: Any = P(None)
        bias: Any = None if operands.bias is None else P(width)
        return Operands(of_x, weight, bias, table, table), P(batch, sequence, width, None)

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Why x cannot be computed shard by shard."""
        return _unsupported_sharding(operands.x, config)

    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """Forward and backward under one custom VJP."""
        return run_shardwise(self, config, operands)


def _unsupported_sharding(x: jax.Array, config: CallConfig) -> Exception | None:
    sharding, options = config.sharding, config.options
    if sharding is None:
        return unseen_split(x)
    if (split := mesh_axes(sharding, 2)) and not options.per_head:
        return NotImplementedError(
            f"x's width is split over {', '.join(split)}, and a token's statistics need all of it; "
            "split batch or sequence, or use 'xla'"
        )
    return undivided(sharding, (*x.shape[:2], x.shape[2] // options.head_dim))
