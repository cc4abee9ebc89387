"""The backward through Mosaic GPU, which only a Hopper GPU runs."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_cases import (
    BF16,
    EPS,
    F16,
    F32,
    assert_same_bits,
    both_lowered_for_cuda,
    check,
    cotangents_for,
    examples,
    layouts,
    make,
    public,
    shapes_of,
    with_gradients,
)

from pallas_kernels import devices, layernorm_modulate, segmentation
from pallas_kernels.layernorm_modulate import implementations
from pallas_kernels.layernorm_modulate.implementations import MosaicNorm
from pallas_kernels.layernorm_modulate.mosaic import columns_of
from pallas_kernels.layernorm_modulate.operands import NormOptions
from pallas_kernels.layernorm_modulate.row_blocks import walks_of
from pallas_kernels.layernorm_modulate.tuning import LANES, faster_than_triton
from pallas_kernels.op import Call

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASE = ("function", "rows", "dim", "implementation")


@pytest.fixture
def on_hopper():
    if reason := devices.unsupported_mosaic_device():
        pytest.skip(str(reason))


@pytest.fixture
def three_programs(monkeypatch):
    """So that each walks through many rows and segments."""
    monkeypatch.setattr(devices, "core_count", lambda: 3)


def run(operands, cotangents, **static):
    """Outputs and gradients of the kernels."""
    both = with_gradients(lambda each: public(each, implementation="mosaic", **static))
    return both(operands, cotangents)


def run_and_check(operands, **static):
    cotangents = cotangents_for(operands, static.get("residual_dtype"))
    found = run(operands, cotangents, **static)
    check(operands, *found, cotangents)
    return found


# ---------------------------------------------------------------- on a GPU

DTYPES = ((BF16, BF16), (F32, BF16), (F32, F32), (F16, F16))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("branch", ["none", "returned", "plain", "gated"])
@pytest.mark.parametrize(
    ("dim", "x_dtype", "y_dtype"),
    [
        *((dim, *dtypes) for dim in (128, 640, 1152) for dtypes in DTYPES),
        *((dim, BF16, BF16) for dim in (2304, 5120, 9216)),
        (2304, BF16, F16),
    ],
)
def test_equals_the_float64_oracle(dim, x_dtype, y_dtype, branch):
    residual = branch in ("plain", "gated")
    operands = make(
        *((2, 45, dim), (2, dim)),
        x_dtype=x_dtype,
        y_dtype=y_dtype if residual else None,
        gate=branch == "gated",
    )
    if branch != "returned":
        run_and_check(operands)
        return
    cotangents = (cotangents_for(operands)[1], cotangents_for(operands, seed=1)[1])
    found = run(operands, cotangents, returns_x=True)
    (h, out), gradients = found
    assert_same_bits(h, operands.x)
    check(operands, (None, out), gradients, cotangents)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "three_programs")
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("dim", [256, 5248, 7296, 8192, 8576, 10_240])
def test_wide_rows_and_any_number_of_them(dim, tokens):
    run_and_check(make((1, tokens, dim), x_dtype=BF16, y_dtype=BF16, gate=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("size", [3.0, 300.0, 30_001.0])
def test_constant_rows_have_no_normed_part(size):
    operands = make((1, 45, 1152), y_dtype=F32, gate=True)
    operands = operands._replace(x=jnp.full_like(operands.x, size), y=jnp.zeros_like(operands.y))
    _, gradients = run(operands, cotangents_for(operands))
    assert not np.asarray(gradients[1]).any()


LENGTH = 40


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "three_programs")
@pytest.mark.parametrize("gated", [False, True])
def test_segments(gated):
    both = with_gradients(lambda each: public(each, implementation="mosaic"))

    @examples(25)
    @given(ids=layouts(2, LENGTH, 8))
    def check_layouts(ids):
        y_dtype = BF16 if gated else None
        operands = make((2, LENGTH, 384), (2, 8, 384), ids=ids, x_dtype=BF16, y_dtype=y_dtype)
        operands = operands._replace(gate=operands.shift if gated else None)
        cotangents = cotangents_for(operands)
        found = both(operands, cotangents)
        check(operands, *found, cotangents)
        prepared = segmentation(operands.segment_ids, 8, 384)
        assert_same_bits(found, run(operands, cotangents, segment_ids=prepared))

    check_layouts()


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper", "three_programs")
def test_nothing_leaks_from_padding():
    ids = np.repeat([0, -1, 1, -1], [9, 5, 16, 10])
    operands = make((LENGTH, 384), (2, 384), ids=ids, x_dtype=BF16, y_dtype=BF16, gate=True)
    padding = jnp.asarray(ids < 0)[:, None]

    def spoiled(value):
        return jnp.where(padding, jnp.nan, value)

    dirty = operands._replace(x=spoiled(operands.x), y=spoiled(operands.y))
    cotangents = cotangents_for(operands)
    found = run(dirty, tuple(spoiled(value) for value in cotangents))
    assert_same_bits(found, run(operands, cotangents))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("segment", [False, True])
def test_equal_inputs_give_equal_bits(segment):
    ids = jnp.arange(4096)[None] // 300 if segment else None
    table = (1, 14, 6272) if segment else (1, 6272)
    operands = make((1, 4096, 6272), table, ids=ids, x_dtype=BF16, y_dtype=BF16, gate=True)
    cotangents = cotangents_for(operands)
    first = run(operands, cotangents)
    for _ in range(3):
        assert_same_bits(first, run(operands, cotangents))


# ---------------------------------------------------------------- without one


def taken(operands, monkeypatch, **static):
    """Whether the lowered forward and backward hold the kernel."""
    monkeypatch.setattr(devices, "core_count", lambda: 132)
    return "mosaic_gpu" in both_lowered_for_cuda(operands, MosaicNorm, **static)


@pytest.mark.parametrize("layout", ["row", "segment"])
@pytest.mark.parametrize("residual", [False, True])
def test_wide_rows_lower_for_cuda(layout, residual, monkeypatch):
    assert taken(shapes_of((2, 512, 7296), layout, residual), monkeypatch)


@pytest.mark.parametrize("width", [1500, 5120, 10_368])
def test_segments_prepared_for_another_width_lower_for_cuda(width, monkeypatch):
    monkeypatch.setattr(devices, "core_count", lambda: 132)
    shapes = shapes_of((2, 512, 1536), "segment", residual=False)
    prepare = MosaicNorm().prepare_segments
    prepared = jax.eval_shape(lambda ids: prepare(ids, 64, width, None), shapes.segment_ids)
    assert taken(shapes._replace(prepared=prepared), monkeypatch)


@pytest.mark.parametrize(
    ("shapes", "static"),
    [
        (shapes_of((2, 512, 7296), "token"), {}),
        (shapes_of((2, 512, 7300)), {}),
        (shapes_of((2, 512, 10_368)), {}),
        (shapes_of((2, 512, 7296)), {"residual_dtype": F32}),
        (shapes_of((2, 512, 7040), dtype=F32), {}),
    ],
)
def test_what_it_does_not_take_runs_through_triton(shapes, static, monkeypatch):
    assert not taken(shapes, monkeypatch, **static)


def test_the_widest_rows_of_float32_lower_for_cuda(monkeypatch):
    assert taken(shapes_of((2, 512, 6912), dtype=F32), monkeypatch)


@examples(200)
@given(chunks=st.integers(1, 100), groups=st.sampled_from([1, 2, 4]))
def test_columns_are_counted_once_and_all_groups_have_equally_many(chunks, groups):
    each = -(-chunks // groups)
    assume((groups - 1) * each <= chunks)  # else a group would have another's columns alone
    counted = np.zeros(chunks, int)
    for group in range(groups):
        columns = columns_of(chunks * LANES, groups, group)
        first = int(columns.first)
        assert [piece.at for piece in columns.pieces] == list(
            itertools.accumulate((piece.chunks for piece in columns.pieces[:-1]), initial=0)
        )
        assert sum(piece.chunks for piece in columns.pieces) == columns.chunks == each
        for piece in columns.pieces:
            if piece.counts is None or piece.counts:
                counted[first + piece.at : first + piece.at + piece.chunks] += 1
    np.testing.assert_array_equal(counted, 1)


@examples(60)
@given(ids=layouts(2, LENGTH, 8), programs=st.integers(1, 90), block=st.sampled_from([None, 4]))
def test_programs_walk_through_each_token_once(ids, programs, block):
    if block:
        ids = np.repeat(ids[:, : LENGTH // block], block, axis=1)
    walks = walks_of(jnp.asarray(ids), 8, block, programs).flattened(LENGTH, 8)
    first, end = (np.asarray(part).ravel() for part in (walks.first, walks.end))
    start, stop = (np.asarray(part).ravel() for part in walks.row_blocks[:2])
    table_row = np.asarray(walks.row_blocks.table_row).ravel()
    expected = np.where(ids < 0, -1, ids + np.arange(2)[:, None] * 8).ravel()
    place = 0
    lengths = []
    for one, other in zip(first, end, strict=True):
        before = place
        for number in range(one, other):
            assert start[number] == place
            assert (expected[place : stop[number]] == table_row[number]).all()
            place = stop[number]
        lengths.append(place - before)
    assert place == ids.size
    # Where segments begin at blocks, a program may have a block more.
    assert max(lengths) <= -(-LENGTH // max(1, min(LENGTH, programs // 2))) + (block or 0)


HOPPER = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def chosen(kind, layout, norm, dim, dtype, monkeypatch):
    """The implementation that "auto" takes."""
    monkeypatch.setattr(devices, "unsupported_mosaic_device", lambda: None)
    monkeypatch.setattr(devices, "unsupported_triton_device", lambda: None)
    monkeypatch.setattr(devices, "device_kind", lambda: kind)
    shapes = shapes_of((1, 65_536, dim), layout, norm == "gated", dtype)
    if norm == "sum":
        shapes = shapes._replace(y=shapes.x)
    h = {"plain": None, "returned": "x"}.get(norm, "sum")
    dtype = jnp.dtype(dtype)
    config = Call(NormOptions(layout, EPS, dtype, dtype, dtype, h), None)
    return implementations.REGISTRY.choose("test", "auto", shapes, config).name


@pytest.mark.parametrize("kind", HOPPER)
@pytest.mark.parametrize(
    ("layout", "norm", "dim", "name"),
    [
        ("row", "gated", 7296, "mosaic"),
        ("row", "gated", 1536, "triton"),
        ("row", "sum", 5120, "mosaic"),
        ("row", "sum", 2048, "triton"),
        ("row", "returned", 5120, "mosaic"),
        ("row", "returned", 1536, "triton"),
        ("row", "plain", 5120, "mosaic"),
        ("row", "plain", 1536, "triton"),
        ("row", "plain", 2304, "mosaic"),
        ("row", "plain", 3072, "triton"),
        ("row", "plain", 7296, "triton"),
        ("segment", "gated", 1152, "mosaic"),
        ("segment", "gated", 1500, "triton"),
        ("segment", "sum", 1536, "mosaic"),
        ("segment", "plain", 1536, "triton"),
        ("segment", "plain", 2048, "mosaic"),
        ("token", "gated", 5120, "triton"),
    ],
)
def test_auto_takes_it_where_it_was_faster(kind, layout, norm, dim, name, monkeypatch):
    assert chosen(kind, layout, norm, dim, BF16, monkeypatch) == name


@pytest.mark.parametrize("norm", ["gated", "sum", "returned", "plain"])
def test_auto_leaves_float32_to_the_others(norm, monkeypatch):
    assert chosen(HOPPER[0], "row", norm, 5120, F32, monkeypatch) == "triton"


@pytest.mark.parametrize("device", ["h200", "h100"])
def test_auto_loses_at_most_a_tenth_where_both_were_measured(device):
    content = json.loads((RESULTS / f"wide_rows_{device}.json").read_text())
    found = {tuple(each[name] for name in CASE): each["of_copy"] for each in content["cases"]}
    both = [case[:3] for case in found if case[3] == "mosaic"]
    assert len(both) > 100
    for norm, rows, dim in both:
        layout = "segment" if rows == "segments" else "row"
        names = ["mosaic", "triton"]
        if not faster_than_triton(layout, norm, dim):
            names.reverse()
        taken, other = (found[norm, rows, dim, name] for name in names)
        assert taken >= 0.9 * other, (norm, rows, dim)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
def test_it_needs_a_gpu_and_says_so():
    x, row = jnp.ones((2, 3, 128)), jnp.ones((2, 128))
    with pytest.raises(NotImplementedError, match="'mosaic' cannot run, the backend is 'cpu'"):
        layernorm_modulate(x, row, row, implementation="mosaic")
