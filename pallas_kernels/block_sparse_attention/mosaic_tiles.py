"""Tiles of the Mosaic GPU kernels: how many, and how they are copied and multiplied."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import PyTree

from pallas_kernels.block_sparse_attention.block_lists import ProgramLists, divide, unpack_entry
from pallas_kernels.block_sparse_attention.operands import Pass
from pallas_kernels.mosaic_rows import load
from pallas_kernels.op import Ref


@dataclass(frozen=True)
class MosaicTiles:
    """What a program, one group of 128 threads, works on.

    Attributes:
      own: tokens of its own tile, 64 or 128.
      listed: tokens of a tile of the list, 64 or 128.
      slots: tiles in shared memory at a time, of k and of v (of q and of dout in dk and dv).
    """

    own: int
    listed: int
    slots: tuple[int, int]


_TILES: dict[tuple[Pass, int], MosaicTiles] = {
    ("forward", 128): MosaicTiles(64, 128, (1, 1)),
    ("forward", 64): MosaicTiles(64, 64, (1, 1)),
    ("dq", 128): MosaicTiles(64, 64, (2, 2)),
    ("dq", 64): MosaicTiles(64, 64, (2, 1)),
    ("dkv", 128): MosaicTiles(64, 64, (2, 2)),
    ("dkv", 64): MosaicTiles(64, 64, (3, 3)),
}
"""For each kernel and D."""


def tiles_for(kernel: Pass, width: int, listed_block: int) -> MosaicTiles:
    """The tiles that were measured as fastest, at most the blocks that lists name."""
    best = _TILES[kernel, width]
    return MosaicTiles(best.own, min(best.listed, listed_block), best.slots)


MATRIX = plgpu.Layout.WGMMA
"""How a matrix lies in the registers of a group of threads: as tensor cores leave it."""
ROWS, COLUMNS = MATRIX.reduce(1), MATRIX.reduce(0)
"""How a vector with a number for each row, or each column, of a matrix lies there."""


@dataclass(frozen=True)
class MosaicLaunch:
    """What all programs of a kernel know.

    Attributes:
      heads: H.
      width: D.
      own_block: tokens of a block of what programs take: of queries, of keys in dk and dv.
      listed_block: tokens of a block of what the lists name.
      scale: factor of the scores, > 0.
      tiles: of the kernel.
    """

    heads: int
    width: int
    own_block: int
    listed_block: int
    scale: float
    tiles: MosaicTiles


@dataclass(frozen=True)
class Own:
    """The tile of a program.

    Attributes:
      row: of the batch.
      head: of the row.
      block: that holds the tile.
      start: its first token.
      skipped: tokens of the block before it.
      size: its tokens.
    """

    row: jax.Array
    head: jax.Array
    block: jax.Array
    start: jax.Array
    skipped: jax.Array
    size: int

    @property
    def tokens(self) -> tuple[PyTree, ...]:
        """Its place in [R, S, H, D]."""
        return self.row, pl.ds(self.start, self.size), self.head

    @property
    def scalars(self) -> tuple[PyTree, ...]:
        """Its place in [R, H, S]."""
        return self.row, self.head, pl.ds(self.start, self.size)

    def only_valid(self, value: jax.Array, tokens: jax.Array) -> jax.Array:
        """[size, D] with zeros for the tokens of the block from the given number on."""
        row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=MATRIX)
        return jnp.where(row + self.skipped < tokens, value, 0.0)


def own_tile(lists: ProgramLists, launch: MosaicLaunch) -> Own:
    """The tile of this program: heads in turn, each head's longest list first."""
    size = launch.tiles.own
    parts, blocks = launch.own_block // size, lists.order.shape[2]
    of_head, number = divide(lax.axis_index("program"), parts * blocks)
    row, head = divide(of_head, launch.heads)
    place, part = divide(number, parts)
    block, skipped = lists.order[row, head, place], part * size
    return Own(row, head, block, block * launch.own_block + skipped, skipped, size)


@dataclass(frozen=True)
class MosaicWalk:
    """The list of a program, cut into tiles.

    Attributes:
      own: the program's tile.
      entry: the packed block at a place in the list; places beyond its end must do no harm.
      blocks: how many the list has.
      launch: of the kernel.
    """

    own: Own
    entry: Callable[[jax.Array], jax.Array]
    blocks: jax.Array
    launch: MosaicLaunch

    @property
    def count(self) -> jax.Array:
        """How many tiles there are."""
        return self.blocks * self._parts

    @property
    def size(self) -> int:
        """Tokens of a tile."""
        return self.launch.tiles.listed

    @property
    def _parts(self) -> int:
        return self.launch.listed_block // self.size

    def entry_of(self, number: jax.Array) -> jax.Array:
        """The packed block that holds a tile."""
        return self.entry(divide(number, self._parts)[0])

    def start_and_valid(self, number: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first token of a tile, and how many of it are valid."""
        block, tokens = unpack_entry(entry)
        skipped = divide(number, self._parts)[1] * self.size
        return block * self.launch.listed_block + skipped, tokens - skipped

    def fold(
        self, step: Callable[..., PyTree], start: PyTree, rings: Sequence["TileRing"]
    ) -> PyTree:
        """Folds step(valid, slots, fetch, carry) over the tiles.

        Entries are loaded some tiles before their copies begin, so that no program waits for them.

        Args:
          step: takes the tile's valid tokens, its slot in each ring, a function that begins to fill
            a ring's slot anew, to call once it was read, and the carry.
          start: the first carry.
          rings: the buffers that tiles go through.
        """
        length = max(ring.slots for ring in rings) + 2
        entries = tuple(self.entry_of(jnp.int32(number)) for number in range(length))
        for ring in rings:
            for number in range(ring.slots):
                ring.fetch(self, jnp.int32(number), entries[number])

        def one(number: jax.Array, carry: PyTree) -> PyTree:
            entries, carry = carry
            _, valid = self.start_and_valid(number, entries[0])
            slots = [lax.rem(number, jnp.int32(ring.slots)) for ring in rings]

            def fetch(ring: TileRing) -> None:
                ring.fetch(self, number + ring.slots, entries[ring.slots])

            carry = step(valid, slots, fetch, carry)
            return (*entries[1:], self.entry_of(number + length)), carry

        return lax.fori_loop(0, self.count, one, (entries, start))[1]


@dataclass(frozen=True)
class TileRing:
    """Buffers in shared memory that the tiles of a list go through.

    Attributes:
      sources: references to [R, S, H, D] or [R, H, S].
      buffers: of each source, [slots, ...].
      barrier: which says that a slot's copies have arrived.
      slots: how many.
    """

    sources: Sequence[Ref]
    buffers: Sequence[Ref]
    barrier: Ref
    slots: int

    def fetch(self, walk: MosaicWalk, number: jax.Array, entry: jax.Array) -> None:
        """Begins to copy a tile into its slot, if the list has it."""
        row, head = walk.own.row, walk.own.head

        @pl.when(number < walk.count)
        def _() -> None:
            slot = lax.rem(number, jnp.int32(self.slots))
            start, _ = walk.start_and_valid(number, entry)
            tokens = pl.ds(start, walk.size)
            for source, buffer in zip(self.sources, self.buffers, strict=True):
                of = (row, head, tokens) if len(source.shape) == 3 else (row, tokens, head)
                plgpu.copy_gmem_to_smem(source.at[of], buffer.at[slot], self.barrier.at[slot])

    def wait(self, slot: jax.Array, valid: jax.Array) -> None:
        """Until a tile is there; of matrices, the tokens that are not valid become zeros.

        What is not valid may be anything, and 0·NaN is NaN.
        """
        plgpu.barrier_wait(self.barrier.at[slot])
        matrices = [buffer.at[slot] for buffer in self.buffers if len(buffer.shape) == 3]
        size = matrices[0].shape[0]

        @pl.when(valid < size)
        def _() -> None:
            for matrix in matrices:
                value = load(matrix, MATRIX)
                row = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=MATRIX)
                matrix[...] = jnp.where(row < valid, value, jnp.zeros_like(value))
            plgpu.commit_smem()


def only_valid_scores(scores: jax.Array, valid: jax.Array) -> jax.Array:
    """[own, listed] with −inf for the listed tokens from the given number on."""

    def hidden(scores: jax.Array) -> jax.Array:
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX)
        return jnp.where(column < valid, scores, -jnp.inf)

    return lax.cond(valid < scores.shape[1], hidden, lambda scores: scores, scores)


def zeros(rows: int, columns: int) -> jax.Array:
    """A matrix in registers, float32."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), MATRIX)


def of_rows(rows: int, value: float) -> jax.Array:
    """A vector in registers with a number for each row of a matrix, float32."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROWS)


def across(vector: jax.Array, matrix: jax.Array) -> jax.Array:
    """A number for each row, in all columns of a matrix."""
    return lax.broadcast_in_dim(vector, matrix.shape, [0])


def down(vector: jax.Array, matrix: jax.Array) -> jax.Array:
    """A number for each column, in all rows of a matrix."""
    return lax.broadcast_in_dim(vector, matrix.shape, [1])
