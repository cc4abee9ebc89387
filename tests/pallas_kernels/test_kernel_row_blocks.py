from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import examples

from pallas_kernels.layernorm_modulate.operands import NormOptions
from pallas_kernels.layernorm_modulate.row_blocks import (
    IMPOSSIBLE,
    PADDING,
    even_row_blocks,
    segment_row_blocks,
)
from pallas_kernels.triton_tiles import split_width

SIZES = st.integers(1, 3000)


def options(layout):
    dtype = jnp.dtype(jnp.float32)
    return NormOptions(layout, 1e-6, dtype, dtype, dtype)


@examples(30)
@given(
    batch=st.integers(1, 9),
    seq_len=st.integers(1, 400),
    programs=SIZES,
    layout=st.sampled_from(["row", "token"]),
)
def test_even_row_blocks_cover_each_row_once(batch, seq_len, programs, layout):
    blocks = even_row_blocks((batch, seq_len, 8), options(layout), programs)
    number = np.arange(blocks.total)
    start, stop, row = (np.asarray(part) for part in blocks.place(number))
    assert start[0] == 0
    assert stop[-1] == batch * seq_len
    np.testing.assert_array_equal(stop[:-1], start[1:])
    assert (stop > start).all()
    assert (stop - start).max() - (stop - start).min() <= 1
    np.testing.assert_array_equal(start // blocks.seq_len, row)
    np.testing.assert_array_equal((stop - 1) // blocks.seq_len, row)
    assert len(number) <= max(programs, batch)


@cache
def compiled(tables, block, programs):
    def flattened(ids):
        row_blocks = segment_row_blocks(ids, tables, block, programs)
        return row_blocks.flattened(ids.shape[1], tables)

    return jax.jit(flattened)


@st.composite
def segments(draw):
    """Rows of runs that begin at multiples of a unit: (ids, table rows, unit)."""
    batch, blocks, unit, tables = draw(
        st.sampled_from([(1, 1, 1, 1), (2, 30, 1, 5), (1, 24, 1, 1), (3, 7, 3, 4), (2, 4, 8, 3)])
    )
    rows = []
    for _ in range(batch):
        left = iter(draw(st.permutations(range(tables))))
        current, row = -1, []
        for _ in range(blocks):
            if draw(st.integers(0, 3)) == 0:
                current = next(left, -1)
            elif draw(st.integers(0, 7)) == 0:
                current = -1
            row += [current] * unit
        rows.append(row)
    return np.array(rows, np.int32), tables, unit


@examples(60)
@given(case=segments(), programs=st.sampled_from([1, 5, 100]), promise=st.booleans())
def test_segment_row_blocks_cover_a_row_and_never_cross(case, programs, promise):
    ids, tables, unit = case
    seq_len = ids.shape[1]
    run = compiled(tables, unit if promise else None, programs)
    row_blocks = [np.asarray(part) for part in run(jnp.asarray(ids))]
    for row, (start, stop, table_row) in enumerate(zip(*row_blocks, strict=True)):
        first = row * seq_len
        np.testing.assert_array_equal(stop[:-1], start[1:])
        assert (start[0], stop[-1]) == (first, first + seq_len)
        assert (stop >= start).all()
        for begin, end, place in zip(start, stop, table_row, strict=True):
            inside = ids[row, begin - first : end - first]
            assert (inside == inside[:1]).all()
            if end > begin:
                assert place == (row * tables + inside[0] if inside[0] >= 0 else PADDING)


def test_more_runs_than_segments_allow_are_impossible():
    ids = jnp.asarray(np.tile([0, 1], 30)[None])
    row_blocks = segment_row_blocks(ids, 2, None, 4)
    assert (np.asarray(row_blocks.table_row) == IMPOSSIBLE).all()


@pytest.mark.parametrize("row", [3, 1000])
def test_segments_beyond_the_table_are_impossible(row):
    row_blocks = segment_row_blocks(jnp.full((1, 8), row), 3, None, 4)
    used = np.asarray(row_blocks.stop > row_blocks.start)
    assert (np.asarray(row_blocks.table_row)[used] == IMPOSSIBLE).all()


@examples(200)
@given(dim=st.integers(1, 20_000), power=st.integers(7, 12))
def test_tiles_cover_the_width(dim, power):
    tiles = split_width(dim, 1 << power)
    offset = 0
    for tile in tiles:
        assert tile.offset == offset
        assert tile.width.bit_count() == 1
        assert tile.width <= 1 << power
        offset += tile.width
        assert tile.ragged == (offset > dim)
    assert 0 <= offset - dim < 128
    assert not any(tile.ragged for tile in tiles[:-1])


@examples(100)
@given(dim=st.integers(1, 20_000), power=st.integers(7, 12))
def test_equal_tiles_cover_the_width(dim, power):
    *whole, last = split_width(dim, 1 << power, equal=True)
    assert [tile.offset for tile in (*whole, last)] == list(range(0, dim, last.width))
    assert {tile.width for tile in whole} <= {last.width}
    assert last.width.bit_count() == 1
    assert last.width <= 1 << power
    assert not any(tile.ragged for tile in whole)
    assert last.ragged == (last.offset + last.width > dim)


@pytest.mark.parametrize("dim", [64, 96, 1152, 1536, 3072, 5120, 8192])
def test_usual_widths_waste_nothing(dim):
    waste = sum(tile.width for tile in split_width(dim, 1024)) - dim
    assert waste == (32 if dim == 96 else 0)
