"""Implementations of LayerNorm-Modulate, and how kernels divide rows into blocks and tiles."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kernel_cases import BF16, EPS, F16, F32, LAYOUTS, implementation

from pallas_kernels import devices, layernorm_modulate, residual_layernorm_modulate, segmentation
from pallas_kernels.layernorm_modulate import (
    FusedImplementation,
    implementation_names,
    implementations,
    register_implementation,
    row_blocks,
    tuning,
    unregister_implementation,
)
from pallas_kernels.layernorm_modulate.implementations import MosaicNorm
from pallas_kernels.layernorm_modulate.operands import NormOperands, NormOptions, reference
from pallas_kernels.mosaic_rows import columns_of
from pallas_kernels.op import Call
from pallas_kernels.triton_tiles import split_width
from pallas_kernels.walks import LANES


class Mine(FusedImplementation):
    """Without residual sums; faster where the width is 40; notes the shapes that it is given."""

    name = "mine"

    def __init__(self):
        self.seen = []

    def unsupported_reason(self, operands, config):
        if operands.y is not None:
            return NotImplementedError("it adds no residual; use 'xla'")
        return super().unsupported_reason(operands, config)

    def faster_than_reference(self, operands, config):
        return operands.x.shape[-1] == 40

    def prepare_segments(self, segment_ids, table_rows, width, sharding):
        return {"padding": segment_ids < 0}

    def forward(self, operands, options, *, statistics):
        self.seen.append(("forward", operands.x.shape))
        if operands.prepared is not None:
            self.seen.append(("prepared", operands.prepared["padding"].shape))
        kept = operands.x[..., :3].astype(jnp.float32) if statistics else None
        _, out = reference(operands, options)
        return None, out, kept

    def backward(self, residuals, dh, dout, options):
        self.seen.append(("backward", residuals.h.shape))
        assert (dh, residuals.statistics.shape[-1]) == (None, 3)

        def run(*given):
            return reference(NormOperands(*given, segment_ids=residuals.segment_ids), options)[1]

        wide = residuals.scale.astype(jnp.float32)
        dx, *tables = jax.vjp(run, residuals.h, wide, jnp.zeros_like(wide))[1](dout)
        return dx, None, tables if options.layout == "token" else jnp.stack(tables)


@pytest.fixture
def mine():
    implementation = Mine()
    register_implementation(implementation)
    yield implementation
    unregister_implementation("mine")


@pytest.mark.parametrize(
    ("name", "layout"), [("mine", "row"), ("auto", "token"), ("mine", "segment")]
)
def test_an_implementation_from_outside_runs_forward_and_backward(name, layout, mine):
    operands = cases.make(**LAYOUTS[layout])
    cotangents = cases.cotangents_for(operands)
    found = cases.with_gradients(implementation(name))(operands, cotangents)
    assert mine.seen == [("forward", (2, 16, 40)), ("backward", (2, 16, 40))]
    cases.close(found, cases.gradients_of("xla")(operands, cotangents), rtol=1e-5)


def test_it_gets_what_it_prepared_of_the_segments(mine):
    x, scale, shift, *_, ids, _ = cases.make(**LAYOUTS["segment"])
    prepared = segmentation(ids, 4, 40)
    unregister_implementation("mine")
    without = segmentation(ids, 4, 40)
    register_implementation(mine)
    expected = layernorm_modulate(x, scale, shift, segment_ids=ids)
    for each, seen in ((prepared, True), (without, False)):
        mine.seen.clear()
        found = layernorm_modulate(x, scale, shift, segment_ids=each, implementation="mine")
        assert (("prepared", (2, 16)) in mine.seen) == seen
        cases.close(found, expected, rtol=1e-5)


def test_auto_takes_it_only_where_it_is_faster_and_can_run(mine):
    layernorm_modulate(*cases.make((2, 16, 32))[:3])
    x, scale, shift, *_ = cases.make(**LAYOUTS["row"])
    residual_layernorm_modulate(x, x, None, scale, shift)
    assert mine.seen == []
    layernorm_modulate(x, scale, shift)
    assert mine.seen == [("forward", (2, 16, 40))]
    with pytest.raises(NotImplementedError, match=r"^residual.*: 'mine' cannot run, it adds no"):
        residual_layernorm_modulate(x, x, None, scale, shift, implementation="mine")
    for name in ("xla", "mine"):
        with pytest.raises(ValueError, match=f"layernorm_modulate: '{name}' has nothing to interp"):
            layernorm_modulate(x, scale, shift, implementation=name, interpret=True)


def test_names_are_listed_and_taken_once(mine):
    assert implementation_names() == ("auto", "triton", "mosaic", "mine", "xla")
    for name in ("mine", "xla", "auto"):
        other = Mine()
        other.name = name
        with pytest.raises(ValueError, match=f"'{name}' is taken"):
            register_implementation(other)


def test_auto_is_interpreted_as_the_kernels():
    operands = cases.make(**LAYOUTS["row"])
    cotangents = cases.cotangents_for(operands)
    auto = cases.with_gradients(partial(cases.public, interpret=True))(operands, cotangents)
    cases.assert_same_bits(auto, cases.gradients_of(True)(operands, cotangents))


# ---------------------------------------------------------------- Mosaic


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("branch", ["none", "plain", "gated"])
@pytest.mark.parametrize(
    ("tokens", "dim", "x_dtype", "y_dtype"),
    [
        *((45, dim, BF16, y) for dim in (128, 640, 1152, 2304, 5120, 9216) for y in (BF16, F16)),
        *((45, dim, F32, y) for dim in (128, 640, 1152) for y in (BF16, F32)),
        *((tokens, 7296, BF16, BF16) for tokens in (1, 2, 3, 4, 7, 64)),
        *((7, dim, BF16, BF16) for dim in (256, 5248, 8192, 8576, 10_240)),
    ],
)
def test_it_equals_the_float64_oracle_and_gives_equal_bits(tokens, dim, x_dtype, y_dtype, branch):
    given = {"none": {}, "plain": {"y_dtype": y_dtype}, "gated": {"y_dtype": y_dtype, "gate": True}}
    operands = cases.make((2, tokens, dim), x_dtype=x_dtype, **given[branch])
    found = cases.run_and_check(operands, "mosaic")
    for _ in range(3):
        cases.assert_same_bits(found, cases.run_and_check(operands, "mosaic"))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dim", [1536, 2304, 5120, 10_240])
def test_rows_of_segments_and_padding_equal_the_oracle_and_give_equal_bits(dim, gated):
    lengths = (31, 1, 2, 7, 40, 3, 64, 5, 1, 46)
    ids = np.repeat([0, -1, 1, -1, 2, 3, -1, 5, -1, 4], lengths)
    given = {"y_dtype": BF16, "gate": True} if gated else {}
    operands = cases.make((ids.size, dim), (6, dim), ids=ids, x_dtype=BF16, **given)
    found = cases.run_and_check(operands, "mosaic")
    for _ in range(3):
        cases.assert_same_bits(found, cases.run_and_check(operands, "mosaic"))


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
def test_its_backward_follows_the_forward_of_triton(monkeypatch):
    monkeypatch.setattr(devices, "lowers_triton", lambda: True)
    cases.run_and_check(cases.make((2, 46, 2304), x_dtype=BF16, y_dtype=BF16, gate=True), "mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("size", [3.0, 300.0, 30_001.0])
def test_constant_rows_have_no_normed_part(size):
    operands = cases.make((1, 45, 1152), y_dtype=F32, gate=True)
    operands = operands._replace(x=jnp.full_like(operands.x, size), y=jnp.zeros_like(operands.y))
    _, gradients = cases.gradients_of("mosaic")(operands, cases.cotangents_for(operands))
    assert not np.asarray(gradients[1]).any()


@pytest.mark.parametrize(
    ("shapes", "static", "taken"),
    [
        (cases.shapes_of((2, 512, 7296)), {}, True),
        (cases.shapes_of((2, 512, 10_240), residual=False), {}, True),
        (cases.shapes_of((2, 512, 10_368), residual=False), {}, False),
        (cases.shapes_of((2, 512, 6912), dtype=F32), {}, True),
        (cases.shapes_of((2, 512, 7040), dtype=F32), {}, False),
        (cases.shapes_of((2, 512, 7300)), {}, False),
        (cases.shapes_of((2, 512, 7296), "token"), {}, False),
        (cases.shapes_of((2, 512, 7296)), {"residual_dtype": F32}, False),
    ],
)
def test_it_takes_wide_rows_and_leaves_others_to_triton(shapes, static, taken):
    module = cases.both_lowered_for_cuda(shapes, MosaicNorm, **static)
    assert ("layernorm_modulate_mosaic_backward" in module) == taken


def test_what_other_segments_sum_up_to_is_not_added(monkeypatch):
    """Where partial rows are added up without Triton; NaN must stay where it is."""
    monkeypatch.setattr(devices, "lowers_triton", lambda: False)
    ids = jnp.asarray([[0, 0, 1, -1, 2, 2], [2, 0, 0, 1, 1, 1]])
    walks = row_blocks.walks_of(ids, 3, 8).flattened(6, 3)
    parts = np.random.default_rng(0).normal(size=(2 * walks.total, 8)).astype(F32)
    table_row = np.asarray(walks.row_blocks.table_row).ravel()
    parts[:, 0] = np.where(np.tile(table_row, 2) == 4, np.nan, parts[:, 0])
    options = NormOptions("segment", EPS, *(jnp.dtype(F32),) * 3)
    found = row_blocks.table_sums(jnp.asarray(parts), walks, (2, 3, 8), options, "")
    own = table_row[:, None] == np.arange(6)
    expected = np.stack(
        [part[own[:, m]].sum(axis=0) for part in np.split(parts, 2) for m in range(6)]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.isnan(found).sum() == 2


@pytest.mark.parametrize("kernel", tuning.KINDS)
def test_walks_of_a_multiprocessor_fit_into_a_program(kernel):
    for dim, itemsize in itertools.product(range(128, 10_241, 128), (2, 4)):
        way = tuning.way_for(kernel, dim, itemsize * tuning.KINDS[kernel].streams)
        if way is not None:
            together = way.groups * way.per_core
            assert together <= 8
            assert together * way.slots <= 32


@pytest.mark.parametrize("width", [1500, 5120])
def test_it_lowers_with_segments_that_were_prepared_for_another_width(width):
    shapes = cases.shapes_of((2, 512, 1536), "segment", residual=False)
    prepare = partial(MosaicNorm().prepare_segments, table_rows=64, width=width, sharding=None)
    shapes = shapes._replace(prepared=jax.eval_shape(prepare, shapes.segment_ids))
    assert "mosaic_gpu" in cases.both_lowered_for_cuda(shapes, MosaicNorm)


@pytest.mark.usefixtures("for_cuda")
@pytest.mark.parametrize(
    ("kind", "layout", "norm", "mosaic", "triton"),
    [
        ("NVIDIA H200", "row", "gated", (1024, 7296), (896,)),
        ("NVIDIA H100 80GB HBM3", "row", "sum", (1024, 5120), (896,)),
        ("NVIDIA H200", "row", "returned", (2304, 5120), (896,)),
        ("NVIDIA H200", "row", "plain", (1024, 8192), (896, 1500)),
        ("NVIDIA H200", "segment", "gated", (1152,), (1500,)),
        ("NVIDIA H100 80GB HBM3", "segment", "sum", (1536,), (1500,)),
        ("NVIDIA H200", "segment", "plain", (1536, 2048), (1500,)),
        ("NVIDIA H200", "token", "gated", (), (5120,)),
        *(("NVIDIA H200", "row, float32", norm, (), (5120,)) for norm in ("gated", "plain")),
    ],
)
def test_auto_takes_it_where_it_was_faster(kind, layout, norm, mosaic, triton, monkeypatch):
    monkeypatch.setattr(devices, "device_kind", lambda: kind)
    layout, dtype = layout.split(",")[0], jnp.dtype(F32 if "float32" in layout else BF16)
    h = {"plain": None, "returned": "x"}.get(norm, "sum")
    call = Call(NormOptions(layout, EPS, dtype, dtype, dtype, h), None)

    def chosen(dim):
        shapes = cases.shapes_of((1, 65_536, dim), layout, norm == "gated", dtype)
        shapes = shapes._replace(y=shapes.x) if norm == "sum" else shapes
        return implementations.REGISTRY.choose("test", "auto", shapes, call).name

    assert {chosen(dim) for dim in mosaic} <= {"mosaic"}
    assert {chosen(dim) for dim in triton} == {"triton"}


NAME = "layernorm_modulate, "


def test_auto_loses_at_most_a_fiftieth_where_both_were_measured():
    found = cases.measured()
    ours = [case for case in found if case[0].startswith(NAME) and case[3] == "mosaic"]
    assert len(ours) >= 6
    for kernel, direction, width, _ in ours:
        kind = kernel.removeprefix(NAME)
        if direction == "backward":
            layout = "segment" if kind == "packed" else "row"
            takes = tuning.backward_faster_than_triton(layout, width)
        else:
            name = "residual_forward" if kind == "residual" else "forward"
            takes = tuning.forward_faster_than_triton(name, width, 2)
        taken, other = ("mosaic", "triton") if takes else ("triton", "mosaic")
        times = (found[kernel, direction, width, name] for name in (taken, other))
        assert next(times) <= 1.02 * next(times), (kernel, direction, width)


# ---------------------------------------------------------------- row blocks and tiles


@cases.examples(30)
@given(
    batch=st.integers(1, 9),
    seq_len=st.integers(1, 400),
    programs=st.integers(1, 3000),
    layout=st.sampled_from(["row", "token"]),
)
def test_even_row_blocks_cover_each_row_once(batch, seq_len, programs, layout):
    options = NormOptions(layout, 1e-6, *(jnp.dtype(F32),) * 3)
    blocks = row_blocks.even_row_blocks((batch, seq_len, 8), options, programs)
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
def compiled(tables, programs):
    def flattened(ids):
        return row_blocks.walks_of(ids, tables, programs).flattened(ids.shape[1], tables).row_blocks

    return jax.jit(flattened)


@st.composite
def segments(draw):
    """Rows of runs that begin at multiples of a unit: (ids, table rows, programs)."""
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
    return np.array(rows, np.int32), tables, programs


@cases.examples(40)
@given(case=segments())
def test_segment_row_blocks_cover_a_row_and_never_cross(case):
    ids, tables, programs = case
    seq_len = ids.shape[1]
    blocks = [np.asarray(part) for part in compiled(tables, programs)(jnp.asarray(ids))]
    even = max(1, min(seq_len, programs // len(ids)))
    assert blocks[0].shape[1] <= even + 2 * tables + 1
    for row, (start, stop, table_row) in enumerate(zip(*blocks, strict=True)):
        first = row * seq_len
        np.testing.assert_array_equal(stop[:-1], start[1:])
        assert (start[0], stop[-1]) == (first, first + seq_len)
        assert (stop >= start).all()
        for begin, end, place in zip(start, stop, table_row, strict=True):
            inside = ids[row, begin - first : end - first]
            assert (inside == inside[:1]).all()
            if end > begin:
                assert place == (row * tables + inside[0] if inside[0] >= 0 else row_blocks.PADDING)


def test_what_no_table_row_can_serve_is_impossible_and_all_that_is_negative_is_padding():
    negative = compiled(2, 1)(jnp.full((1, 8), -7))
    assert (np.asarray(negative.table_row) == row_blocks.PADDING).all()
    too_many = compiled(2, 4)(jnp.asarray(np.tile([0, 1], 30)[None]))
    assert (np.asarray(too_many.table_row) == row_blocks.IMPOSSIBLE).all()
    for segment in (3, 1000):
        beyond = compiled(3, 4)(jnp.full((1, 8), segment))
        used = np.asarray(beyond.stop > beyond.start)
        assert (np.asarray(beyond.table_row)[used] == row_blocks.IMPOSSIBLE).all()


@cases.examples(80)
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
    for usual in (64, 96, 128, 1152, 1536, 3072, 5120, 8192):
        waste = sum(tile.width for tile in split_width(usual, 1024)) - usual
        assert waste == (32 if usual == 96 else 0)


@cases.examples(60)
@given(chunks=st.integers(1, 100), groups=st.sampled_from([1, 2, 4]), alike=st.booleans())
def test_columns_are_counted_once_and_all_groups_have_equally_many(chunks, groups, alike):
    each = -(-chunks // groups)
    assume((groups - 1) * each <= chunks)  # else a group would have another's columns alone
    assume(not alike or chunks % groups == 0)
    counted = np.zeros(chunks, int)
    for group in range(groups):
        columns = columns_of(chunks * LANES, groups, group, alike)
        first, place = int(columns.first), 0
        assert not alike or len({piece.chunks for piece in columns.pieces}) == 1
        for piece in columns.pieces:
            assert piece.at == place
            assert piece.chunks in (1, 2, 4)
            place += piece.chunks
            if piece.counts is None or piece.counts:
                counted[first + piece.at : first + place] += 1
        assert place == columns.chunks == each
    np.testing.assert_array_equal(counted, 1)


LENGTH = 40


@cases.examples(25)
@given(
    ids=cases.layouts(2, LENGTH, 8),
    programs=st.sampled_from([1, 7, 90]),
    tables=st.sampled_from([8, 1]),
)
def test_programs_walk_through_each_token_once(ids, programs, tables):
    """Also where a table of one row cannot serve all runs."""
    walks = jax.jit(walked, static_argnums=(1, 2))(ids, tables, programs)
    first, end = (np.asarray(part).ravel() for part in (walks.first, walks.end))
    start, stop = (np.asarray(part).ravel() for part in walks.row_blocks[:2])
    table_row = np.asarray(walks.row_blocks.table_row).ravel()
    expected = np.where(ids < 0, -1, ids + np.arange(2)[:, None] * 8).ravel()
    even = row_blocks.EvenRowBlocks(2, LENGTH, max(1, min(LENGTH, programs // 2)))
    place = 0
    for walk, (one, other) in enumerate(zip(first, end, strict=True)):
        begin, after, _ = even.place(walk)
        assert place == begin
        for number in range(one, other):
            assert start[number] == place
            served = (expected[place : stop[number]] == table_row[number]).all()
            assert served or tables == 1
            place = stop[number]
        assert place == after
    assert place == ids.size


def walked(ids, tables, programs):
    return row_blocks.walks_of(jnp.asarray(ids), tables, programs).flattened(LENGTH, tables)
