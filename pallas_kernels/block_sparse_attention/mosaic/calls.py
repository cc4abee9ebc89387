"""The kernels' calls: arrays in, arrays out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention.block_lists import BlockLists, InvertedLists
from pallas_kernels.block_sparse_attention.differentiable import Cotangents
from pallas_kernels.block_sparse_attention.kernel_lists import (
    KeyLists,
    QueryLists,
    key_lists,
    query_lists,
)
from pallas_kernels.block_sparse_attention.mosaic.kernels import (
    LOG2E,
    dkv_kernel,
    dq_kernel,
    forward_kernel,
)
from pallas_kernels.block_sparse_attention.mosaic.tiles import Launch
from pallas_kernels.block_sparse_attention.mosaic.tuning import Pass, Tiles, tiles_for
from pallas_kernels.block_sparse_attention.operands import Operands, Options, Residuals

_TOKENS = 8
"""Copies into shared memory need lengths that this divides."""


def forward(
    operands: Operands, options: Options, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]; no operand may be empty.

    Args:
      operands: of the call.
      options: of the call.
      tiles: of the kernel; None for those that were measured as fastest.
    """
    call = _call("forward", operands, options, tiles)
    tokens = operands.q.shape[1]
    q, k, v = (_padded(each) for each in (call.positive(operands.q), operands.k, operands.v))
    lists = query_lists(operands.blocks)
    own = call.tile(call.tiles.own)
    scratch = (
        *(own, call.scalars(call.tiles.own), plgpu.Barrier()),
        *call.ring(call.tiles.slots[0]),
        *call.ring(call.tiles.slots[1]),
    )
    shapes = [_like(q), call.statistics(operands.blocks)]
    out, lse = call.run(forward_kernel, (q, k, v), lists, shapes, scratch)
    lse = jnp.where(_valid_queries(operands.blocks), lse, -jnp.inf)
    return out[:, :tokens], lse[..., :tokens]


def query_gradient(
    residuals: Residuals, read: Cotangents, options: Options, tiles: Tiles | None = None
) -> jax.Array:
    """The gradient of q; `tiles` as in `forward`."""
    call = _call("dq", Operands(*residuals[:4]), options, tiles)
    arrays = call.inputs(residuals, read)
    own, scalars = call.tile(call.tiles.own), call.scalars(call.tiles.own)
    scratch = (
        *(own, own, scalars, scalars, plgpu.Barrier(num_arrivals=4)),
        *call.ring(call.tiles.slots[0]),
        *call.ring(call.tiles.slots[1]),
    )
    lists = query_lists(residuals.blocks)
    (dq,) = call.run(dq_kernel, arrays, lists, [_like(arrays[0])], scratch)
    return call.positive(dq[:, : residuals.q.shape[1]])


def key_gradients(
    residuals: Residuals,
    read: Cotangents,
    inverted: InvertedLists,
    options: Options,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v; `tiles` as in `forward`."""
    call = _call("dkv", Operands(*residuals[:4]), options, tiles)
    arrays = call.inputs(residuals, read)
    own = call.tile(call.tiles.own)
    scratch = (
        *(own, own, plgpu.Barrier(num_arrivals=2)),
        *call.ring(call.tiles.slots[0], with_scalars=True),
        *call.ring(call.tiles.slots[1], with_scalars=True),
    )
    lists = key_lists(residuals.blocks, inverted)
    shapes = [_like(each) for each in arrays[1:3]]
    dk, dv = call.run(dkv_kernel, arrays, lists, shapes, scratch)
    tokens = residuals.k.shape[1]
    return dk[:, :tokens], dv[:, :tokens]


class _Call(NamedTuple):
    """A kernel to run.

    Attributes:
      kernel: which one.
      launch: what its programs know.
      tiles: of the kernel.
      dtype: of q, k and v.
      negative: whether the scale is: the kernels are given −q and −scale instead.
    """

    kernel: Pass
    launch: Launch
    tiles: Tiles
    dtype: Any
    negative: bool

    def positive(self, of_q: jax.Array) -> jax.Array:
        """q, or its gradient, for a scale > 0."""
        return -of_q if self.negative else of_q

    def inputs(self, residuals: Residuals, read: Cotangents) -> tuple[jax.Array, ...]:
        """q, k, v, dout, lse in base 2, delta, as kernels of the backward take them."""
        q, k, v, blocks = residuals[:4]
        matrices = (_padded(each) for each in (self.positive(q), k, v, read.dout))
        missing = blocks.query_tokens.shape[1] * blocks.query_block - q.shape[1]
        lse, delta = (
            jnp.pad(each, ((0, 0), (0, 0), (0, missing))) for each in (read.lse, read.delta)
        )
        return (*matrices, lse * LOG2E, delta)

    def statistics(self, blocks: BlockLists) -> jax.ShapeDtypeStruct:
        """[R, H, nQ·query_block] float32."""
        rows, heads, n_query = blocks.counts.shape
        return jax.ShapeDtypeStruct((rows, heads, n_query * blocks.query_block), jnp.float32)

    def tile(self, *size: int) -> Any:
        """Shared memory for [*size, D]."""
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM((*size, self.launch.width), self.dtype, transforms=transforms)

    def scalars(self, *size: int) -> Any:
        """Shared memory for [*size] float32."""
        return plgpu.SMEM(size, jnp.float32)

    def ring(self, slots: int, with_scalars: bool = False) -> tuple[Any, ...]:
        """Buffers and barrier of a `Ring`."""
        listed = self.tiles.listed
        buffers = [self.tile(slots, listed)]
        if with_scalars:
            buffers.append(self.scalars(slots, listed))
        return (*buffers, plgpu.Barrier(num_arrivals=len(buffers), num_barriers=slots))

    def run(
        self,
        body: Callable[..., None],
        arrays: Sequence[jax.Array],
        lists: QueryLists | KeyLists,
        shapes: Sequence[jax.ShapeDtypeStruct],
        scratch: tuple[Any, ...],
    ) -> Any:
        """Runs a kernel with a program for each tile of each head."""
        kind, given = type(lists), len(arrays)
        rows, heads, blocks = lists.order.shape

        def flat(*refs: Any) -> None:
            of_lists = refs[given : given + len(lists)]
            results = refs[given + len(lists) : given + len(lists) + len(shapes)]
            held = refs[given + len(lists) + len(shapes) :]
            body(*refs[:given], kind(*of_lists), *results, held, launch=self.launch)

        parts = self.launch.own_block // self.tiles.own
        return plgpu.kernel(
            flat,
            out_type=list(shapes),
            scratch_types=list(scratch),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            grid=(rows * heads * blocks * parts,),
            grid_names=("program",),
            kernel_name=f"block_sparse_attention_{self.kernel}",
        )(*arrays, *lists)


def _call(kernel: Pass, operands: Operands, options: Options, tiles: Tiles | None) -> _Call:
    q, *_, blocks = operands
    own_block, listed_block = blocks.query_block, blocks.key_block
    if kernel == "dkv":
        own_block, listed_block = listed_block, own_block
    tiles = tiles or tiles_for(kernel, q.shape[3], listed_block)
    scale = abs(options.scale)
    launch = Launch(q.shape[2], q.shape[3], own_block, listed_block, scale, tiles)
    return _Call(kernel, launch, tiles, q.dtype, options.scale < 0)


def _valid_queries(blocks: BlockLists) -> jax.Array:
    """[R, 1, nQ·query_block] bool."""
    within = jnp.arange(blocks.query_block) < blocks.query_tokens[..., None]
    return within.reshape(within.shape[0], 1, -1)


def _padded(x: jax.Array) -> jax.Array:
    """[R, S, H, D] with a length that copies can take."""
    missing = -x.shape[1] % _TOKENS
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
