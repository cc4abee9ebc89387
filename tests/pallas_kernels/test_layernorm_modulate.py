from functools import partial

import jax
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
    make,
    public,
    with_gradients,
)

from pallas_kernels import layernorm_modulate, residual_layernorm_modulate


def choices():
    """What can run here, as options; "auto" is one of them, as tests below show."""
    on_gpu = jax.default_backend() == "gpu"
    kernels = {"implementation": "triton", "interpret": not on_gpu}
    return {"implementation": "xla"}, kernels


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def choice_of_machine(request):
    if (request.param == "gpu") != (jax.default_backend() == "gpu"):
        pytest.skip(f"not on a {request.param}")


SHAPES = ((1, 1, 1), (2, 7, 31), (3, 5, 128), (2, 3, 1152), (7, 96))
DTYPES = ((F32, F32), (BF16, F32), (BF16, BF16), (F16, F32))
BRANCHES = ("none", "gated", "gated, float32")


def pairs():
    """Every two of shape, dtypes and branch meet."""
    for i, shape in enumerate(SHAPES):
        for j, dtypes in enumerate(DTYPES):
            yield shape, dtypes, BRANCHES[(i + j) % 3]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("choice_of_machine")
@pytest.mark.parametrize(("shape", "dtypes", "branch"), list(pairs()))
def test_equals_the_float64_oracle_up_to_one_rounding(shape, dtypes, branch):
    table = (1, shape[1]) if len(shape) == 2 else None
    x_dtype, modulation = dtypes
    gated = branch != "none"
    y_dtype = x_dtype if gated else None
    operands = make(
        shape, table, x_dtype=x_dtype, modulation=modulation, y_dtype=y_dtype, gate=gated
    )
    static = {"residual_dtype": F32} if branch == "gated, float32" else {}
    cotangents = cotangents_for(operands, **static)
    for choice in choices():
        run = with_gradients(partial(public, **choice, **static))
        outputs, gradients = run(operands, cotangents)
        assert (outputs[1].dtype, outputs[1].shape) == (x_dtype, shape)
        check(operands, outputs, gradients, cotangents, what=str(choice))


@pytest.mark.parametrize("residual", [False, True])
def test_segments_of_the_xla_implementation(residual):
    ids = np.repeat([0, -1, 2, 1, -1], [3, 2, 6, 1, 2])
    operands = make((14, 40), (4, 40), ids=ids, y_dtype=F32 if residual else None, gate=residual)
    cotangents = cotangents_for(operands)
    run = with_gradients(lambda each: public(each, implementation="xla"))
    outputs, gradients = run(operands, cotangents)
    check(operands, outputs, gradients, cotangents)
    dirty = operands._replace(x=operands.x.at[ids < 0].set(jnp.nan))
    assert_same_bits(run(dirty, cotangents), (outputs, gradients))


@pytest.mark.parametrize("shape", [(0, 7, 8), (2, 0, 8), (0, 0, 8)])
@pytest.mark.parametrize("residual", [False, True])
def test_nothing_in_nothing_out(shape, residual):
    operands = make(shape, y_dtype=F32 if residual else None, gate=residual)
    for choice in choices():
        run = with_gradients(partial(public, **choice))
        (h, out), gradients = run(operands, cotangents_for(operands))
        assert out.shape == shape
        assert h is None or h.shape == shape
        assert [g.shape for g in gradients if g is not None] == [
            v.shape for v in operands[:5] if v is not None
        ]
        assert not np.asarray(gradients[1]).any()


@pytest.mark.parametrize("shape", [(0, 8), (0, 5, 8), (2, 0, 8)])
def test_no_tokens_of_no_segments(shape):
    ids = np.zeros(shape[:-1])
    operands = make(shape, (3, 8), ids=ids)
    run = with_gradients(public)
    (_, out), gradients = run(operands, cotangents_for(operands))
    assert out.shape == shape
    assert gradients[1].shape == (3, 8)


def test_a_nan_in_one_row_leaves_the_others_untouched():
    operands = make((2, 5, 32))
    _, clean = public(operands)
    _, dirty = public(operands._replace(x=operands.x.at[1, 2, 3].set(jnp.nan)))
    keep = np.ones((2, 5), bool)
    keep[1, 2] = False
    np.testing.assert_array_equal(np.asarray(clean)[keep], np.asarray(dirty)[keep])
    assert np.isnan(np.asarray(dirty)[1, 2]).all()


def test_tiny_bfloat16_scales_survive_the_addition_of_one():
    operands = make((1, 4, 64), x_dtype=BF16, modulation=BF16, y_dtype=F32)
    scale = jnp.full((1, 64), 2.0**-10, BF16)
    outputs = [
        public(operands._replace(y=operands.y * 0, scale=s, shift=operands.shift * 0))[1]
        for s in (scale, scale * 0)
    ]
    gain = np.asarray(outputs[0], np.float64) / np.asarray(outputs[1], np.float64)
    np.testing.assert_allclose(gain, 1 + 2.0**-10, rtol=1e-6)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about machines without a GPU")
@pytest.mark.parametrize("function", [layernorm_modulate, residual_layernorm_modulate])
def test_the_kernels_need_a_gpu_and_say_so(function):
    x, row = jnp.ones((2, 3, 4)), jnp.ones((2, 4))
    streams = (x,) if function is layernorm_modulate else (x, x, row)
    with pytest.raises(NotImplementedError, match=rf"{function.__name__}: .*backend is 'cpu'"):
        function(*streams, row, row, implementation="triton")
    assert_same_bits(
        function(*streams, row, row, implementation="auto"),
        function(*streams, row, row, implementation="xla"),
    )


WRONG = {
    "few axes": ({"x": jnp.ones(4)}, r"x must be .*\(4,\)"),
    "many axes": ({"x": jnp.ones((1, 2, 3, 4))}, r"x must be .*\(1, 2, 3, 4\)"),
    "no width": ({"x": jnp.ones((2, 3, 0))}, r"\(2, 3, 0\)"),
    "integer x": ({"x": jnp.ones((2, 3, 4), jnp.int32)}, "x is int32"),
    "scale's rows": ({"scale": jnp.ones((1, 4))}, r"scale must be .*\(2, 4\).*got \(1, 4\)"),
    "scale's width": ({"scale": jnp.ones((2, 5))}, r"scale must be .*\(2, 5\)"),
    "flat x": ({"x": jnp.ones((3, 4))}, r"\[1, D\] = \(1, 4\)"),
    "shift's shape": ({"shift": jnp.ones((2, 3, 4))}, r"shift .*\(2, 4\), got \(2, 3, 4\)"),
    "shift's dtype": ({"shift": jnp.ones((2, 4), F16)}, "shift is float16; .*float32"),
    "ids' shape": ({"segment_ids": jnp.zeros((2, 4), int)}, r"segment_ids .*\(2, 3\).*\(2, 4\)"),
    "ids' dtype": ({"segment_ids": jnp.zeros((2, 3))}, "segment_ids are float32"),
    "unsigned ids": ({"segment_ids": jnp.zeros((2, 3), jnp.uint32)}, "segment_ids are uint32"),
    "block alone": ({"segment_block": 8}, "segment_block=8 needs segment_ids"),
    "empty block": (
        {"segment_block": 0, "segment_ids": jnp.zeros((2, 3), int)},
        "segment_block is 0",
    ),
    "empty table": (
        {
            "segment_ids": jnp.zeros((2, 3), int),
            "scale": jnp.ones((0, 4)),
            "shift": jnp.ones((0, 4)),
        },
        r"at least 1.*\(0, 4\)",
    ),
    "implementation": (
        {"implementation": "magic"},
        "'magic' is.*auto, triton, mosaic, xla",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    change, words = WRONG[name]
    arguments = {"x": jnp.ones((2, 3, 4)), "scale": jnp.ones((2, 4)), "shift": jnp.ones((2, 4))}
    with pytest.raises(ValueError, match=f"layernorm_modulate: .*{words}"):
        layernorm_modulate(**(arguments | change))


WRONG_RESIDUALS = {
    "y's shape": ({"y": jnp.ones((2, 3, 5))}, r"y must have .*\(2, 3, 4\), got \(2, 3, 5\)"),
    "y's dtype": ({"y": jnp.ones((2, 3, 4), jnp.int8)}, "y is int8"),
    "gate's shape": ({"gate": jnp.ones((1, 4))}, r"gate .*\(2, 4\), got \(1, 4\)"),
    "gate's dtype": ({"gate": jnp.ones((2, 4), F16)}, "gate is float16"),
    "residual dtype": ({"residual_dtype": BF16}, "residual_dtype is bfloat16.*float32"),
}


@pytest.mark.parametrize("name", WRONG_RESIDUALS)
def test_wrong_residuals_are_named(name):
    change, words = WRONG_RESIDUALS[name]
    x, row = jnp.ones((2, 3, 4)), jnp.ones((2, 4))
    arguments = {"x": x, "y": x, "gate": row, "scale": row, "shift": row}
    with pytest.raises(ValueError, match=f"residual_layernorm_modulate: .*{words}"):
        residual_layernorm_modulate(**(arguments | change))
