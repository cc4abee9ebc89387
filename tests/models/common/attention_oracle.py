"""Attention by a mask over all pairs of tokens, which all implementations must equal."""

import jax
import jax.numpy as jnp
import numpy as np

from alload_jax.models.common.segments import PADDING, AttentionSegments, segments_of


def heads(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def laid_out(rows, slots, tokens):
    """Segments from lists of (offset, length), one list a row."""
    table = np.zeros((2, len(rows), slots), np.int32)
    for row, parts in enumerate(rows):
        for slot, part in enumerate(parts):
            table[:, row, slot] = part
    return segments_of(table, tokens)


def packed_of(queries, keys, total_q, total_k, slots):
    """Segments of queries and of keys, with the tightest bounds of their lengths."""
    sides = laid_out(queries, slots, total_q), laid_out(keys, slots, total_k)
    length = sides[0].length
    above = [0, *np.unique(length[length > 0]).tolist()]
    lengths = tuple((each, int((length > each).sum(axis=1).max())) for each in above)
    longest_key = None if queries == keys else int(sides[1].length.max())
    return jax.tree.map(jnp.asarray, AttentionSegments(*sides, lengths, longest_key))


def same_sample(queries, keys):
    """[R, 1, S, T] bool: which tokens of ids [R, S] and [R, T] attend."""
    queries, keys = np.asarray(queries), np.asarray(keys)
    allowed = (queries[:, :, None] == keys[:, None]) & (queries != PADDING)[:, :, None]
    return allowed[:, None]


def masked(query, key, value, allowed=True):
    """Zeros for tokens that attend to nothing."""
    logits = jnp.einsum("rshd,rthd->rhst", query, key) / np.sqrt(query.shape[-1])
    some = jnp.any(jnp.broadcast_to(allowed, logits.shape), axis=-1, keepdims=True)
    logits = jnp.where(allowed, logits, jnp.where(some, -jnp.inf, 0.0))
    output = jnp.einsum("rhst,rthd->rshd", jax.nn.softmax(logits, axis=-1), value)
    return jnp.where(some[..., 0].transpose(0, 2, 1)[..., None], output, 0)


def graded(function, parts):
    """[output, *gradients] of a loss that weighs each of its elements differently."""

    def loss(parts):
        output = function(*parts)
        wave = jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        return jnp.sum(output.astype(jnp.float32) * wave), output

    with jax.default_matmul_precision("highest"):
        (_, output), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(list(parts))
    return [output, *grads]


def assert_near(found, expected, tolerance):
    """By the norm of the difference, relative to that of what is expected."""
    for ours, theirs in zip(found, expected, strict=True):
        ours, theirs = (np.asarray(each, np.float64) for each in (ours, theirs))
        assert np.linalg.norm(ours - theirs) <= tolerance * np.linalg.norm(theirs)
