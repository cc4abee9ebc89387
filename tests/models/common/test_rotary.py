import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alload_jax.models.common.rotary import apply_rotary, grid_positions, rotary_table


def test_positions_run_through_width_then_height_then_frames():
    positions = grid_positions(2, 3, 4)
    expected = [(t, h, w) for t in range(2) for h in range(3) for w in range(4)]
    assert positions.tolist() == [list(place) for place in expected]


@pytest.mark.parametrize("head_dim", [2, 8, 24, 32, 128])
def test_equals_complex_multiplication(head_dim):
    positions = np.asarray(grid_positions(3, 2, 5))
    x = np.random.default_rng(0).normal(size=(2, 30, 3, head_dim)).astype(np.float32)
    spatial = 2 * (head_dim // 6)
    angles = []
    for axis, size in enumerate((head_dim - 2 * spatial, spatial, spatial)):
        for i in range(size // 2):
            angles.append(positions[:, axis] * 10_000.0 ** (-2 * i / size))
    turn = np.exp(1j * np.stack(angles, -1))
    expected = (x[..., 0::2] + 1j * x[..., 1::2]) * turn[None, :, None]
    table = rotary_table(positions, (3, 2, 5), head_dim)
    turned = np.asarray(apply_rotary(jnp.asarray(x), table))
    np.testing.assert_allclose(turned[..., 0::2], expected.real, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(turned[..., 1::2], expected.imag, rtol=1e-6, atol=1e-6)


def test_channels_are_divided_as_asked():
    positions, sizes = np.asarray(grid_positions(3, 2, 5)), (4, 6, 2)
    cos, sin = rotary_table(positions, (3, 2, 5), 12, theta=256.0, sizes=sizes)
    angles = [
        positions[:, axis] * 256.0 ** (-2 * i / size)
        for axis, size in enumerate(sizes)
        for i in range(size // 2)
    ]
    np.testing.assert_allclose(cos, np.cos(np.stack(angles, -1)), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(np.stack(angles, -1)), atol=1e-6)


def test_products_depend_on_differences_of_position_alone():
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, 32)), jnp.float32) for _ in range(2))

    def product(here, there):
        turned = [
            apply_rotary(x, rotary_table(np.asarray([place]), (16, 16, 16), 32))
            for x, place in ((query, here), (key, there))
        ]
        return float((turned[0] * turned[1]).sum())

    moved = product((7, 8, 9), (5, 10, 12))
    np.testing.assert_allclose(product((2, 0, 1), (0, 2, 4)), moved, rtol=1e-4)


@pytest.mark.parametrize("place", [(4, 0, 0), (0, 2, 0), (0, 0, 7), (-1, 0, 0), (0, 0, -9)])
def test_positions_outside_the_limits_are_refused(place):
    positions, limits = np.asarray([(3, 1, 6), place]), (4, 2, 7)
    with pytest.raises(ValueError, match=r"rotary_table: position \[.*outside .* \[4, 2, 7\]"):
        rotary_table(positions, limits, 12)
    traced = jax.jit(lambda positions: rotary_table(positions, limits, 12))(positions)
    known = rotary_table(positions[:1], limits, 12)
    for part, expected in zip(traced, known, strict=True):
        np.testing.assert_array_equal(part[0], expected[0])
        assert np.isnan(part[1]).any()
