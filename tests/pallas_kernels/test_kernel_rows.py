import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    BF16,
    F16,
    F32,
    assert_same_bits,
    check,
    cotangents_for,
    gradients_of,
    make,
    run_and_check,
)

from pallas_kernels.layernorm_modulate import tuning

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.mark.parametrize("dim", [31, 256, 1152])
def test_nearly_constant_rows(dim, interpret):
    run_and_check(make((2, 7, dim), mean=1.0, spread=1e-4), interpret)


@pytest.mark.parametrize("dim", [1, 40, 1152])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_without_variance(dim, dtype, interpret):
    outputs, _ = run_and_check(make((2, 7, dim), x_dtype=dtype, mean=3.0, spread=0.0), interpret)
    assert np.isfinite(np.asarray(outputs[1], np.float32)).all()


@pytest.mark.parametrize(
    ("dtype", "residual"), [(F32, False), (F32, True), (BF16, True), (F16, True)]
)
def test_rows_far_from_zero(dtype, residual, interpret):
    operands = make((2, 7, 1152), x_dtype=dtype, mean=1000.0, y_dtype=dtype if residual else None)
    run_and_check(operands, interpret)


@pytest.mark.parametrize("value", [1e-30, 1e-3, 1e4])
def test_rows_of_any_magnitude(value, interpret):
    run_and_check(make((1, 7, 96), spread=value), interpret)


@pytest.mark.parametrize("layout", ["row", "token", "segment"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_a_bad_value_in_one_row_leaves_the_others_untouched(layout, residual, poison, interpret):
    shape = (2, 9, 40)
    table = {"row": (2, 40), "token": shape, "segment": (2, 3, 40)}[layout]
    ids = np.tile(np.repeat([0, 1, 2], 3), (2, 1)) if layout == "segment" else None
    operands = make(shape, table, ids=ids, y_dtype=F32 if residual else None, gate=residual)
    cotangents = cotangents_for(operands)
    both = gradients_of(interpret)
    dirty = operands._replace(x=operands.x.at[1, 4, 3].set(poison))
    keep = np.ones(shape[:2], bool)
    keep[1, 4] = False
    results = [both(these, cotangents) for these in (operands, dirty)]
    rows = [
        [o for o in (*outputs, grads[0], grads[3]) if o is not None] for outputs, grads in results
    ]
    assert_same_bits(*([np.asarray(v)[keep] for v in found] for found in rows))
    assert np.isnan(np.asarray(results[1][0][1])[1, 4]).all()
    if layout == "segment":
        grads = [np.asarray(grads[1]) for _, grads in results]
        others = np.ones((2, 3), bool)
        others[1, 1] = False
        assert_same_bits(*(grad[others] for grad in grads))
        assert np.isnan(grads[1][1, 1]).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_tiny_bfloat16_scales_survive_the_addition_of_one(sign, interpret):
    operands = make((1, 5, 64), x_dtype=F32, modulation=F32)
    tiny = operands._replace(
        x=operands.x.astype(BF16),
        scale=jnp.full((1, 64), sign * 2.0**-10, BF16),
        shift=jnp.zeros((1, 64), BF16),
    )
    # Seen in float32, which h's dtype and y's make the output's.
    tiny = tiny._replace(y=jnp.zeros((1, 5, 64), F32))
    (_, out), _ = run_and_check(tiny, interpret)
    plain = tiny._replace(scale=tiny.scale * 0)
    (_, without), _ = run_and_check(plain, interpret)
    gain = np.asarray(out, np.float64) / np.asarray(without, np.float64)
    np.testing.assert_allclose(gain, 1 + sign * 2.0**-10, rtol=1e-6)


def test_eps_is_added_to_the_variance(interpret):
    operands = make((1, 3, 40), spread=1e-3)
    _, out = gradients_of(interpret, eps=1e-2)(operands, cotangents_for(operands))[0]
    check(operands, (None, out), eps=1e-2)


@pytest.mark.parametrize(
    "change",
    [
        {"prefetch": False, "max_tile": 64},
        {"keep_in_registers": False, "per_core": 3},
        {"prefetch": False, "keep_in_registers": False, "max_tile": 2048},
    ],
    ids=str,
)
def test_blocks_do_not_change_the_result(change, interpret, monkeypatch):
    table = tuning.blocks_for

    def changed(kernel, dim):
        return dataclasses.replace(table(kernel, dim), **change)

    monkeypatch.setattr(tuning, "blocks_for", changed)
    run_and_check(make((2, 13, 200), y_dtype=BF16, gate=True), interpret)
