import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    BF16,
    F16,
    F32,
    assert_same_bits,
    both_lowered_for_cuda,
    check,
    cotangents_for,
    gradients_of,
    implementation,
    kernels_launched,
    make,
    run_and_check,
    shapes_of,
)

from pallas_kernels.layernorm_modulate.operands import NormOperands
from pallas_kernels.layernorm_modulate.tuning import WORKLOADS

WIDTHS = (1, 31, 64, 96, 128, 256, 1152, 1536, 3072, 5120, 8192)
LENGTHS = (1, 37, 1000)
BATCHES = (1, 2, 5)
DTYPES = ((BF16, F32), (F32, F32), (BF16, BF16), (F16, F32), (F16, F16))
NARROW, LARGE = 31, 1_000_000
"""What the interpreter runs within seconds: 1000 tokens up to this width, x up to this size."""


def sweep():
    """Every two of width, length and batch size meet; dtypes take turns."""
    for i, dim in enumerate(WIDTHS):
        for j, seq_len in enumerate(LENGTHS):
            batch = BATCHES[(i + j) % 3]
            yield (batch, seq_len, dim), *DTYPES[(i * 3 + j) % 5]


def quick(case):
    batch, seq_len, dim = case[0]
    return dim <= NARROW or (seq_len < 1000 and batch * seq_len * dim <= LARGE)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("shape", "dtype", "modulation"), [c for c in sweep() if quick(c)])
def test_each_width_with_each_length_and_batch(shape, dtype, modulation, interpret):
    run_and_check(make(shape, x_dtype=dtype, modulation=modulation), interpret)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "modulation"), [c for c in sweep() if not quick(c)])
def test_each_width_at_large_sizes(shape, dtype, modulation, on_gpu):
    run_and_check(make(shape, x_dtype=dtype, modulation=modulation), False)


@pytest.mark.parametrize(
    ("shape", "residual"),
    [((1, 7, 1), True), ((2, 37, 96), False), ((5, 7, 1152), True), ((1, 37, 3072), False)],
)
def test_with_the_measured_number_of_programs(shape, residual, interpret):
    run_and_check(make(shape, y_dtype=BF16 if residual else None, gate=residual), interpret)


LAYOUTS = {"row": (2, 37, 96), "token": (2, 37, 96), "flat row": (37, 96), "flat token": (37, 96)}


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("layout", "branch"),
    [
        *itertools.product(("row", "token"), ("none", "plain", "gated")),
        *(("flat row", "gated"), ("flat token", "none")),
    ],
)
def test_every_layout(layout, branch, interpret):
    shape = LAYOUTS[layout]
    table = shape if "token" in layout else (*shape[:-2], shape[-1])
    if layout == "flat row":
        table = (1, shape[-1])
    y_dtype = None if branch == "none" else F32
    operands = make(shape, table, y_dtype=y_dtype, gate=branch == "gated")
    run_and_check(operands, interpret)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("branch", [None, BF16])
def test_a_row_for_each_token_at_a_ragged_width(branch, interpret):
    operands = make((2, 7, 1000), (2, 7, 1000), y_dtype=branch, gate=branch is not None)
    run_and_check(operands, interpret)


def residual_dtypes():
    """Every x with every y: h in x's dtype, and in float32 with tables in x's or y's in turn."""
    for n, (x, y) in enumerate(itertools.product((BF16, F16, F32), repeat=2)):
        for mix in {(x, y, x, F32), (x, y, F32, y if n % 2 else x)}:
            yield tuple(map(jnp.dtype, mix))


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("x", "y", "h", "modulation"), sorted(residual_dtypes(), key=str), ids=str)
def test_every_mix_of_dtypes_with_a_residual(x, y, h, modulation, interpret):
    gated = (x.itemsize + y.itemsize + h.itemsize) % 4 != 0 or modulation == F32
    operands = make((2, 5, 40), x_dtype=x, y_dtype=y, modulation=modulation, gate=gated)
    outputs, _ = run_and_check(operands, interpret, residual_dtype=h)
    assert (outputs[0].dtype, outputs[1].dtype) == (h, y)


@pytest.mark.usefixtures("few_programs")
def test_scale_shift_and_gate_may_differ_in_dtype(interpret):
    operands = make((2, 5, 40), x_dtype=BF16, y_dtype=F16, gate=True)
    operands = operands._replace(scale=operands.scale.astype(BF16), gate=operands.gate.astype(F16))
    run_and_check(operands, interpret)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("gated", "sizes"),
    [(False, (1,)), (True, (1,)), pytest.param(True, (4,), marks=pytest.mark.slow)],
)
def test_any_subset_of_arguments_has_the_same_gradients(gated, sizes, interpret):
    operands = make((2, 7, 40), y_dtype=F32 if gated else None, gate=gated)
    cotangents = cotangents_for(operands)
    run = implementation(interpret)
    _, everything = gradients_of(interpret)(operands, cotangents)
    present = [n for n, value in enumerate(operands[:5]) if value is not None]

    def loss(*arrays):
        outputs = zip(run(NormOperands(*arrays)), cotangents, strict=True)
        return sum(jnp.vdot(value, ct) for value, ct in outputs if ct is not None)

    for subset in itertools.chain(*(itertools.combinations(present, n) for n in sizes)):
        some = jax.jit(jax.grad(loss, argnums=subset))(*operands[:5])
        if interpret:  # XLA rounds what it fuses with the interpreter in each program by itself
            jax.tree.map(assert_close, some, tuple(everything[n] for n in subset))
        else:
            assert_same_bits(some, [everything[n] for n in subset])


def assert_close(actual, expected):
    actual, expected = (np.asarray(value, np.float32) for value in (actual, expected))
    scale = max(np.abs(expected).max(), 1e-30)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * scale)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("residual", [False, True])
def test_two_runs_give_the_same_bits(residual, interpret):
    operands = make((2, 37, 96), x_dtype=BF16, y_dtype=BF16 if residual else None, gate=residual)
    both = gradients_of(interpret)
    cotangents = cotangents_for(operands)
    assert_same_bits(both(operands, cotangents), both(operands, cotangents))


def assert_close_on_rows(operands, outputs, gradients, cotangents, rows):
    """Values and dx of some rows of a batch of one, against the oracle."""

    def some(tree):
        return jax.tree.map(lambda v: v if v.shape[0] == 1 and v.ndim == 2 else v[:, rows], tree)

    picked = some(operands)
    check(picked, some(outputs))
    dx = gradients_of("xla")(picked, some(cotangents))[1][0]
    actual = np.asarray(gradients[0][:, rows], np.float32)
    np.testing.assert_allclose(actual, np.asarray(dx, np.float32), rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("seq_len", "dim"), [(131_072, 1536), (2**31 // 8192 + 1000, 8192)], ids=["long", "over 2**31"]
)
def test_on_sampled_rows_of_a_large_tensor(seq_len, dim, on_gpu):
    shape = (1, seq_len, dim)
    x = jax.random.normal(jax.random.key(0), shape, BF16)
    operands = NormOperands(x, *(jax.random.normal(jax.random.key(n), (1, dim)) for n in (1, 2)))
    cotangents = (None, jax.random.normal(jax.random.key(3), shape, BF16))
    outputs, gradients = gradients_of(False)(operands, cotangents)
    rows = np.r_[0:3, np.random.default_rng(0).integers(0, seq_len, 50), seq_len - 3 : seq_len]
    assert_close_on_rows(operands, outputs, gradients, cotangents, rows)
    summed = jax.jit(lambda d: d.astype(F32).sum(1))(cotangents[1])
    np.testing.assert_allclose(gradients[2], summed, rtol=1e-4, atol=1e-5 * np.sqrt(seq_len) * 50)


# ---------------------------------------------------------------- lowering

HUGE = {"over 2**31 elements": (1, 500_000, 5120), "many rows": (5, 100_000, 8192)}
SHAPES = {name: workload.shape for name, workload in WORKLOADS.items()} | HUGE


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("residual", [False, True])
def test_workloads_lower_for_cuda(name, residual):
    module = both_lowered_for_cuda(shapes_of(SHAPES[name], "row", residual))
    assert kernels_launched(module) == ["forward", "backward", "reduce"]


@pytest.mark.parametrize("layout", ["token", "segment"])
@pytest.mark.parametrize("residual", [False, True])
def test_layouts_lower_for_cuda(layout, residual):
    names = kernels_launched(both_lowered_for_cuda(shapes_of((2, 4096, 1536), layout, residual)))
    assert names == ["forward", "backward"] + (["reduce"] if layout == "segment" else [])


def test_aligned_segments_lower_for_cuda():
    both_lowered_for_cuda(shapes_of((2, 4096, 1536), "segment", True), segment_block=128)


@pytest.mark.parametrize("dim", [1, 31, 96, 8192, 10_000])
def test_odd_widths_lower_for_cuda(dim):
    both_lowered_for_cuda(shapes_of((2, 37, dim), "row", True))
