"""`residual_layernorm_modulate` without a branch: h is x, whose two gradients it adds up."""

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
    gradients_of,
    implementation,
    make,
)

from pallas_kernels import layernorm_modulate, residual_layernorm_modulate
from pallas_kernels.layernorm_modulate.operands import NormOperands

SHAPE = (2, 16, 40)
IDS = np.repeat([[0, 1, -1, 3], [2, -1, -1, 0]], 4, axis=1)
CASES = {
    "row": {"shape": SHAPE},
    "flat": {"shape": (16, 40), "table": (1, 40)},
    "token": {"shape": SHAPE, "table": SHAPE},
    "segment": {"shape": SHAPE, "table": (2, 4, 40), "ids": IDS},
}


def cotangents(operands):
    keys = jax.random.split(jax.random.key(7))
    x = operands.x
    return tuple(jax.random.normal(key, x.shape).astype(x.dtype) for key in keys)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("row", F32), ("flat", BF16), ("token", F16), ("segment", F32), ("row", BF16)],
)
@pytest.mark.parametrize("kernels", [True, False])
def test_equals_the_float64_oracle(layout, dtype, kernels, interpret):
    operands = make(**CASES[layout], x_dtype=dtype)
    given = cotangents(operands)
    how = interpret if kernels else "xla"
    (h, out), gradients = gradients_of(how, returns_x=True)(operands, given)
    assert_same_bits(h, operands.x)
    assert out.dtype == dtype
    check(operands, (None, out), gradients, given, what=layout)


@pytest.mark.parametrize("layout", CASES)
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_that_is_not_used(layout, used, interpret):
    operands = make(**CASES[layout])
    wave = jnp.sin(jnp.arange(operands.x.size)).reshape(operands.x.shape)

    def gradients(how):
        def loss(*arrays):
            each = NormOperands(*arrays, segment_ids=operands.segment_ids)
            return (implementation(how, returns_x=True)(each)[used] * wave).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*operands[:3])

    ours, expected = gradients(interpret), gradients("xla")
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6, rtol=2e-6)


def test_the_norm_is_that_of_the_function_without_a_residual(interpret):
    operands = make(SHAPE)
    x, scale, shift = operands[:3]
    options = {"implementation": "triton", "interpret": interpret}
    _, out = residual_layernorm_modulate(x, None, None, scale, shift, **options)
    assert_same_bits(out, layernorm_modulate(x, scale, shift, **options))


def test_what_only_a_branch_can_have_is_refused():
    x, row = jnp.ones((2, 3, 4), BF16), jnp.ones((2, 4))
    with pytest.raises(ValueError, match="a gate is given, but y is None"):
        residual_layernorm_modulate(x, None, row, row, row)
    with pytest.raises(ValueError, match="residual_dtype is float32, but without y h is x"):
        residual_layernorm_modulate(x, None, None, row, row, residual_dtype=F32)
