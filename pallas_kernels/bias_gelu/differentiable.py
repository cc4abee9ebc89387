"""The kernels of this function on the shards of a mesh: what they support, how arrays are split."""

from abc import abstractmethod
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from pallas_kernels.bias_gelu.implementation import Again, Implementation
from pallas_kernels.bias_gelu.operands import CallConfig, Operands, Options
from pallas_kernels.devices import undivided, unseen_split
from pallas_kernels.shardwise import (
    ShardwiseKernels,
    backward_on_shards,
    placed,
    run_shardwise,
)


class FusedImplementation(Implementation, ShardwiseKernels[Operands, Options]):
    """An implementation with a forward and a backward of its own, each on one device's arrays."""

    function = "bias_gelu"

    def specs(self, operands: Operands, config: CallConfig) -> tuple[Operands, P]:
        """See `ShardwiseKernels.specs`."""
        spec = () if config.sharding is None else tuple(config.sharding.spec)
        batch, sequence, width, *_ = (*spec, None, None, None)
        of_x, of_bias = P(batch, sequence, width), P(width)
        specs: Any = Operands(of_x, of_bias)  # type: ignore[arg-type]
        return specs, of_x

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Why x cannot be computed shard by shard."""
        if config.sharding is None:
            return unseen_split(operands.x)
        return undivided(config.sharding, operands.x.shape)

    def run(self, operands: Operands, config: CallConfig) -> jax.Array:
        """Forward and backward under one custom VJP."""
        return run_shardwise(self, config, operands)

    def backward_with_output(
        self, operands: Operands, cotangent: jax.Array, config: CallConfig
    ) -> Again:
        """One pass over memory on each shard."""
        operands = placed(self, config, operands)
        out = self.specs(operands, config)[1]
        dx, dbias, again = backward_on_shards(
            self, config, self.output_and_backward, operands, cotangent, out
        )
        return Again(again, dx, dbias.astype(operands.bias.dtype))

    @abstractmethod
    def output_and_backward(
        self, operands: Operands, cotangent: jax.Array, options: Options
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`backward`, and the output."""
