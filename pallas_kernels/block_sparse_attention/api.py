"""Block-sparse attention, the public function: checks the arguments, picks the implementation."""

from functools import partial
from typing import Literal, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels.block_sparse_attention.block_lists import BlockLists, check_values
from pallas_kernels.block_sparse_attention.implementations import REGISTRY
from pallas_kernels.block_sparse_attention.operands import (
    NAME,
    AttentionOperands,
    checked,
    operand_specs,
)
from pallas_kernels.op import call_of, placed


@overload
def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    *,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    implementation: str = "auto",
    sharding: NamedSharding | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> jax.Array: ...


@overload
def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    *,
    scale: float | None = None,
    return_lse: Literal[True],
    implementation: str = "auto",
    sharding: NamedSharding | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> tuple[jax.Array, jax.Array]: ...


def block_sparse_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: BlockLists,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str = "auto",
    sharding: NamedSharding | None = None,
    interpret: bool = False,
    debug: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(q·kᵀ·scale)·v of each query over the keys in the blocks that its list names.

    Scores and sums are float32, and the scale is applied to the scores. Differentiable once in q, k
    and v, in reverse mode; equal inputs give equal bits, gradients too. Under `jax.checkpoint`, the
    output and the statistics have the name "attention_output".

    Args:
      q: [R, S, H, D], bfloat16 or float16, with D 64 or 128; 'xla' also takes float32 and any D.
      k: [R, T, H, D], q's dtype.
      v: [R, T, H, D], q's dtype.
      blocks: the lists. Tokens of different segments meet only where a list says so. Numbers of
        blocks and of tokens that are out of range are taken to be the nearest that exist. A list
        that names a block twice gives wrong results; `debug` finds it. Their order is free.
      scale: factor of the scores; None for 1/√D.
      return_lse: also return the logarithm of the sum of exponentials of each query's scores.
      implementation: "mosaic" (kernels for Hopper), "triton" (kernels), "xla" (the reference), or
        "auto": the first of these that can run.
      sharding: how q is split over a mesh whose axes are Auto: over rows and heads, as the lists
        are then too. Nothing is communicated. Inside `shard_map` leave it out.
      interpret: run the kernels in Pallas's interpreter, which is slow and needs no GPU.
      debug: check on the host what the lists hold, whenever the function runs.

    Returns:
      [R, S, H, D] in q's dtype, 0 for queries whose list is empty or that are not valid; with
      `return_lse` also [R, H, S] float32, −inf for such queries.

    Raises:
      TypeError: blocks is no BlockLists.
      ValueError: a shape or dtype does not fit; with `debug`, a list names a block twice or a
        number is out of range. A compiled program then ends with an error of JAX that quotes it.
      NotImplementedError: this device or this sharding cannot run the kernels.
    """
    operands = AttentionOperands(q, k, v, blocks)
    options = checked(operands, scale, interpret)
    if debug:
        jax.debug.callback(partial(check_values, NAME), blocks)
    call = call_of(q, options, sharding)
    chosen = REGISTRY.choose(NAME, implementation, operands, call, interpret=interpret)
    if not (q.size and k.size and blocks.indices.size):
        out, lse = jnp.zeros_like(q), jnp.full((q.shape[0], *q.shape[2:0:-1]), -jnp.inf)
    else:
        specs = operand_specs(call, blocks)
        out, lse = chosen.run(placed(operands, specs, call.sharding), call)
    return (out, lse) if return_lse else out
