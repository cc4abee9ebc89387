"""LayerNorm-Modulate of packed rows: a row of scale, shift and gate for each segment."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    BF16,
    F32,
    assert_same_bits,
    cotangents_for,
    examples,
    gradients_of,
    implementation,
    make,
    run_and_check,
    with_gradients,
)

from pallas_kernels import layernorm_modulate, segmentation
from pallas_kernels.layernorm_modulate import row_blocks
from pallas_kernels.layernorm_modulate.operands import NormOptions
from pallas_kernels.layernorm_modulate.row_blocks import (
    IMPOSSIBLE,
    PADDING,
    even_row_blocks,
    segment_row_blocks,
)
from pallas_kernels.triton_tiles import split_width

pytestmark = pytest.mark.usefixtures("few_programs")

LENGTH = 24


@pytest.fixture
def dim(way):
    """A width that the implementation takes; a ragged one where it takes any."""
    return 384 if way == "mosaic" else 40


def runs(*pairs):
    """Ids of a row from (segment, length) pairs."""
    return np.concatenate([np.full(length, segment) for segment, length in pairs])


ROWS = np.stack(
    [
        runs((0, 1), (1, 1), (2, 21), (3, 1)),
        runs((0, 24)),
        runs((0, 5), (-1, 2), (1, 6), (-1, 3), (2, 7), (-1, 1)),
        runs((-1, 4), (0, 20)),
        runs((-1, 24)),
        runs((3, 6), (0, 7), (2, 11)),
        runs((0, 8), (1, 8), (0, 8)),
    ]
)
"""Lengths of one, padding between and first and alone, segments not sorted, few not contiguous."""


AT_8 = np.stack([runs((0, 7), (-1, 1), (1, 8), (4, 1), (-1, 7)), runs((2, 24))])
AT_3 = np.stack([runs((0, 2), (-1, 1), (1, 3), (4, 1), (-1, 17)), runs((2, 24))])
AT_64 = np.stack([runs((1, 6), (-1, 18)), runs((2, 24))])
GATED = {"y_dtype": F32, "gate": True}


@pytest.mark.parametrize(
    ("ids", "table", "fields", "static"),
    [
        (ROWS, (5,), {"x_dtype": BF16}, {}),
        (ROWS, (7, 5), GATED, {}),
        (ROWS, (5,), {"x_dtype": BF16, "y_dtype": BF16}, {"residual_dtype": F32}),
        (AT_3, (2, 5), {}, {"segment_block": 3}),
        (AT_8, (2, 5), GATED, {"segment_block": 8}),
        (AT_64, (2, 5), {}, {"segment_block": 64}),
    ],
)
def test_rows_of_segments(ids, table, fields, static, way, dim):
    operands = make((*ids.shape, dim), (*table, dim), ids=ids, **fields)
    (h, out), gradients = run_and_check(operands, way, **static)
    for value in (h, out, gradients[0], gradients[3]):
        assert value is None or not np.asarray(value)[ids < 0].any()


@pytest.mark.parametrize(("residual", "block"), [(True, None), (False, 8)])
def test_nothing_leaks_from_padding(residual, block, way, dim):
    ids = runs((0, 6), (-1, 2), (1, 8), (-1, 8))
    operands = make((24, dim), (2, dim), ids=ids, **GATED if residual else {})

    def spoiled(value):
        return None if value is None else jnp.where(jnp.asarray(ids < 0)[:, None], jnp.nan, value)

    dirty = operands._replace(x=spoiled(operands.x), y=spoiled(operands.y))
    cotangents = cotangents_for(operands)
    both = gradients_of(way, segment_block=block)
    clean = both(operands, cotangents)
    assert_same_bits(clean, both(dirty, tuple(spoiled(value) for value in cotangents)))
    assert all(np.isfinite(np.asarray(value)).all() for value in jax.tree.leaves(clean))


def test_segments_beyond_the_table_are_nan(way, dim):
    ids = runs((0, 8), (3, 8), (1, 8))
    operands = make((24, dim), (3, dim), ids=ids, **GATED)
    for result in jax.jit(implementation(way))(operands):
        np.testing.assert_array_equal(np.isnan(np.asarray(result)).all(-1), ids == 3)


def test_more_runs_than_row_blocks_are_nan(interpret):
    operands = make((24, 40), (2, 40), ids=np.tile([0, 1], 12))
    if not interpret:
        # A GPU runs a program for each of so few rows, which serves any order of segments.
        run_and_check(operands, interpret)
        return
    (_, out), gradients = gradients_of(interpret)(operands, cotangents_for(operands))
    assert np.isnan(out).all()
    assert np.isnan(gradients[0]).all()


def test_prepared_segments_give_the_same_bits_and_are_not_prepared_again(way, dim, monkeypatch):
    ids = jnp.asarray(ROWS[[2, 5]], jnp.int32)
    operands = make((2, LENGTH, dim), (2, 5, dim), ids=ids, **GATED)
    ready = jax.jit(segmentation, static_argnums=(1, 2))(ids, 5, dim)
    cotangents = cotangents_for(operands)
    expected = gradients_of(way)(operands, cotangents)
    monkeypatch.delattr(row_blocks, "segment_row_blocks")
    found = with_gradients(implementation(way, segment_ids=ready))(operands, cotangents)
    assert_same_bits(found, expected)
    x, table, shift = operands[:3]
    with pytest.raises(ValueError, match="prepared for tables of 5 rows, and scale has 4"):
        layernorm_modulate(x, table[:, :4], shift, segment_ids=ready)
    with pytest.raises(ValueError, match="take no segment_block"):
        layernorm_modulate(x, table, shift, segment_ids=ready, segment_block=8)


# ---------------------------------------------------------------- row blocks and tiles


@examples(30)
@given(
    batch=st.integers(1, 9),
    seq_len=st.integers(1, 400),
    programs=st.integers(1, 3000),
    layout=st.sampled_from(["row", "token"]),
)
def test_even_row_blocks_cover_each_row_once(batch, seq_len, programs, layout):
    options = NormOptions(layout, 1e-6, *(jnp.dtype(F32),) * 3)
    blocks = even_row_blocks((batch, seq_len, 8), options, programs)
    number = np.arange(4000)  # of one size, for which JAX compiles once
    start, stop, row = (np.asarray(part)[: blocks.total] for part in blocks.place(number))
    assert start[0] == 0
    assert stop[-1] == batch * seq_len
    np.testing.assert_array_equal(stop[:-1], start[1:])
    assert (stop > start).all()
    assert (stop - start).max() - (stop - start).min() <= 1
    np.testing.assert_array_equal(start // blocks.seq_len, row)
    np.testing.assert_array_equal((stop - 1) // blocks.seq_len, row)
    tokens, rows = batch * seq_len, 1 if layout == "token" else batch
    assert blocks.total == max(rows, min(tokens, programs // rows * rows))


@cache
def compiled(tables, block, programs):
    def flattened(ids):
        blocks = segment_row_blocks(ids, tables, block, programs)
        return blocks.flattened(ids.shape[1], tables)

    return jax.jit(flattened)


@st.composite
def segments(draw):
    """Rows of runs that begin at multiples of a unit: (ids, table rows, unit or None, programs)."""
    batch, blocks, unit, tables, programs = draw(
        st.sampled_from([(1, 1, 1, 1, 1), (2, 30, 1, 5, 5), (3, 7, 3, 4, 5), (2, 4, 8, 3, 10)])
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
    return np.array(rows, np.int32), tables, unit if unit > 1 else None, programs


@examples(40)
@given(case=segments())
def test_segment_row_blocks_cover_a_row_and_never_cross(case):
    ids, tables, unit, programs = case
    seq_len = ids.shape[1]
    blocks = [np.asarray(part) for part in compiled(tables, unit, programs)(jnp.asarray(ids))]
    block = -(-seq_len // max(1, min(seq_len, programs // len(ids))))
    more = 0 if unit and unit >= block else 2 * tables + 1
    assert blocks[0].shape[1] <= -(-seq_len // block) + more
    for row, (start, stop, table_row) in enumerate(zip(*blocks, strict=True)):
        first = row * seq_len
        np.testing.assert_array_equal(stop[:-1], start[1:])
        assert (start[0], stop[-1]) == (first, first + seq_len)
        assert (stop >= start).all()
        for begin, end, place in zip(start, stop, table_row, strict=True):
            inside = ids[row, begin - first : end - first]
            assert (inside == inside[:1]).all()
            if end > begin:
                assert place == (row * tables + inside[0] if inside[0] >= 0 else PADDING)


def test_blocks_of_a_promised_size_are_halved_down_to_those_of_programs():
    assert compiled(1, 8, 8)(jnp.zeros((1, 32), jnp.int32)).start.shape == (1, 8)


def test_what_no_table_row_can_serve_is_impossible():
    too_many = compiled(2, None, 4)(jnp.asarray(np.tile([0, 1], 30)[None]))
    assert (np.asarray(too_many.table_row) == IMPOSSIBLE).all()
    for segment in (3, 1000):
        beyond = compiled(3, None, 4)(jnp.full((1, 8), segment))
        used = np.asarray(beyond.stop > beyond.start)
        assert (np.asarray(beyond.table_row)[used] == IMPOSSIBLE).all()


@examples(80)
@given(width=st.integers(1, 20_000), power=st.integers(7, 12), equal=st.booleans())
def test_tiles_cover_the_width(width, power, equal):
    tiles = split_width(width, 1 << power, equal=equal)
    offset = 0
    for tile in tiles:
        assert tile.offset == offset
        assert tile.width.bit_count() == 1
        assert tile.width <= 1 << power
        offset += tile.width
        assert tile.ragged == (offset > width)
    assert 0 <= offset - width < (tiles[-1].width if equal else 128)
    assert not any(tile.ragged for tile in tiles[:-1])
    assert not equal or len({tile.width for tile in tiles}) == 1


def test_usual_widths_waste_nothing():
    for width in (64, 96, 128, 1152, 1536, 3072, 5120, 8192):
        waste = sum(tile.width for tile in split_width(width, 1024)) - width
        assert waste == (32 if width == 96 else 0)
