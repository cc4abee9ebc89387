"""The implementations of block-sparse attention: the reference, and kernels under a custom VJP."""

from abc import abstractmethod
from functools import partial
from importlib import import_module
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention.block_lists import BlockLists, clamped, invert
from pallas_kernels.block_sparse_attention.operands import (
    NAME,
    OUTPUT_NAME,
    AttentionInputs,
    AttentionOperands,
    AttentionOptions,
    operand_specs,
    unsupported_by_kernels,
)
from pallas_kernels.op import Call, Implementation, Registry, differentiated_once, on_shards

AttentionCall = Call[AttentionOptions]


class AttentionReference(Implementation[AttentionOperands, AttentionOptions]):
    """`reference` on each device's rows and heads, differentiated by JAX."""

    name = "xla"

    @override
    def run(self, operands: AttentionOperands, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        run, specs = partial(reference, options=call.options), operand_specs(call, operands.blocks)
        out_specs = (specs.q, specs.blocks.counts)
        out, lse = on_shards(call, run, (specs,), out_specs)(operands)
        return checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, OUTPUT_NAME)


def reference(
    operands: AttentionOperands, options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """Attention to the listed blocks, computed in float32.

    Its memory grows with the pairs of the longest lists, R·H·nQ·k_max blocks.

    Returns:
      The output [R, S, H, D] in q's dtype, and the logarithm of the sum of exponentials of each
      query's scores, [R, H, S] float32: 0 and −inf where a query has no keys.
    """
    q, k, v, blocks = operands
    blocks = clamped(blocks, q.shape[1], k.shape[1])
    tokens, width = q.shape[1], q.shape[3]
    queries = _in_blocks(q, blocks.query_block)
    keys, values = (_in_blocks(each, blocks.key_block) for each in (k, v))
    rows, heads, n_query, _ = blocks.indices.shape
    index = blocks.indices.reshape(rows, heads, -1)[..., None, None]
    keys, values = (
        jnp.take_along_axis(each, index, axis=2).reshape(rows, heads, n_query, -1, width)
        for each in (keys, values)
    )
    listed = _listed_keys(blocks).reshape(rows, heads, n_query, -1)
    valid = jnp.arange(blocks.query_block) < blocks.query_tokens[:, None, :, None]
    seen = listed[:, :, :, None, :] & valid[..., None]
    # What does not count may hold anything, NaN as well.
    queries = jnp.where(seen.any(axis=-1, keepdims=True), queries, 0.0)
    keys, values = (jnp.where(listed[..., None], each, 0.0) for each in (keys, values))
    scores = jnp.einsum("rhqtd,rhqsd->rhqts", queries, keys, precision="highest") * options.scale
    scores = jnp.where(seen, scores, -jnp.inf)
    row_max = jax.lax.stop_gradient(scores.max(axis=-1, initial=-jnp.inf))
    row_max = jnp.where(jnp.isfinite(row_max), row_max, 0.0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - row_max[..., None], 0.0)), 0.0)
    row_sum = weights.sum(axis=-1)
    some = row_sum != 0  # NaN stays NaN
    share = weights / jnp.where(some, row_sum, 1.0)[..., None]
    out = jnp.einsum("rhqts,rhqsd->rhqtd", share, values, precision="highest")
    lse = jnp.where(some, row_max + jnp.log(jnp.where(some, row_sum, 1.0)), -jnp.inf)
    out = out.reshape(rows, heads, -1, width)[:, :, :tokens]
    return out.swapaxes(1, 2).astype(q.dtype), lse.reshape(rows, heads, -1)[:, :, :tokens]


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """[R, S, H, D] → [R, H, N, block, D] float32; the last block is padded with zeros."""
    rows, tokens, heads, width = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -tokens % block), (0, 0), (0, 0)))
    blocks = padded.reshape(rows, -1, block, heads, width)
    return blocks.transpose(0, 3, 1, 2, 4).astype(jnp.float32)


def _listed_keys(blocks: BlockLists) -> jax.Array:
    """[R, H, nQ, k_max, key_block] bool: keys of a list that are valid."""
    named = jnp.arange(blocks.indices.shape[-1]) < blocks.counts[..., None]
    tokens = jax.vmap(lambda of_row, number: of_row[number])(blocks.key_tokens, blocks.indices)
    return jnp.arange(blocks.key_block) < jnp.where(named, tokens, 0)[..., None]


# ---------------------------------------------------------------- kernels


class AttentionKernels(Implementation[AttentionOperands, AttentionOptions]):
    """Kernels on NVIDIA GPUs: those of the module of this folder with the same name.

    The module is imported where it runs: a JAX without its lowering must still run the others.
    """

    @abstractmethod
    def unsupported_here(self, q: jax.Array, call: AttentionCall) -> Exception | None:
        """Why this JAX or this device cannot run them; None if it can."""

    @property
    def module(self) -> ModuleType:
        """It has `forward`, `query_gradient` and `key_gradients`."""
        return import_module(f"pallas_kernels.block_sparse_attention.{self.name}")

    @override
    def run(self, operands: AttentionOperands, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
        return _attention(self, call, operands)

    @override
    def unsupported_reason(
        self, operands: AttentionOperands, call: AttentionCall
    ) -> Exception | None:
        """A JAX without the lowering, another device, dtype, width or sharding, or too much."""
        return self.unsupported_here(operands.q, call) or unsupported_by_kernels(operands, call)

    @override
    def faster_than_reference(self, operands: AttentionOperands, call: AttentionCall) -> bool:
        """Always: the reference copies the keys of every list."""
        return True


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    kernels: AttentionKernels, call: AttentionCall, operands: AttentionOperands
) -> tuple[jax.Array, jax.Array]:
    """The output [R, S, H, D] and the statistics [R, H, S]."""

    def run(operands: AttentionOperands) -> tuple[jax.Array, jax.Array]:
        return kernels.module.forward(_clamped(operands), call.options)

    specs = operand_specs(call, operands.blocks)
    return on_shards(call, run, (specs,), (specs.q, specs.blocks.counts))(operands)


def _forward(
    kernels: AttentionKernels, call: AttentionCall, operands: AttentionOperands
) -> tuple[PyTree, PyTree]:
    results = _attention(kernels, call, operands)
    # Named, so that `jax.checkpoint` can keep them: the kernel is then not run again.
    out, lse = (checkpoint_name(x, OUTPUT_NAME) for x in results)
    return (out, lse), (operands, out, lse)


def _backward(
    kernels: AttentionKernels, call: AttentionCall, residuals: PyTree, cotangents: PyTree
) -> tuple[AttentionOperands]:
    def run(operands: AttentionOperands, *arrays: jax.Array) -> PyTree:
        operands = _clamped(operands)
        inputs, blocks = _inputs(operands, *arrays), operands.blocks
        dk, dv = kernels.module.key_gradients(inputs, blocks, invert(blocks), call.options)
        return kernels.module.query_gradient(inputs, blocks, call.options), dk, dv

    specs = operand_specs(call, residuals[0].blocks)
    of_results = (specs.q, specs.blocks.counts)
    on_each = on_shards(call, run, (specs, *of_results, *of_results), specs[:3])
    dq, dk, dv = differentiated_once(NAME, on_each)(*residuals, *cotangents)
    return (AttentionOperands._make((dq, dk, dv, None)),)


_attention.defvjp(_forward, _backward)


def _clamped(operands: AttentionOperands) -> AttentionOperands:
    q, k, _, blocks = operands
    return operands._replace(blocks=clamped(blocks, q.shape[1], k.shape[1]))


def _inputs(
    operands: AttentionOperands,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> AttentionInputs:
    """What both kernels of the backward read.

    Args:
      operands: of the forward.
      out: [R, S, H, D], the output.
      lse: [R, H, S] float32, the statistics; −inf where a query has no keys.
      dout: [R, S, H, D], cotangent of the output.
      dlse: [R, H, S] float32, cotangent of the statistics.
    """
    products = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    some = ~jnp.isneginf(lse)  # NaN stays NaN
    delta = jnp.where(some, products.swapaxes(1, 2) - dlse, 0.0)
    dout = dout.astype(operands.q.dtype)
    return AttentionInputs(*operands[:3], dout, jnp.where(some, lse, 0.0), delta)


class TritonAttention(AttentionKernels):
    """On NVIDIA GPUs since Ampere."""

    name = "triton"
    interpretable = True

    @override
    def unsupported_here(self, q: jax.Array, call: AttentionCall) -> Exception | None:
        return devices.unsupported_triton(q, interpret=call.options.interpret)


class MosaicAttention(AttentionKernels):
    """On NVIDIA Hopper GPUs."""

    name = "mosaic"

    @override
    def unsupported_here(self, q: jax.Array, call: AttentionCall) -> Exception | None:
        return devices.unsupported_mosaic(q)


REGISTRY: Registry[Implementation[AttentionOperands, AttentionOptions]] = Registry(
    reference=AttentionReference()
)
REGISTRY.register(TritonAttention())
REGISTRY.register(MosaicAttention())
