"""Which blocks of keys matter to each block of queries, and the order of tokens in tiles.

Nothing here is differentiated: gradients stop at the choice.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from pallas_kernels import devices
from pallas_kernels.block_sparse_attention.block_lists import BlockLists, existing_tokens
from pallas_kernels.op import Call, Implementation, Registry

NAME = "choose_blocks"
"""Of the kernel, as profilers and lowered modules show it."""
HELD_BLOCKS = 2048
"""Blocks of keys whose scores the kernel keeps; it computes those of more again for each bit."""
_LEAST_CHUNK = 16
"""Blocks of queries for which scores are computed at a time, at least."""


class PooledScores(NamedTuple):
    """Scores of pairs of blocks, queries·keysᵀ, which are never held all at once.

    Attributes:
      queries: [R, nQ, H, D], a vector for each block of queries.
      keys: [R, nK, H, D], a vector for each block of keys.
    """

    queries: jax.Array
    keys: jax.Array


class BlockSegments(NamedTuple):
    """Segments of blocks: blocks of different segments never meet.

    Attributes:
      queries: [R, nQ] int32, the segment of each block of queries; negative for padding.
      keys: [R, nK] int32, likewise of keys.
    """

    queries: jax.Array
    keys: jax.Array


@partial(jax.jit, static_argnames="block")
def pool_blocks(x: jax.Array, tokens: jax.Array, *, block: int) -> jax.Array:
    """Mean of each block over its valid tokens.

    Args:
      x: [R, S, H, D].
      tokens: [R, N] integers, valid tokens of each block, which are its first.
      block: tokens of a block; N = ⌈S/block⌉.

    Returns:
      [R, N, H, D] float32, 0 for blocks without a valid token; no gradient.

    Raises:
      ValueError: the shapes do not fit.
    """
    rows, length, heads, width = x.shape
    if block < 1 or tokens.shape != (rows, -(-length // block)):
        raise ValueError(
            f"pool_blocks: tokens is {tokens.shape}; for x {x.shape} in blocks of {block} it must "
            f"be {(rows, -(-length // max(block, 1)))}"
        )
    x = jax.lax.stop_gradient(x)
    padded = jnp.pad(x, ((0, 0), (0, -length % block), (0, 0), (0, 0)))
    blocks = padded.reshape(rows, tokens.shape[1], block, heads, width)
    tokens = existing_tokens(tokens, block, length)
    valid = jnp.arange(block) < tokens[..., None]
    total = jnp.where(valid[..., None, None], blocks, 0).sum(axis=2, dtype=jnp.float32)
    return total / jnp.maximum(tokens, 1)[..., None, None]


_BLOCKS = ("query_block", "key_block")
_STATIC = ("k_max", *_BLOCKS, "own", "implementation", "interpret")


@partial(jax.jit, static_argnames=_STATIC)
def top_k_blocks(
    scores: PooledScores | jax.Array,
    k: jax.Array | int,
    segments: BlockSegments,
    query_tokens: jax.Array,
    key_tokens: jax.Array,
    *,
    k_max: int,
    query_block: int = 64,
    key_block: int = 64,
    own: bool = True,
    implementation: str = "auto",
    interpret: bool = False,
) -> BlockLists:
    """The lists of the k best blocks of keys in the segment of each block of queries.

    Memory is O(nQ·k_max) besides what is given: the kernel keeps pooled scores in registers, XLA
    computes them for some blocks of queries at a time. Products of float32 have the precision that
    the device takes by default, TF32 on NVIDIA GPUs.

    Args:
      scores: pooled, or [R, H, nQ, nK].
      k: most blocks of a list, for all, or integers [H], [R, H] or [R, H, nQ], from 0 to k_max. A
        list is no longer than its segment has blocks of keys.
      segments: of the blocks.
      query_tokens: [R, nQ] int32, valid tokens of each block of queries.
      key_tokens: [R, nK] int32, valid tokens of each block of keys.
      k_max: length that lists may have.
      query_block: tokens of a block of queries.
      key_block: tokens of a block of keys.
      own: whether a list begins with the block of keys that holds the first of its own tokens, as
        in self-attention, if that is in its segment.
      implementation: "triton" (a kernel that sorts nothing, for pooled scores), "xla" (sorts), or
        "auto": the kernel where it can run, up to `HELD_BLOCKS` blocks of keys.
      interpret: run the kernel in Pallas's interpreter, which is slow and needs no GPU.

    Returns:
      The blocks of highest score, the lower number among equals; NaN is the lowest score. Lists are
      ascending behind their own block, so that programs that run at the same time read the same
      keys. No gradient passes.

    Raises:
      ValueError: a shape, dtype or size does not fit, or the kernel gets scores that are not
        pooled, or split over a mesh by other means than `jax.shard_map`.
      NotImplementedError: this device cannot run the kernel, or its width does not fit.
    """
    scores, k = jax.lax.stop_gradient((scores, jnp.asarray(k)))
    rows, n_query, n_key, heads = _checked_sizes(scores, k, segments, query_tokens, key_tokens)
    sizes = (query_block, key_block)
    for name, value, least in zip(("k_max", *_BLOCKS), (k_max, *sizes), (0, 1, 1), strict=True):
        if value < least:
            raise ValueError(f"top_k_blocks: {name} is {value}; it must be {least} or more")
    most = min(k_max, n_key)
    if not rows * heads * n_query * most:
        none = jnp.zeros((rows, heads, n_query, k_max), jnp.int32)
        return BlockLists(none, none.sum(axis=-1), query_tokens, key_tokens, *sizes)
    k = jnp.clip(k, 0, most).astype(jnp.int32)
    operands = SelectionOperands(
        scores,
        jnp.broadcast_to(k if k.ndim == 3 else k[..., None], (rows, heads, n_query)),
        jnp.where(query_tokens > 0, segments.queries, -1),
        jnp.where((key_tokens > 0) & (segments.keys >= 0), segments.keys, -2),
    )
    call = Call(SelectionOptions(sizes, most, own, interpret), None)
    chosen = REGISTRY.choose("top_k_blocks", implementation, operands, call, interpret=interpret)
    index, count = chosen.run(operands, call)
    index = jnp.pad(index, ((0, 0), (0, 0), (0, 0), (0, k_max - most)))
    return BlockLists(index, count, query_tokens, key_tokens, *sizes)


class SelectionOperands(NamedTuple):
    """What is chosen from.

    Attributes:
      scores: pooled, or [R, H, nQ, nK].
      k: [R, H, nQ] int32, most blocks of each list.
      asking: [R, nQ] int32, the segment of each block of queries, negative where it has none.
      usable: [R, nK] int32, that of each block of keys, −2 where it has none.
    """

    scores: PooledScores | jax.Array
    k: jax.Array
    asking: jax.Array
    usable: jax.Array


@dataclass(frozen=True)
class SelectionOptions:
    """What is static.

    Attributes:
      sizes: tokens of a block of queries, and of one of keys.
      most: length that lists may have, at most the blocks of keys.
      own: whether a list begins with the block's own.
      interpret: run the kernel in an interpreter.
    """

    sizes: tuple[int, int]
    most: int
    own: bool
    interpret: bool


Selection = Implementation[SelectionOperands, SelectionOptions]
"""Gives lists [R, H, nQ, most] int32, zeros behind their ends, and their lengths [R, H, nQ]."""


class SortedSelection(Selection):
    """By XLA's sort, for some blocks of queries at a time."""

    name = "xla"

    @override
    def run(
        self, operands: SelectionOperands, call: Call[SelectionOptions]
    ) -> tuple[jax.Array, jax.Array]:
        scores, k, asking, usable = operands
        (rows, heads, n_query), n_key, options = k.shape, usable.shape[1], call.options
        query_block, key_block = options.sizes

        def of_chunk(chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Lists [R, H, C, most] and counts [R, H, C] of the blocks of queries [C]."""
            place = jnp.minimum(chunk, n_query - 1)
            same = asking[:, place][..., None] == usable[:, None]
            ranked = between_infinities(scores_of(scores, place))
            number = (place * query_block // key_block)[:, None] if options.own else -1
            is_own = jnp.arange(n_key) == number
            ranked = jnp.where(same[:, None], jnp.where(is_own, jnp.inf, ranked), -jnp.inf)
            _, index = jax.lax.top_k(ranked, options.most)
            count = jnp.minimum(same.sum(axis=-1, dtype=jnp.int32)[:, None], k[:, :, place])
            return _ascending(index.astype(jnp.int32), count, number), count

        size = min(n_query, max(_LEAST_CHUNK, n_query * options.most // n_key))
        chunks = jnp.arange(-(-n_query // size) * size).reshape(-1, size)
        index, count = jax.lax.map(of_chunk, chunks)
        index = jnp.moveaxis(index, 0, 2).reshape(rows, heads, chunks.size, options.most)
        count = jnp.moveaxis(count, 0, 2).reshape(rows, heads, chunks.size)
        return index[:, :, :n_query], count[:, :, :n_query]


class CountedSelection(Selection):
    """By the Triton kernel, which counts how many scores are as high; for pooled scores."""

    name = "triton"
    interpretable = True

    @override
    def unsupported_reason(
        self, operands: SelectionOperands, call: Call[SelectionOptions]
    ) -> Exception | None:
        scores = operands.scores
        if not isinstance(scores, PooledScores):
            return ValueError("scores are an array; give PooledScores, or use 'xla'")
        width = scores.queries.shape[-1]
        if width < 16 or width & (width - 1):
            return NotImplementedError(f"the width {width} is no power of two from 16; use 'xla'")
        if devices.unsupported_sharding(scores.queries, None):
            return ValueError(
                "tracing cannot see how scores.queries is split over the mesh; call it within "
                "jax.shard_map, or use 'xla'"
            )
        return devices.unsupported_triton(scores.queries, interpret=call.options.interpret)

    @override
    def faster_than_reference(
        self, operands: SelectionOperands, call: Call[SelectionOptions]
    ) -> bool:
        """Where it keeps the scores; longer rows were not measured."""
        return operands.usable.shape[1] <= HELD_BLOCKS

    @override
    def run(
        self, operands: SelectionOperands, call: Call[SelectionOptions]
    ) -> tuple[jax.Array, jax.Array]:
        # Imported where it runs: a JAX without Pallas's Triton lowering must run the other one.
        kernel = import_module("pallas_kernels.block_sparse_attention.selection_triton")
        return kernel.choose(operands, call.options)


REGISTRY: Registry[Selection] = Registry(reference=SortedSelection())
REGISTRY.register(CountedSelection())


def _checked_sizes(
    scores: PooledScores | jax.Array,
    k: jax.Array,
    segments: BlockSegments,
    query_tokens: jax.Array,
    key_tokens: jax.Array,
) -> tuple[int, int, int, int]:
    """R, nQ, nK and H of arguments that fit together."""
    (rows, n_query), n_key = query_tokens.shape, key_tokens.shape[1]
    if isinstance(scores, PooledScores):
        heads, width = scores.queries.shape[2:]
        expected = [
            ("scores.queries", scores.queries, (rows, n_query, heads, width)),
            ("scores.keys", scores.keys, (rows, n_key, heads, width)),
        ]
    else:
        heads = scores.shape[1]
        expected = [("scores", scores, (rows, heads, n_query, n_key))]
    of_blocks = [
        ("query_tokens", query_tokens, (rows, n_query)),
        ("segments.queries", segments.queries, (rows, n_query)),
        ("key_tokens", key_tokens, (rows, n_key)),
        ("segments.keys", segments.keys, (rows, n_key)),
    ]
    for name, array, _ in of_blocks:
        if array.dtype != jnp.int32:
            raise ValueError(f"top_k_blocks: {name} is {array.dtype}; it must be int32")
    for name, array, _ in expected if isinstance(scores, PooledScores) else ():
        if not jnp.issubdtype(array.dtype, jnp.floating):  # products of integers may overflow
            raise ValueError(f"top_k_blocks: {name} is {array.dtype}; it must be floating-point")
    for name, array, shape in (*expected, *of_blocks):
        if array.shape != shape:
            raise ValueError(f"top_k_blocks: {name} is {array.shape}; it must be {shape}")
    shapes = ((), (heads,), (rows, heads), (rows, heads, n_query))
    if not jnp.issubdtype(k.dtype, jnp.integer) or k.shape not in shapes:
        raise ValueError(
            f"top_k_blocks: k is {k.dtype} {k.shape}; give an integer, or integers of shape "
            f"{', '.join(map(str, shapes[1:-1]))} or {shapes[-1]}"
        )
    return rows, n_query, n_key, heads


def scores_of(scores: PooledScores | jax.Array, place: jax.Array) -> jax.Array:
    """Scores of some blocks of queries, which `place` [C] names: [R, H, C, nK] float32.

    Differentiable, for those who train what makes scores.
    """
    if isinstance(scores, PooledScores):
        scores = jnp.einsum("rqhd,rkhd->rhqk", scores.queries[:, place], scores.keys)
    else:
        scores = scores[:, :, place]
    return scores.astype(jnp.float32)


def between_infinities(scores: jax.Array) -> jax.Array:
    """Finite scores, NaN the lowest: infinite ones say which blocks must and which must not be."""
    most = jnp.finfo(jnp.float32).max
    scores = jnp.where(jnp.isnan(scores), -most, jnp.clip(scores, -most, most))
    return jnp.where(scores == 0, 0.0, scores)  # −0 and 0 are equal, but sort apart


def _ascending(index: jax.Array, count: jax.Array, own: jax.Array | int) -> jax.Array:
    """Lists [..., C, k] of lengths [..., C], ascending behind their own [C, 1], then zeros."""
    valid = jnp.arange(index.shape[-1]) < count[..., None]
    last = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(valid, jnp.where(index == own, -1, index), last), axis=-1)
    return jnp.where(valid, jnp.where(ordered == -1, own, ordered), 0)


Grid = tuple[int, int, int]


class TileOrder(NamedTuple):
    """Tokens in blocks: each block's valid tokens are its first.

    Attributes:
      source: [N·block] int32, the token at each place; −1 where there is none.
      place: [T·H·W] int32, where each token is: `source[place] == arange(T·H·W)`.
      tokens: [N] int32, valid tokens of each block.
    """

    source: np.ndarray
    place: np.ndarray
    tokens: np.ndarray


def tile_order(grid: Grid, tile: Grid | None = None, block: int = 64) -> TileOrder:
    """Orders the tokens of a sample so that each block holds neighbours.

    With a tile, each block holds one. Tiles follow one another along the width, then the height,
    then time, and tokens within a tile likewise. Tiles at the edges may hold fewer tokens, and
    every block of a tile with fewer tokens than `block` has empty places.

    Without one, every block but the last is full. Time and height are cut into bands of about the
    side of a cube of `block` tokens. Along each pair of bands, tokens follow one another column by
    column of the width, there and back again in the next pair, and are cut into blocks.

    Args:
      grid: (t, h, w) tokens of the sample.
      tile: (t, h, w) tokens of a tile, such as (4, 4, 4) or (2, 8, 8); None for full blocks.
      block: places of a block, at least the tokens of a tile.

    Raises:
      ValueError: a size is below 1, or a tile has no room in a block.
    """
    _check(grid, tile, block)
    t, h, w = (each.reshape(-1) for each in np.indices(grid))
    if tile is None:
        order = _along_bands(grid, block, t, h, w)
        size = len(order)
        counts = np.minimum(block, size - np.arange(0, size, block))
        return _blocks(order, np.arange(size), counts, block)
    tiles = [-(-size // part) for size, part in zip(grid, tile, strict=True)]
    number, within = zip(*map(np.divmod, (t, h, w), tile), strict=True)
    tile_of = np.ravel_multi_index(number, tiles)
    order = np.lexsort((*within[::-1], tile_of))
    counts = np.bincount(tile_of, minlength=int(np.prod(tiles)))
    first = np.cumsum(counts) - counts
    rank = np.arange(len(order)) - first[tile_of[order]]
    return _blocks(order, tile_of[order] * block + rank, counts, block)


def _along_bands(grid: Grid, block: int, t: np.ndarray, h: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The tokens in the order in which full blocks take them."""
    frames, height, width = grid
    bands_t, bands_h = _bands(grid, block)
    band_t = t * bands_t // frames
    back = band_t % 2 == 1
    band_h = h * bands_h // height
    band_h = np.where(back, bands_h - 1 - band_h, band_h)
    # Towards the next pair of bands, so that a block that holds the end of one is connected.
    across = np.where(back, height - 1 - h, h)
    beam = band_t * bands_h + band_h
    column = np.where(beam % 2 == 1, width - 1 - w, w)
    return np.lexsort((t, across, column, beam))


def _bands(grid: Grid, block: int) -> tuple[int, int]:
    """Numbers of bands of time and of height, whose columns make about cubic blocks."""
    sides: dict[int, float] = {}
    room = float(block)
    for left, axis in zip((3, 2, 1), np.argsort(grid, kind="stable").tolist(), strict=True):
        # A short axis leaves its share of the room to the others.
        sides[axis] = min(grid[axis], room ** (1 / left))
        room /= sides[axis]
    bands_t, bands_h = (max(1, round(grid[axis] / sides[axis])) for axis in (0, 1))
    return bands_t, bands_h


def _blocks(order: np.ndarray, places: np.ndarray, counts: np.ndarray, block: int) -> TileOrder:
    place = np.empty(len(order), np.int32)
    place[order] = places
    source = np.full(len(counts) * block, -1, np.int32)
    source[place] = np.arange(len(order))
    return TileOrder(source, place, counts.astype(np.int32))


def _check(grid: Grid, tile: Grid | None, block: int) -> None:
    for name, sizes in (("grid", grid), ("tile", tile)):
        if sizes is not None and (len(sizes) != 3 or min(sizes) < 1):
            raise ValueError(f"tile_order: {name} is {sizes}; it must be three numbers >= 1")
    if tile is not None and int(np.prod(tile)) > block:
        raise ValueError(
            f"tile_order: tile {tile} holds {int(np.prod(tile))} tokens, more than a block of "
            f"{block}; make one of its sides shorter"
        )
