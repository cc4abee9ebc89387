"""Which blocks of keys each block of queries attends to."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.op import Ref

BLOCK_SIZES = (64, 128)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("indices", "counts", "query_tokens", "key_tokens"),
    meta_fields=("query_block", "key_block"),
)
@dataclass(frozen=True)
class BlockLists:
    """For each row, head and block of queries, a list of blocks of keys.

    Block b of queries holds tokens b·query_block and following; of these the first
    `query_tokens[b]` are valid, likewise of keys. Other tokens have no influence, and their outputs
    and gradients are zero. Tokens past the end of the array or of the block are not valid, whatever
    the lists say.

    Attributes:
      indices: [R, H, nQ, k_max] int32, numbers of key blocks; those beyond the count are ignored. A
        list names no block twice.
      counts: [R, H, nQ] int32, length of each list, from 0 to k_max.
      query_tokens: [R, nQ] int32, valid tokens of each block of queries.
      key_tokens: [R, nK] int32, valid tokens of each block of keys.
      query_block: tokens of a block of queries, 64 or 128.
      key_block: tokens of a block of keys, 64 or 128.
    """

    indices: jax.Array
    counts: jax.Array
    query_tokens: jax.Array
    key_tokens: jax.Array
    query_block: int = 64
    key_block: int = 64


class InvertedLists(NamedTuple):
    """For each row, head and block of keys, the blocks of queries whose lists name it.

    Attributes:
      queries: [R, H, nQ·k_max] int32, the lists of all key blocks in turn, each ascending.
      offsets: [R, H, nK + 1] int32, where each list begins; the last is where all end.
    """

    queries: jax.Array
    offsets: jax.Array


def clamped(blocks: BlockLists, queries: int, keys: int) -> BlockLists:
    """The same lists, with all numbers within the arrays that they are used for.

    Args:
      blocks: the lists.
      queries: S.
      keys: T.
    """
    return BlockLists(
        jnp.clip(blocks.indices, 0, blocks.key_tokens.shape[1] - 1),
        jnp.clip(blocks.counts, 0, blocks.indices.shape[-1]),
        existing_tokens(blocks.query_tokens, blocks.query_block, queries),
        existing_tokens(blocks.key_tokens, blocks.key_block, keys),
        blocks.query_block,
        blocks.key_block,
    )


def check_values(name: str, blocks: BlockLists) -> None:
    """Checks what the lists hold, which must not be traced.

    Args:
      name: of the function that takes them, for messages.
      blocks: the lists, whose shapes fit.

    Raises:
      ValueError: a list names a block twice, or a number is out of range.
    """
    most, n_key = blocks.indices.shape[-1], blocks.key_tokens.shape[1]
    named = np.arange(most) < np.asarray(blocks.counts)[..., None]
    indices = np.where(named, blocks.indices, 0)
    ordered = np.sort(np.where(named, indices, n_key + np.arange(most)), axis=-1)
    limits: dict[str, tuple[jax.typing.ArrayLike, int]] = {
        "counts": (blocks.counts, most),
        "indices": (indices, n_key - 1),
        "query_tokens": (blocks.query_tokens, blocks.query_block),
        "key_tokens": (blocks.key_tokens, blocks.key_block),
    }
    for field, (array, highest) in limits.items():
        values = np.asarray(array)
        for index in np.argwhere((values < 0) | (values > highest))[:1]:
            raise ValueError(
                f"{name}: blocks.{field}{index.tolist()} is {values[tuple(index)]}; it must be "
                f"from 0 to {highest}"
            )
    for *place, number in np.argwhere(ordered[..., 1:] == ordered[..., :-1])[:1].tolist():
        raise ValueError(
            f"{name}: blocks.indices{place} names block {ordered[(*place, number)]} twice; name "
            "each block once"
        )


def existing_tokens(tokens: jax.Array, block: int, length: int) -> jax.Array:
    """Valid tokens of each block, [R, N], at most those that it has in an array of a length."""
    left = length - jnp.arange(tokens.shape[1], dtype=jnp.int32) * block
    return jnp.clip(tokens, 0, jnp.minimum(left, block))


def full_lists(
    query_tokens: jax.Array,
    key_tokens: jax.Array,
    heads: int,
    query_block: int = 64,
    key_block: int = 64,
) -> BlockLists:
    """The lists of dense attention: every block of queries attends to all blocks of keys.

    Args:
      query_tokens: [R, nQ] integers, valid tokens of each block of queries.
      key_tokens: [R, nK] integers, valid tokens of each block of keys.
      heads: H.
      query_block: tokens of a block of queries.
      key_block: tokens of a block of keys.
    """
    rows, n_query = query_tokens.shape
    n_key = key_tokens.shape[1]
    for name, tokens in (("query_tokens", query_tokens), ("key_tokens", key_tokens)):
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"full_lists: {name} is {tokens.dtype}; give integers")
    return BlockLists(
        jnp.broadcast_to(jnp.arange(n_key, dtype=jnp.int32), (rows, heads, n_query, n_key)),
        jnp.full((rows, heads, n_query), n_key, jnp.int32),
        jnp.asarray(query_tokens, jnp.int32),
        jnp.asarray(key_tokens, jnp.int32),
        query_block,
        key_block,
    )


_GROUP = 32
"""Blocks of queries whose bits are in one number."""


def invert(blocks: BlockLists) -> InvertedLists:
    """The lists by key block, so that a key block's gradients can be summed.

    Nothing is sorted. Each pair of lists sets one bit, of 32 blocks of queries in a number for each
    block of keys; sums of bits say where a pair goes. Its memory is that of the lists, and an
    eighth of a byte for each pair of blocks.
    """
    rows, heads, n_query, most = blocks.indices.shape
    n_key, groups = blocks.key_tokens.shape[1], -(-n_query // _GROUP)
    query = jnp.arange(n_query, dtype=jnp.int32)[:, None]
    bit = jnp.left_shift(jnp.int32(1), query % _GROUP)
    named = jnp.arange(most) < blocks.counts.reshape(rows * heads, n_query)[..., None]
    head = jnp.arange(rows * heads, dtype=jnp.int32)[:, None, None]
    number = (head * groups + query // _GROUP) * n_key + blocks.indices.reshape(named.shape)
    size = rows * heads * groups * n_key
    number = jnp.where(named, number, size)

    asking = jnp.zeros(size, jnp.int32).at[number].add(bit, mode="drop")
    count = jax.lax.population_count(asking).reshape(rows * heads, groups, n_key)
    ends = jnp.cumsum(count.sum(axis=1), axis=-1)
    offsets = jnp.pad(ends, ((0, 0), (1, 0)))
    first = (offsets[:, None, :-1] + jnp.cumsum(count, axis=1) - count).reshape(size)
    before = jax.lax.population_count(asking.at[number].get(mode="clip") & (bit - 1))
    place = head * (n_query * most) + first.at[number].get(mode="clip") + before
    place = jnp.where(named, place, rows * heads * n_query * most)
    queries = jnp.zeros(rows * heads * n_query * most, jnp.int32)
    queries = queries.at[place].set(jnp.broadcast_to(query, place.shape), mode="drop")
    shape = (rows, heads, n_query * most)
    return InvertedLists(queries.reshape(shape), offsets.reshape(rows, heads, n_key + 1))


def longest_first(counts: jax.Array) -> jax.Array:
    """The order in which programs take lists, so that none begins a long one at the end.

    Args:
      counts: [..., N] integers.

    Returns:
      [..., N] int32, a permutation of each row's numbers.
    """
    return jnp.argsort(-counts, axis=-1, stable=True).astype(jnp.int32)


ENTRY_BITS = 8
"""Bits of an entry for the valid tokens of a block, which are 128 at most."""


class ProgramLists(NamedTuple):
    """The lists that a kernel's programs take: arrays, or references to them within the kernel.

    Attributes:
      entry: int32, the blocks of all lists with their valid tokens (`pack_entries`): of keys
        [R, H, nQ, k_max], or of queries, the lists in turn, [R, H, nQ·k_max].
      extent: int32, the length of each list of keys, [R, H, nQ], or where each list of queries
        begins, and the end of the last, [R, H, nK + 1].
      order: [R, H, N] int32, the programs' own blocks in their order.
      own_tokens: [R, N] int32, valid tokens of the programs' own blocks.
    """

    entry: Ref
    extent: Ref
    order: Ref
    own_tokens: Ref


def query_lists(blocks: BlockLists) -> ProgramLists:
    """For kernels whose programs take blocks of queries."""
    entries = pack_entries(blocks.indices, blocks.key_tokens)
    return ProgramLists(entries, blocks.counts, longest_first(blocks.counts), blocks.query_tokens)


def key_lists(blocks: BlockLists, inverted: InvertedLists) -> ProgramLists:
    """For kernels whose programs take blocks of keys."""
    entries, offsets = pack_entries(inverted.queries, blocks.query_tokens), inverted.offsets
    return ProgramLists(entries, offsets, longest_first(jnp.diff(offsets)), blocks.key_tokens)


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


def unpack_entry(entry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A block and its valid tokens."""
    return entry >> ENTRY_BITS, entry & ((1 << ENTRY_BITS) - 1)


def divide(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of a number >= 0, within a kernel."""
    if by == 1:
        return number, jnp.int32(0)
    return jax.lax.div(number, jnp.int32(by)), jax.lax.rem(number, jnp.int32(by))
