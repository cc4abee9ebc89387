import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from kernel_cases import (
    BF16,
    F32,
    assert_same_bits,
    check,
    cotangents_for,
    examples,
    gradients_of,
    implementation,
    layouts,
    make,
    run_and_check,
    with_gradients,
)

from pallas_kernels import layernorm_modulate, segmentation

pytestmark = pytest.mark.usefixtures("few_programs")

DIM, LENGTH = 40, 24


def runs(*pairs):
    """Ids of a row from (segment, length) pairs."""
    return np.concatenate([np.full(length, segment) for segment, length in pairs])


ROWS = {
    "length one": runs((0, 1), (1, 1), (2, 21), (3, 1)),
    "one segment": runs((0, 24)),
    "inside a block": runs((0, 5), (1, 6), (2, 13)),
    "padding between": runs((0, 5), (-1, 2), (1, 6), (-1, 3), (2, 7), (-1, 1)),
    "padding first": runs((-1, 4), (0, 20)),
    "all padding": runs((-1, 24)),
    "not sorted": runs((3, 6), (0, 7), (2, 11)),
    "unused rows": runs((4, 24)),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("residual", [False, True])
def test_a_row_of_segments(row, residual, interpret):
    operands = make(
        (LENGTH, DIM), (5, DIM), ids=ROWS[row], y_dtype=F32 if residual else None, gate=residual
    )
    (h, out), gradients = run_and_check(operands, interpret)
    padding = ROWS[row] < 0
    for value in (h, out, gradients[0], gradients[3]):
        assert value is None or not np.asarray(value)[padding].any()


SHARED, OWN = (5, DIM), (2, 5, DIM)


@pytest.mark.parametrize(
    ("branch", "dtype", "table"),
    [
        *(("none", F32, OWN), ("plain", F32, SHARED), ("gated", F32, OWN)),
        *(("none", BF16, SHARED), ("plain", BF16, OWN), ("gated", BF16, SHARED)),
    ],
)
def test_rows_of_a_batch(table, dtype, branch, interpret):
    ids = np.stack([ROWS["padding between"], ROWS["not sorted"]])
    y_dtype = None if branch == "none" else dtype
    gated = branch == "gated"
    operands = make((2, LENGTH, DIM), table, x_dtype=dtype, ids=ids, y_dtype=y_dtype, gate=gated)
    run_and_check(operands, interpret, **({} if branch == "none" else {"residual_dtype": F32}))


@pytest.mark.parametrize(("block", "residual"), [(2, False), (8, True), (12, False), (12, True)])
def test_segments_that_begin_at_blocks(block, residual, interpret):
    tail = runs((0, block - 1), (-1, 1), (1, block), (4, 1))
    ids = np.concatenate([tail, np.full(3 * block - tail.size, -1)])
    ids = np.stack([ids, runs((2, 3 * block))])
    operands = make(
        (2, 3 * block, DIM), (2, 5, DIM), ids=ids, y_dtype=F32 if residual else None, gate=residual
    )
    run_and_check(operands, interpret, segment_block=block)


def test_a_block_longer_than_the_row(interpret):
    operands = make((7, DIM), (2, DIM), ids=runs((1, 6), (-1, 1)))
    run_and_check(operands, interpret, segment_block=64)


@examples(25)
@given(ids=layouts(3, LENGTH, 6))
def check_layouts(interpret, ids):
    operands = make((3, LENGTH, 32), (3, 6, 32), ids=ids, y_dtype=F32, gate=True)
    cotangents = cotangents_for(operands)
    outputs, gradients = gradients_of(interpret)(operands, cotangents)
    check(operands, outputs, gradients, cotangents)


def test_random_layouts(interpret):
    check_layouts(interpret)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("block", [None, 8])
def test_nothing_leaks_from_padding(residual, block, interpret):
    ids = runs((0, 6), (-1, 2), (1, 8), (-1, 8))
    branch = F32 if residual else None
    operands = make((24, DIM), (2, DIM), ids=ids, y_dtype=branch, gate=residual)
    padding = jnp.asarray(ids < 0)[:, None]

    def spoiled(value):
        return None if value is None else jnp.where(padding, jnp.nan, value)

    dirty = operands._replace(x=spoiled(operands.x), y=spoiled(operands.y))
    cotangents = cotangents_for(operands)
    both = gradients_of(interpret, segment_block=block)
    clean = both(operands, cotangents)
    assert_same_bits(clean, both(dirty, tuple(spoiled(value) for value in cotangents)))
    assert all(
        np.isfinite(np.asarray(value)).all()
        for value in [*clean[0], *clean[1]]
        if value is not None
    )


def test_sums_do_not_cross_segments(interpret):
    ids = runs((0, 7), (2, 6), (1, 11))
    operands = make((24, DIM), (3, DIM), ids=ids, y_dtype=F32, gate=True)
    cotangents = cotangents_for(operands)
    both = gradients_of(interpret)
    clean, dirty = (
        both(these, cotangents)[1]
        for these in (operands, operands._replace(x=operands.x.at[8].set(jnp.nan)))
    )
    for name in (1, 2, 4):
        kept = jnp.array([0, 1])
        assert_same_bits(clean[name][kept], dirty[name][kept])
    assert np.isnan(dirty[1][2]).all()
    assert np.isnan(dirty[4][2]).all()


@pytest.mark.parametrize("residual", [False, True])
def test_segments_beyond_the_table_are_nan(residual, interpret):
    ids = runs((0, 8), (3, 8), (1, 8))
    operands = make((24, DIM), (3, DIM), ids=ids, y_dtype=F32 if residual else None)
    for run in (implementation(interpret), implementation("xla")):
        _, out = run(operands)
        wrong = np.isnan(np.asarray(out)).all(-1)
        np.testing.assert_array_equal(wrong, ids == 3)


def test_more_runs_than_row_blocks_are_nan(interpret):
    ids = np.tile([0, 1], 12)
    operands = make((24, DIM), (2, DIM), ids=ids)
    if not interpret:
        # A GPU runs a program for each of so few rows, which serves any order of segments.
        run_and_check(operands, interpret)
        return
    both = gradients_of(interpret)
    (_, out), gradients = both(operands, cotangents_for(operands))
    assert np.isnan(out).all()
    assert np.isnan(gradients[0]).all()


def test_few_runs_that_are_not_contiguous_are_right(interpret):
    run_and_check(make((24, DIM), (2, DIM), ids=runs((0, 8), (1, 8), (0, 8))), interpret)


@pytest.mark.parametrize("residual", [False, True])
def test_prepared_segments_give_the_same_bits(residual, interpret):
    ids = jnp.asarray([ROWS["padding between"], ROWS["not sorted"]], jnp.int32)
    y_dtype = F32 if residual else None
    operands = make((2, LENGTH, DIM), (2, 5, DIM), ids=ids, y_dtype=y_dtype, gate=residual)
    prepared = jax.jit(segmentation, static_argnums=(1, 2))(ids, 5, DIM)
    cotangents = cotangents_for(operands)
    found = with_gradients(implementation(interpret, segment_ids=prepared))(operands, cotangents)
    assert_same_bits(found, gradients_of(interpret)(operands, cotangents))


def test_segments_prepared_for_other_tables_are_refused():
    ids = jnp.asarray([ROWS["not sorted"]], jnp.int32)
    x, table = jnp.zeros((1, LENGTH, DIM)), jnp.zeros((1, 5, DIM))
    with pytest.raises(ValueError, match="prepared for tables of 4 rows, and scale has 5"):
        layernorm_modulate(x, table, table, segment_ids=segmentation(ids, 4, DIM))
    ready = segmentation(ids, 5, DIM)
    with pytest.raises(ValueError, match="take no segment_block"):
        layernorm_modulate(x, table, table, segment_ids=ready, segment_block=8)
    plain = layernorm_modulate(x, table, table, segment_ids=ids)
    assert_same_bits(layernorm_modulate(x, table, table, segment_ids=ready), plain)
