"""A forward and a backward as one differentiable function of sharded arrays.

The custom VJP stands outside, and forward and backward each run inside a `shard_map` of their own:
under a mesh whose axes are Auto, XLA would otherwise gather every operand of a kernel that it
cannot look into. Each shard sums the gradients of its tables; one `psum` then adds them over the
mesh axes that split the sequence.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from pallas_kernels.layernorm_modulate.implementation import Implementation
from pallas_kernels.layernorm_modulate.operands import CallConfig, Operands, Options, Residuals
from pallas_kernels.layernorm_modulate.shards import (
    on_shards,
    operand_specs,
    placed,
    specs_of,
    unsupported_sharding,
)
from pallas_kernels.shardwise import differentiated_once


class FusedImplementation(Implementation):
    """An implementation with a forward and a backward of its own, each on one device's arrays."""

    @abstractmethod
    def forward(
        self, operands: Operands, options: Options, *, statistics: bool
    ) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """h (None without y), the modulated value, and what the backward needs beside its inputs.

        Args:
          operands: none of them empty.
          options: of the call.
          statistics: whether the third result is wanted, [B, S, K] for any K; None if it is not.
        """

    @abstractmethod
    def backward(
        self,
        residuals: Residuals,
        dh: jax.Array | None,
        dout: jax.Array | None,
        options: Options,
    ) -> tuple[jax.Array, jax.Array | None, Sequence[jax.Array] | jax.Array]:
        """Gradients of x, of y (any without), and of scale, shift and, where there is one, gate.

        Args:
          residuals: of the forward.
          dh: [B, S, D] cotangent of h; None where it was not used, or is no result.
          dout: [B, S, D] cotangent of the modulated value; None where it was not used.
          options: of the call.

        Returns:
          dx and dy [B, S, D]; the rest as one float32 array [K, *scale.shape], in the order scale,
          shift, gate, or in the layout "token" as K arrays of the operands' dtypes.
        """

    def unsupported_reason(self, operands: Operands, config: CallConfig) -> Exception | None:
        """Why x cannot be computed shard by shard."""
        return unsupported_sharding(operands.x, config.sharding)

    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array | None, jax.Array]:
        """Forward and backward under one custom VJP."""
        return fused(self, config, placed(operands, config))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def fused(
    implementation: FusedImplementation, config: CallConfig, operands: Operands
) -> tuple[jax.Array | None, jax.Array]:
    """h (None if no result) and the modulated value [B, S, D]; differentiable once, in reverse."""
    h, out, _ = _run_forward(implementation, config, operands, statistics=False)
    return _result(config, operands, h), out


def _result(config: CallConfig, operands: Operands, h: jax.Array | None) -> jax.Array | None:
    """h as a result: the sum, or x itself, which no kernel writes."""
    return operands.x if config.options.h == "x" else h


def _run_forward(
    implementation: FusedImplementation, config: CallConfig, operands: Operands, statistics: bool
) -> Any:
    def run(operands: Operands) -> Any:
        return implementation.forward(operands, config.options, statistics=statistics)

    stream = specs_of(config).stream
    return on_shards(config, run, (operand_specs(config),), (stream, stream, stream))(operands)


def _forward(
    implementation: FusedImplementation, config: CallConfig, primals: Any
) -> tuple[Any, Residuals]:
    operands = jax.tree.map(lambda primal: primal.value, primals)
    h, out, statistics = _run_forward(implementation, config, operands, statistics=True)
    residuals = Residuals(
        h=operands.x if h is None else h,
        statistics=statistics,
        scale=operands.scale,
        shift=jnp.zeros((0,), operands.shift.dtype),
        y=None if operands.gate is None else operands.y,
        gate=operands.gate,
        segment_ids=operands.segment_ids,
        prepared=operands.prepared,
    )
    return (_result(config, operands, h), out), residuals


def _backward(
    implementation: FusedImplementation, config: CallConfig, residuals: Residuals, cotangents: Any
) -> tuple[Operands]:
    dh, dout = _cotangents(config.options, *cotangents)
    specs, token = specs_of(config), config.options.layout == "token"

    def run(residuals: Residuals, dh: Any, dout: Any) -> Any:
        dx, dy, tables = implementation.backward(residuals, dh, dout, config.options)
        if specs.sequence_axes and not token:
            tables = jax.lax.psum(tables, specs.sequence_axes)
        return dx, dy, tables

    out_specs = (
        specs.stream,
        specs.stream,
        specs.table if token else PartitionSpec(None, *specs.table),
    )
    in_specs = (_residual_specs(config), specs.stream, specs.stream)
    on_each = on_shards(config, run, in_specs, out_specs)
    dx, dy, tables = differentiated_once("layernorm_modulate", on_each)(residuals, dh, dout)
    dscale, dshift, *dgate = tables
    gradients = Operands(
        x=dx,
        scale=dscale.astype(residuals.scale.dtype),
        shift=dshift.astype(residuals.shift.dtype),
        y=dy if config.options.h == "sum" else None,
        gate=dgate[0].astype(residuals.gate.dtype) if residuals.gate is not None else None,
    )
    return (gradients,)


def _cotangents(options: Options, dh: Any, dout: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """Arrays in place of symbolic zeros, but None where a gradient has no part in the others."""
    if dh is not None and isinstance(dh, SymbolicZero):
        dh = jnp.zeros(dh.shape, dh.dtype) if options.h == "sum" else None
    if isinstance(dout, SymbolicZero):
        # Only the sum h was wanted: the norm has no part in its gradients.
        dout = None if dh is not None else jnp.zeros(dout.shape, dout.dtype)
    return dh, dout


def _residual_specs(config: CallConfig) -> Residuals:
    specs: Any = specs_of(config)
    return Residuals(
        h=specs.stream,
        statistics=specs.stream,
        scale=specs.table,
        shift=PartitionSpec(),  # type: ignore[arg-type]
        y=specs.stream,
        gate=specs.table,
        segment_ids=specs.ids,
        prepared=specs.prepared,
    )


fused.defvjp(_forward, _backward, symbolic_zeros=True)
