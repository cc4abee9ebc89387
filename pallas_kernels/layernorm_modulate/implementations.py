"""The implementations of LayerNorm-Modulate: their frame, what they support, where they are faster.

The custom VJP stands outside, and forward and backward each run inside a `shard_map` of their own
(see `pallas_kernels/op.py`). Each shard sums the gradients of its tables; one `psum` then adds them
over the mesh axes that split the sequence.

Mosaic takes the Triton kernels where its own cannot run: a scale for each token, an x of another
dtype than h, and widths that are no multiple of 128 or whose rows do not fit.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.first_use import ELEMENTS, compared
from pallas_kernels.layernorm_modulate import tuning
from pallas_kernels.layernorm_modulate.operands import (
    Gradients,
    ModulationLayout,
    NormImplementation,
    NormOperands,
    NormOptions,
    NormReference,
    NormResiduals,
    operand_specs,
    unsupported_sharding,
)
from pallas_kernels.layernorm_modulate.row_blocks import Walks, walks_of
from pallas_kernels.layernorm_modulate.tuning import Pass
from pallas_kernels.op import Call, Measured, Registry, differentiated_once, on_shards, placed
from pallas_kernels.walks import Way

NormCall = Call[NormOptions]


class FusedImplementation(NormImplementation):
    """An implementation with a forward and a backward of its own, each on one device's arrays."""

    @abstractmethod
    def forward(
        self, operands: NormOperands, options: NormOptions, *, statistics: bool
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
        residuals: NormResiduals,
        dh: jax.Array | None,
        dout: jax.Array | None,
        options: NormOptions,
    ) -> Gradients:
        """Gradients of x, of y (any without), and of scale, shift and, where there is one, gate.

        Args:
          residuals: of the forward.
          dh: [B, S, D] cotangent of h; None where it is no result or was not used.
          dout: [B, S, D] cotangent of the modulated value; None where it was not used.
          options: of the call.
        """

    @override
    def unsupported_reason(self, operands: NormOperands, call: NormCall) -> Exception | None:
        """Why x cannot be computed shard by shard."""
        return unsupported_sharding(operands.x, call.sharding)

    @override
    def run(self, operands: NormOperands, call: NormCall) -> tuple[jax.Array | None, jax.Array]:
        """Forward and backward under one custom VJP."""
        return _fused(self, call, placed(operands, operand_specs(call), call.sharding))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    implementation: FusedImplementation, call: NormCall, operands: NormOperands
) -> tuple[jax.Array | None, jax.Array]:
    """h (None if no result) and the modulated value [B, S, D]; differentiable once, in reverse."""
    h, out, _ = _run_forward(implementation, call, operands, statistics=False)
    return _result(call, operands, h), out


def _result(call: NormCall, operands: NormOperands, h: jax.Array | None) -> jax.Array | None:
    """h as a result: the sum, or x itself, which no kernel writes."""
    return operands.x if call.options.h == "x" else h


def _run_forward(
    implementation: FusedImplementation, call: NormCall, operands: NormOperands, statistics: bool
) -> PyTree:
    run = partial(implementation.forward, options=call.options, statistics=statistics)
    specs = operand_specs(call)
    return on_shards(call, run, (specs,), (specs.x, specs.x, specs.x))(operands)


def _forward(
    implementation: FusedImplementation, call: NormCall, primals: PyTree
) -> tuple[PyTree, NormResiduals]:
    operands = jax.tree.map(lambda primal: primal.value, primals)
    h, out, statistics = _run_forward(implementation, call, operands, statistics=True)
    residuals = NormResiduals(
        h=operands.x if h is None else h,
        statistics=statistics,
        scale=operands.scale,
        shift=jnp.zeros((0,), operands.shift.dtype),
        y=None if operands.gate is None else operands.y,
        gate=operands.gate,
        segment_ids=operands.segment_ids,
        prepared=operands.prepared,
    )
    return (_result(call, operands, h), out), residuals


def _backward(
    implementation: FusedImplementation,
    call: NormCall,
    residuals: NormResiduals,
    cotangents: PyTree,
) -> tuple[NormOperands]:
    dh, dout = _cotangents(call.options, *cotangents)
    specs, token = operand_specs(call), call.options.layout == "token"
    sequence_axes = () if token else devices.mesh_axes(call.sharding, 1)

    def run(residuals: NormResiduals, dh: jax.Array | None, dout: jax.Array | None) -> PyTree:
        dx, dy, tables = implementation.backward(residuals, dh, dout, call.options)
        return dx, dy, jax.lax.psum(tables, sequence_axes) if sequence_axes else tables

    x, _, table, *rest = specs
    of_residuals = NormResiduals._make((x, x, table, P(), *rest))
    out_specs = (x, x, table if token else P(None, *table))
    on_each = on_shards(call, run, (of_residuals, x, x), out_specs)
    dx, dy, tables = differentiated_once("layernorm_modulate", on_each)(residuals, dh, dout)
    dscale, dshift, *dgate = tables
    gradients = NormOperands(
        x=dx,
        scale=dscale.astype(residuals.scale.dtype),
        shift=dshift.astype(residuals.shift.dtype),
        y=dy if call.options.h == "sum" else None,
        gate=dgate[0].astype(residuals.gate.dtype) if residuals.gate is not None else None,
    )
    return (gradients,)


_fused.defvjp(_forward, _backward, symbolic_zeros=True)


def _cotangents(
    options: NormOptions,
    dh: jax.Array | SymbolicZero | None,
    dout: jax.Array | SymbolicZero,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Arrays in place of symbolic zeros, but None where a gradient has no part in the others."""
    if isinstance(dh, SymbolicZero):
        dh = jnp.zeros(dh.shape, dh.dtype) if options.h == "sum" else None
    if not isinstance(dout, SymbolicZero):
        return dh, dout
    # Only the sum h was wanted: the norm has no part in its gradients.
    return dh, None if dh is not None else jnp.zeros(dout.shape, dout.dtype)


# ---------------------------------------------------------------- Triton

# What needs Pallas's Triton or Mosaic lowering is imported where it runs: a JAX without it must
# still run the other implementations.

_SEGMENTS = 8
"""Of the row that a comparison with segments takes."""


class TritonNorm(Measured[NormOperands, NormOptions], FusedImplementation):
    """The Triton kernels, on NVIDIA GPUs."""

    function = "layernorm_modulate"
    name = "triton"
    interpretable = True

    @override
    def unsupported_reason(self, operands: NormOperands, call: NormCall) -> Exception | None:
        """A JAX without the lowering, another device, a shard_map that checks, a split width."""
        return devices.unsupported_triton(
            operands.x, interpret=call.options.interpret
        ) or unsupported_sharding(operands.x, call.sharding)

    @override
    def measured(self, operands: NormOperands, call: NormCall) -> bool | None:
        """As `tuning.py` says."""
        elements, dim = devices.elements_of_shard(operands.x, call.sharding)
        kind, layout = devices.device_kind(), call.options.layout
        return tuning.measured_as_faster(kind, layout, elements, dim)

    @override
    def case(self, operands: NormOperands, call: NormCall) -> str:
        return f"{operands.x.shape[-1]} {operands.x.dtype} {call.options.layout}"

    @override
    def seconds(self, operands: NormOperands, call: NormCall) -> tuple[float, float]:
        """Of XLA's fusion and of the kernels here, which those derived from it share."""
        dim, dtype, layout = operands.x.shape[-1], operands.x.dtype, call.options.layout
        tokens, ids = max(1, ELEMENTS // dim), None
        tables: dict[ModulationLayout, tuple[int, ...]] = {
            "row": (1, dim),
            "token": (1, tokens, dim),
            "segment": (1, _SEGMENTS, dim),
        }
        if layout == "segment":
            ids = (jnp.arange(tokens, dtype=jnp.int32) * _SEGMENTS // tokens)[None]
        table = jax.ShapeDtypeStruct(tables[layout], jnp.float32)
        arguments = (jax.ShapeDtypeStruct((1, tokens, dim), dtype), table, table)
        runs = (REGISTRY.reference.run, TritonNorm().run)
        plain = Call(NormOptions(layout, 1e-6, dtype, dtype, dtype), None)
        return compared(runs, partial(NormOperands, segment_ids=ids), plain, arguments)

    @override
    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> PyTree:
        """The walks of each kernel."""
        per_core = {tuning.blocks_for(kernel, width).per_core for kernel in get_args(Pass)}
        return _walks(segment_ids, table_rows, sharding, per_core)

    @override
    def forward(
        self, operands: NormOperands, options: NormOptions, *, statistics: bool
    ) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """One kernel; statistics are mean and 1/deviation of each row, [B, S, 2] float32."""
        from pallas_kernels.layernorm_modulate import triton

        blocks = tuning.blocks_for(_forward_pass(operands), operands.x.shape[-1])
        return triton.forward(operands, options, blocks, statistics=statistics)

    @override
    def backward(
        self,
        residuals: NormResiduals,
        dh: jax.Array | None,
        dout: jax.Array | None,
        options: NormOptions,
    ) -> Gradients:
        """One kernel, and one that adds up the partial sums of the tables' gradients."""
        from pallas_kernels.layernorm_modulate import triton

        # Without the norm, a program holds no more than the plain backward's.
        kernel: Pass = "backward"
        if dh is not None and dout is not None:
            kernel = "sum_backward" if residuals.gate is None else "residual_backward"
        blocks = tuning.blocks_for(kernel, residuals.h.shape[-1])
        return triton.backward(residuals, dh, dout, options, blocks)


def _walks(
    segment_ids: jax.Array, table_rows: int, sharding: NamedSharding | None, per_core: set[int]
) -> dict[int, Walks]:
    """Of so many programs of each multiprocessor, by their number."""
    # Each device has the programs for its own rows.
    cores = devices.core_count() * devices.shards_of(sharding, 0)
    return {each: walks_of(segment_ids, table_rows, each * cores) for each in sorted(per_core)}


# ---------------------------------------------------------------- Mosaic


class MosaicNorm(TritonNorm):
    """The backward through Mosaic GPU, and the forward where it is faster or Triton is gone.

    Rows beyond those kernels are left to the Triton kernels.
    """

    name = "mosaic"
    interpretable = False

    @override
    def unsupported_reason(self, operands: NormOperands, call: NormCall) -> Exception | None:
        """Another device, or rows that only the Triton kernels take, if they cannot run."""
        if reason := devices.unsupported_mosaic(operands.x):
            return reason
        ways = _forward_way(operands, call.options), _way(_streams(operands), call.options)
        if None in ways:
            return super().unsupported_reason(operands, call)
        return unsupported_sharding(operands.x, call.sharding)

    @override
    def faster_than_reference(self, operands: NormOperands, call: NormCall) -> bool:
        """As the Triton kernels are, where the backward was faster or where they are gone."""
        x, options, streams = operands.x, call.options, _streams(operands)
        if devices.lowers_triton():
            if not tuning.backward_faster_than_triton(options.layout, x.shape[-1]):
                return False
            # Wider dtypes were not compared.
            if any(each.dtype.itemsize > 2 for each in streams) or _way(streams, options) is None:
                return False
        return super().faster_than_reference(operands, call)

    @override
    def prepare_segments(
        self, segment_ids: jax.Array, table_rows: int, width: int, sharding: NamedSharding | None
    ) -> PyTree:
        """The walks of each Triton kernel, and of those here, of two bytes an element."""
        ways = (
            tuning.way_for(kernel, width, 2 * kind.streams) for kernel, kind in tuning.KINDS.items()
        )
        walks = _walks(segment_ids, table_rows, sharding, {way.per_core for way in ways if way})
        return super().prepare_segments(segment_ids, table_rows, width, sharding) | walks

    @override
    def forward(
        self, operands: NormOperands, options: NormOptions, *, statistics: bool
    ) -> tuple[jax.Array | None, jax.Array, jax.Array | None]:
        """The kernel here where it was faster than Triton's, or where that is gone."""
        x, way = operands.x, _forward_way(operands, options)
        kernel, dim = _forward_pass(operands), x.shape[-1]
        faster = tuning.forward_faster_than_triton(kernel, dim, x.dtype.itemsize)
        if way is None or (devices.lowers_triton() and not faster):
            return super().forward(operands, options, statistics=statistics)
        from pallas_kernels.layernorm_modulate import mosaic

        return mosaic.forward(operands, options, way, statistics=statistics)

    @override
    def backward(
        self,
        residuals: NormResiduals,
        dh: jax.Array | None,
        dout: jax.Array | None,
        options: NormOptions,
    ) -> Gradients:
        """The kernel here, and one that adds up the partial sums of the tables' gradients."""
        if dout is None and not devices.lowers_triton():  # takes a pass over zeros
            dout = jnp.zeros(residuals.h.shape, options.out_dtype)
        streams = [each for each in (residuals.h, dout, dh, residuals.y) if each is not None]
        way = None if dout is None else _way(streams, options)
        if way is None or dout is None:
            return super().backward(residuals, dh, dout, options)
        from pallas_kernels.layernorm_modulate import mosaic

        return mosaic.backward(residuals, dh, dout, options, way)


def _way(streams: Sequence[jax.Array], options: NormOptions) -> Way | None:
    """Of the kernel, for rows of these arrays; None if it does not take them."""
    # Gradients are written where h and dout stood.
    if options.layout == "token" or options.x_dtype != options.residual_dtype:
        return None
    kernels: tuple[Pass, ...] = ("backward", "sum_backward", "residual_backward")
    bytes_per_column = sum(each.dtype.itemsize for each in streams)
    return tuning.way_for(kernels[len(streams) - 2], streams[0].shape[-1], bytes_per_column)


def _forward_way(operands: NormOperands, options: NormOptions) -> Way | None:
    """Of the forward's kernel; None if it does not take these arrays."""
    x, y = operands.x, operands.y
    streams = [each for each in (x, y) if each is not None]
    # h is written where x stood, and the modulated value where y, or else x, did.
    if options.layout == "token" or options.x_dtype != options.residual_dtype:
        return None
    if streams[-1].dtype != options.out_dtype:
        return None
    bytes_per_column = sum(each.dtype.itemsize for each in streams)
    return tuning.way_for(_forward_pass(operands), x.shape[-1], bytes_per_column)


def _forward_pass(operands: NormOperands) -> Pass:
    return "forward" if operands.y is None else "residual_forward"


def _streams(operands: NormOperands) -> tuple[jax.Array, ...]:
    """Arrays with the dtypes of those that the backward reads row by row."""
    x, y = operands.x, operands.x if operands.y is None else operands.y
    return (x, y) if operands.y is None else (x, y, x) if operands.gate is None else (x, y, x, y)


REGISTRY: Registry[NormImplementation] = Registry(reference=NormReference())
REGISTRY.register(TritonNorm())
REGISTRY.register(MosaicNorm())

implementation_names = REGISTRY.names
"""() → the values that `implementation=` takes, "auto" first."""

register_implementation = REGISTRY.register
"""Makes an implementation known to `implementation=`, and to "auto" where it is faster; a
ValueError if its name is taken."""

unregister_implementation = REGISTRY.unregister
"""Removes what `register_implementation` added, by name."""
