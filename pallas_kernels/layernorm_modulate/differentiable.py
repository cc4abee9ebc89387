"""The kernels as one differentiable function of sharded arrays.

The custom VJP stands outside, and forward and backward each run inside a `shard_map` of their own:
under a mesh whose axes are Auto, XLA would otherwise gather every operand of a kernel that it
cannot look into. Each shard sums the gradients of its tables; one `psum` then adds them over the
mesh axes that split the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.layernorm_modulate import triton
from pallas_kernels.layernorm_modulate.devices import mesh_axes
from pallas_kernels.layernorm_modulate.forward import forward
from pallas_kernels.layernorm_modulate.operands import Operands, Options, Saved
from pallas_kernels.layernorm_modulate.pieces import RowPieces
from pallas_kernels.layernorm_modulate.tuning import Pass, blocks_for


@dataclass(frozen=True)
class Static:
    """What is static in a call.

    Attributes:
      options: of the function.
      sharding: of x [B, S, D], D whole; None on one device.
    """

    options: Options
    sharding: NamedSharding | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused(static: Static, operands: Operands) -> tuple[jax.Array | None, jax.Array]:
    """h (None without y) and the modulated value, by the Triton kernels."""
    h, out, _ = _run_forward(static, operands, statistics=False)
    return h, out


def _run_forward(static: Static, operands: Operands, statistics: bool) -> Any:
    kernel: Pass = "forward" if operands.y is None else "residual_forward"
    blocks = blocks_for(kernel, operands.x.shape[-1])
    operands = _with_pieces_of(kernel, operands)
    run = partial(forward, options=static.options, blocks=blocks, statistics=statistics)
    stream = _specs(static).stream
    return _on_shards(static, run, (_operand_specs(static),), (stream, stream, stream))(operands)


def _forward(static: Static, primals: Any) -> tuple[Any, Saved]:
    operands = jax.tree.map(lambda primal: primal.value, primals)
    h, out, statistics = _run_forward(static, operands, statistics=True)
    saved = Saved(
        h=operands.x if h is None else h,
        statistics=statistics,
        scale=operands.scale,
        shift=jnp.zeros((0,), operands.shift.dtype),
        y=None if operands.gate is None else operands.y,
        gate=operands.gate,
        segment_ids=operands.segment_ids,
        pieces=operands.pieces,
    )
    return (h, out), saved


Given = TypeVar("Given", Operands, Saved)


def _with_pieces_of(kernel: Pass, given: Given) -> Given:
    """Of the pieces that were prepared, those of one kernel."""
    return given._replace(pieces=given.pieces and getattr(given.pieces, kernel))


def _backward(static: Static, saved: Saved, cotangents: Any) -> tuple[Operands]:
    dh, dout = cotangents
    if dh is not None and isinstance(dh, SymbolicZero):
        dh = jnp.zeros(dh.shape, dh.dtype)
    if isinstance(dout, SymbolicZero):
        # Only the sum h was wanted: the norm has no part in its gradients.
        dout = None if dh is not None else jnp.zeros(dout.shape, dout.dtype)
    specs, token = _specs(static), static.options.layout == "token"
    kernel: Pass = "backward" if dh is None else "residual_backward"
    blocks = blocks_for(kernel, saved.h.shape[-1])
    saved = _with_pieces_of(kernel, saved)

    def run(saved: Saved, dh: Any, dout: Any) -> Any:
        dx, dy, tables = triton.backward(saved, dh, dout, static.options, blocks)
        if specs.sequence_axes and not token:
            tables = jax.lax.psum(tables, specs.sequence_axes)
        return dx, dy, tables

    tables_spec = specs.table if token else PartitionSpec(None, *specs.table)
    saved_specs = Saved._make(
        (
            *(specs.stream, specs.stream, specs.table, PartitionSpec()),
            *(specs.stream, specs.table, specs.ids, specs.pieces),
        )
    )
    in_specs = (saved_specs, specs.stream, specs.stream)
    out_specs = (specs.stream, specs.stream, tables_spec)
    dx, dy, tables = _on_shards(static, run, in_specs, out_specs)(saved, dh, dout)
    dscale, dshift, *dgate = tables
    return (
        Operands(
            x=dx,
            scale=dscale.astype(saved.scale.dtype),
            shift=dshift.astype(saved.shift.dtype),
            y=dy,
            gate=dgate[0].astype(saved.gate.dtype) if saved.gate is not None else None,
            segment_ids=None,
            pieces=None,
        ),
    )


fused.defvjp(_forward, _backward, symbolic_zeros=True)


class _Specs(NamedTuple):
    """How x, tables, segment_ids and pieces are split, and the axes that split the sequence."""

    stream: PartitionSpec
    table: PartitionSpec
    ids: PartitionSpec
    pieces: RowPieces
    sequence_axes: tuple[str, ...]


def _specs(static: Static) -> _Specs:
    spec = () if static.sharding is None else tuple(static.sharding.spec)
    batch, sequence, *_ = (*spec, None, None)
    stream = PartitionSpec(batch, sequence, None)
    table = {
        "row": PartitionSpec(batch, None),
        "token": stream,
        "segment": PartitionSpec(batch, None, None),
    }[static.options.layout]
    axes = mesh_axes(static.sharding, 1)
    pieces = RowPieces._make([PartitionSpec(batch, None)] * 3)
    return _Specs(stream, table, PartitionSpec(batch, sequence), pieces, axes)


def _operand_specs(static: Static) -> Any:
    stream, table, ids, pieces, _ = _specs(static)
    return Operands._make((stream, table, table, stream, table, ids, pieces))


def placed(static: Static, operands: Operands) -> Operands:
    """Operands split as x is; only Explicit axes ask for it, XLA moves what Auto axes need."""
    if static.sharding is None or AxisType.Explicit not in static.sharding.mesh.axis_types:
        return operands
    mesh, specs = static.sharding.mesh, _operand_specs(static)
    # Pieces are found anew: it is what tracing sees of an Explicit mesh that says how ids lie.
    return Operands._make(
        (
            None if value is None else jax.sharding.reshard(value, NamedSharding(mesh, spec))
            for value, spec in zip(operands._replace(pieces=None), specs, strict=True)
        )
    )


def on_shards(
    static: Static, function: Callable[..., Any], operands: Operands
) -> tuple[jax.Array | None, jax.Array]:
    """A differentiable function of operands and options that gives h and out, on each shard."""
    specs = _specs(static)
    run = partial(function, options=static.options)
    in_specs = (_operand_specs(static),)
    return _on_shards(static, run, in_specs, (specs.stream, specs.stream), check=True)(operands)


def _on_shards(
    static: Static, run: Callable, in_specs: Any, out_specs: Any, check: bool = False
) -> Callable:
    """`run` on each device's shards. A spec for an operand that is None is not looked at."""
    sharding = static.sharding
    if sharding is None:
        return run

    def mapped(*args: Any) -> Any:
        matched = jax.tree.map(
            lambda arg, spec: None if arg is None else spec,
            args,
            in_specs,
            is_leaf=lambda leaf: leaf is None,
        )
        return jax.shard_map(
            run,
            mesh=sharding.mesh,
            in_specs=matched,
            out_specs=out_specs,
            check_vma=check,
        )(*args)

    return mapped
