"""Inputs, a float64 oracle and tolerances for the tests of block-sparse attention."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import ROUNDING

from pallas_kernels.block_sparse_attention import BlockLists, block_sparse_attention, full_lists

KINDS = ("random", "full", "empty", "one", "ragged", "popular")


def lists_of(kind, rng, rows, heads, n_query, n_key, query_block=64, key_block=64):
    """Lists of a kind; every row and head has its own."""
    if kind == "full":
        tokens = (
            jnp.full((rows, n), size) for n, size in ((n_query, query_block), (n_key, key_block))
        )
        return full_lists(*tokens, heads, query_block, key_block)
    most = 1 if kind == "one" else max(1, n_key - 1)
    weight = 1.0 / np.arange(1, n_key + 1) ** (2 if kind == "popular" else 0)
    chosen = [
        rng.choice(n_key, most, replace=False, p=weight / weight.sum())
        for _ in range(rows * heads * n_query)
    ]
    counts = rng.integers(0, most + 1, (rows, heads, n_query))
    if kind == "one":
        counts[:] = most
    if kind == "empty":
        counts[:] = 0
    tokens = [np.full((rows, n_query), query_block), np.full((rows, n_key), key_block)]
    if kind == "ragged":
        tokens = [rng.integers(0, each.max() + 1, each.shape) for each in tokens]
    return BlockLists(
        jnp.asarray(np.reshape(chosen, (rows, heads, n_query, most)), jnp.int32),
        jnp.asarray(counts, jnp.int32),
        *(jnp.asarray(each, jnp.int32) for each in tokens),
        query_block,
        key_block,
    )


def arrays(rng, rows, queries, keys, heads, width, dtype=jnp.bfloat16):
    """q, k, v and a cotangent of the output."""
    sizes = (queries, keys, keys, queries)
    return [jnp.asarray(rng.normal(size=(rows, n, heads, width)), dtype) for n in sizes]


def seen_by(blocks, queries, keys):
    """[R, H, S, T] bool: which keys a query attends to, from the lists one by one."""
    rows, heads, n_query, _ = blocks.indices.shape
    seen = np.zeros((rows, heads, n_query * blocks.query_block, keys), bool)
    parts = [np.asarray(x) for x in (blocks.indices, blocks.counts)]
    for r, h, b in np.ndindex(rows, heads, n_query):
        for listed in parts[0][r, h, b, : parts[1][r, h, b]]:
            q, k = b * blocks.query_block, listed * blocks.key_block
            q_end = q + int(blocks.query_tokens[r, b])
            seen[r, h, q:q_end, k : k + int(blocks.key_tokens[r, listed])] = True
    return seen[:, :, :queries]


def oracle(q, k, v, dout, blocks, scale=None, dlse=None):
    """Output, statistics and gradients in float64, by the formulas of attention."""
    q, k, v, dout = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seen = seen_by(blocks, q.shape[2], k.shape[2])
    scores = np.where(seen, q @ k.swapaxes(2, 3) * scale, -np.inf)
    some = seen.any(axis=-1)
    top = np.where(some, scores.max(axis=-1, initial=-np.inf), 0.0)
    weights = np.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    lse = np.where(some, top + np.log(np.where(some, total, 1.0)), -np.inf)
    share = weights / np.where(some, total, 1.0)[..., None]
    out = share @ v
    dshare = dout @ v.swapaxes(2, 3)
    inner = (dshare * share).sum(axis=-1, keepdims=True)
    dscores = share * (dshare - inner)
    if dlse is not None:
        dscores += share * np.where(some, dlse, 0.0)[..., None]
    grads = (dscores @ k * scale, dscores.swapaxes(2, 3) @ q * scale, share.swapaxes(2, 3) @ dout)
    return [x.swapaxes(1, 2) for x in (out, *grads)], lse


@partial(jax.jit, static_argnames=("way", "scale"))
def compute(q, k, v, dout, blocks, way, scale=None, dlse=None):
    """Output and gradients, and the statistics. `way` is (implementation, interpret)."""

    def attend(q, k, v):
        options = dict(zip(("implementation", "interpret"), way, strict=True))
        return block_sparse_attention(q, k, v, blocks, scale=scale, return_lse=True, **options)

    (out, lse), pull = jax.vjp(attend, q, k, v)
    return (out, *pull((dout, jnp.zeros_like(lse) if dlse is None else dlse))), lse


def close(found, expected, dtype):
    """Whether outputs and gradients are within a few roundings of their size."""
    for each, exact in zip(found, expected, strict=True):
        size = max(np.abs(exact).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(
            np.asarray(each, np.float64), exact, atol=4 * ROUNDING[jnp.dtype(dtype)] * size
        )
