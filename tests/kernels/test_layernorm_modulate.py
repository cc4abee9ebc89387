import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import layernorm_modulate


def oracle(x, scale, shift, eps):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return (
        normed * (1 + np.asarray(scale, np.float64)[:, None])
        + np.asarray(shift, np.float64)[:, None]
    )


def inputs(shape, dtype, modulation_dtype, seed=0):
    rng = np.random.default_rng(seed)
    batch, _, dim = shape
    x = jnp.asarray(rng.normal(1.0, 2.0, shape), dtype)
    scale, shift = (jnp.asarray(rng.normal(size=(batch, dim)), modulation_dtype) for _ in range(2))
    return x, scale, shift


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 31), (3, 5, 128), (2, 3, 1152)])
@pytest.mark.parametrize(
    ("dtype", "modulation", "tolerance"),
    [
        (jnp.float32, jnp.float32, 1e-6),
        (jnp.bfloat16, jnp.float32, 2**-8),
        (jnp.bfloat16, jnp.bfloat16, 2**-8),
        (jnp.float16, jnp.float32, 2**-10),
    ],
)
def test_equals_the_float64_oracle_up_to_one_rounding(shape, dtype, modulation, tolerance):
    x, scale, shift = inputs(shape, dtype, modulation)
    y = layernorm_modulate(x, scale, shift, eps=1e-6)
    assert y.dtype == x.dtype
    expected = oracle(x, scale, shift, 1e-6)
    bound = tolerance * (np.abs(expected) + np.sqrt(shape[-1]) / 8 + 1)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= bound).all()


def test_tiny_bfloat16_scales_survive_the_addition_of_one():
    x, _, shift = inputs((1, 4, 64), jnp.float32, jnp.float32)
    scale = jnp.full((1, 64), 2.0**-10, jnp.float32)
    y = layernorm_modulate(x.astype(jnp.bfloat16), scale.astype(jnp.bfloat16), shift * 0)
    base = layernorm_modulate(x.astype(jnp.bfloat16), scale * 0, shift * 0)
    gain = np.asarray(y, np.float64).sum() / np.asarray(base, np.float64).sum()
    expected = oracle(x.astype(jnp.bfloat16), scale, shift * 0, 1e-6)
    assert np.isfinite(gain)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8, atol=1e-6)


def test_a_nan_in_one_row_leaves_the_others_untouched():
    x, scale, shift = inputs((2, 5, 32), jnp.float32, jnp.float32)
    clean = layernorm_modulate(x, scale, shift)
    dirty = layernorm_modulate(x.at[1, 2, 3].set(jnp.nan), scale, shift)
    keep = np.ones((2, 5), bool)
    keep[1, 2] = False
    np.testing.assert_array_equal(np.asarray(clean)[keep], np.asarray(dirty)[keep])
    assert np.isnan(np.asarray(dirty)[1, 2]).all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": jnp.ones((2, 3))}, ValueError, "x must be"),
        ({"x": jnp.ones((2, 3, 4), jnp.int32)}, ValueError, "int32"),
        ({"scale": jnp.ones((1, 4))}, ValueError, "scale must be"),
        ({"shift": jnp.ones((2, 4), jnp.float16)}, ValueError, "shift is float16"),
        ({"implementation": "magic"}, NotImplementedError, "'magic'"),
    ],
)
def test_wrong_arguments_are_named(change, error, words):
    arguments = {"x": jnp.ones((2, 3, 4)), "scale": jnp.ones((2, 4)), "shift": jnp.ones((2, 4))}
    arguments |= change
    with pytest.raises(error, match=words):
        layernorm_modulate(**arguments)
