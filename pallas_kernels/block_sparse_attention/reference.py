"""What the function means, in plain jax.numpy: the XLA implementation and the tests' formula."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.block_sparse_attention.block_lists import BlockLists, clamped
from pallas_kernels.block_sparse_attention.implementation import Implementation
from pallas_kernels.block_sparse_attention.operands import (
    OUTPUT_NAME,
    CallConfig,
    Operands,
    Options,
)
from pallas_kernels.block_sparse_attention.shards import on_shards


class XlaImplementation(Implementation):
    """`reference`, differentiated by JAX: for every device and sharding."""

    name = "xla"

    def run(self, operands: Operands, config: CallConfig) -> tuple[jax.Array, jax.Array]:
        """See `reference`."""
        run = partial(reference, options=config.options)
        out, lse = on_shards(config.sharding, run, "forward")(operands)
        return checkpoint_name(out, OUTPUT_NAME), checkpoint_name(lse, OUTPUT_NAME)


def reference(operands: Operands, options: Options) -> tuple[jax.Array, jax.Array]:
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
    top = jax.lax.stop_gradient(scores.max(axis=-1, initial=-jnp.inf))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top[..., None], 0.0)), 0.0)
    total = weights.sum(axis=-1)
    some = total != 0  # NaN stays NaN
    share = weights / jnp.where(some, total, 1.0)[..., None]
    out = jnp.einsum("rhqts,rhqsd->rhqtd", share, values, precision="highest")
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
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
