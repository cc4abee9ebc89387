"""The lists as kernels read them: blocks with their valid tokens, and an order of programs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention.block_lists import (
    BlockLists,
    InvertedLists,
    longest_first,
)

ENTRY_BITS = 8
"""Bits of an entry for the valid tokens of a block, which are 128 at most."""


class QueryLists(NamedTuple):
    """The lists of all blocks of queries: arrays, or references to them within a kernel.

    Attributes:
      entry: [R, H, nQ, k_max] int32, blocks of keys with their valid tokens (`pack_entries`).
      count: [R, H, nQ] int32.
      order: [R, H, nQ] int32, blocks of queries in the order of programs.
      query_tokens: [R, nQ] int32.
    """

    entry: Any
    count: Any
    order: Any
    query_tokens: Any


class KeyLists(NamedTuple):
    """The inverted lists of all blocks of keys: arrays, or references to them within a kernel.

    Attributes:
      entry: [R, H, nQ·k_max] int32, blocks of queries with their valid tokens (`pack_entries`).
      offset: [R, H, nK + 1] int32.
      order: [R, H, nK] int32, blocks of keys in the order of programs.
      key_tokens: [R, nK] int32.
    """

    entry: Any
    offset: Any
    order: Any
    key_tokens: Any


def query_lists(blocks: BlockLists) -> QueryLists:
    """For kernels whose programs take blocks of queries."""
    entries = pack_entries(blocks.indices, blocks.key_tokens)
    return QueryLists(entries, blocks.counts, longest_first(blocks.counts), blocks.query_tokens)


def key_lists(blocks: BlockLists, inverted: InvertedLists) -> KeyLists:
    """For kernels whose programs take blocks of keys."""
    return KeyLists(
        pack_entries(inverted.queries, blocks.query_tokens),
        inverted.offsets,
        longest_first(jnp.diff(inverted.offsets)),
        blocks.key_tokens,
    )


def pack_entries(index: jax.Array, tokens: jax.Array) -> jax.Array:
    """Blocks and their valid tokens in one number, so that a program waits for one load only.

    Args:
      index: [R, ...] int32, numbers of blocks.
      tokens: [R, N] int32, valid tokens of each block.

    Returns:
      [R, ...] int32.
    """
    valid = jax.vmap(lambda each, of_row: of_row.at[each].get(mode="clip"))(index, tokens)
    return (index << ENTRY_BITS) + valid


def unpack_entry(entry: Any) -> tuple[Any, Any]:
    """A block and its valid tokens."""
    return entry >> ENTRY_BITS, entry & ((1 << ENTRY_BITS) - 1)


def divide(number: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number >= 0, within a kernel."""
    if by == 1:
        return number, jnp.int32(0)
    return jax.lax.div(number, jnp.int32(by)), jax.lax.rem(number, jnp.int32(by))
