"""Rotary embedding, heads of attention from their projection, feed-forward layers."""

from functools import partial
from typing import get_args
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alload_jax.models.common import sublayers
from alload_jax.models.common.layers import rematerialise
from alload_jax.models.common.parts import Linear
from alload_jax.models.common.sublayers import (
    FeedForward,
    apply_rotary,
    grid_positions,
    rotary_table,
)
from alload_jax.planning.analytic import keeps_feed_forward
from alload_jax.planning.remat import RematPolicy
from alload_jax.sharding.mesh import AXES, BATCH_AXES
from pallas_kernels import devices

# ---------------------------------------------------------------- rotary


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


# ---------------------------------------------------------------- query key


HEADS, DIM = 4, 32
CASES = {
    "rows with one table": ((3, 8), "shared", False),
    "one row, which is split": ((1, 16), "shared", False),
    "one row that does not divide": ((1, 7), "shared", False),
    "packed rows": ((2, 8), "own", False),
    "each head": ((3, 8), "shared", True),
    "no rotation": ((2, 5), None, False),
}


def made(name):
    (rows, tokens), table, per_head = CASES[name]
    linear = Linear(DIM, DIM, rngs=nnx.Rngs(0))
    norm = nnx.RMSNorm(DIM // HEADS if per_head else DIM, rngs=nnx.Rngs(1))
    norm.scale[...] = 1 + 0.2 * jax.random.normal(jax.random.key(2), norm.scale.shape)
    x = jax.random.normal(jax.random.key(3), (rows, tokens, DIM))
    place = (tokens, 4) if table == "shared" else (rows, tokens, 4)
    angle = jax.random.normal(jax.random.key(4), place)
    return x, linear, norm, (jnp.cos(angle), jnp.sin(angle)) if table else None


def with_gradient(x, linear, norm, rotary, sharding=None):
    layer = sublayers.AttentionProjections(
        DIM, HEADS, norm_width=None, eps=1e-6, norm="auto", dtype=jnp.float32, rngs=nnx.Rngs(0)
    )

    def total(x, linear, norm):
        heads = layer.projected(x, linear, norm, rotary, sharding)
        return jnp.sum(jnp.sin(heads)), heads

    return nnx.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(x, linear, norm)


def close(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    for left, right in pairs:
        np.testing.assert_allclose(left, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_heads_are_projected_normed_and_rotated(name):
    x, linear, norm, rotary = made(name)
    per_head = CASES[name][2]
    y = linear(x)
    shape = (*x.shape[:2], HEADS, DIM // HEADS)
    expected = norm(y.reshape(shape)) if per_head else norm(y).reshape(shape)
    expected = expected if rotary is None else apply_rotary(expected, rotary)
    (_, heads), _ = with_gradient(x, linear, norm, rotary)
    close(heads, expected)


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_same(name, monkeypatch):
    expected = with_gradient(*made(name))
    monkeypatch.setattr(
        sublayers, "rms_norm_rotary", partial(sublayers.rms_norm_rotary, interpret=True)
    )
    close(with_gradient(*made(name)), expected)


@pytest.mark.parametrize("tensor", [1, 2])
def test_kernels_compute_the_same_on_a_mesh(tensor, monkeypatch):
    if jax.device_count() < 4:
        pytest.skip("needs four devices")
    per_head = tensor > 1  # statistics of the whole width are XLA's there
    x, linear, norm, rotary = made("each head" if per_head else "rows with one table")
    x = jnp.concatenate([x, x[:1]])
    expected = with_gradient(x, linear, norm, rotary)
    shape = (2, 2 // tensor, 1, tensor)
    mesh = jax.make_mesh(shape, AXES, (AxisType.Auto,) * 4, devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P(BATCH_AXES))
    called = []

    def interpreted(*arrays, **options):
        called.append(options["sharding"].spec)
        return run(*arrays, **options, interpret=True)

    run = sublayers.rms_norm_rotary
    monkeypatch.setattr(sublayers, "rms_norm_rotary", interpreted)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding)
        step = nnx.jit(partial(with_gradient, rotary=rotary, sharding=sharding))
        close(step(placed, linear, norm), expected)
    assert called[0][2:] == (("tensor",) if tensor > 1 else ())


# ---------------------------------------------------------------- feed forward


POLICIES = get_args(RematPolicy)


def layer_of(dim, hidden, dtype):
    layer = FeedForward(dim, hidden, dtype=dtype, rngs=nnx.Rngs(0))
    return nnx.split(layer)


def gated(graph, policy):
    """A loss in which the layer's output has a gate, whose gradient needs the output."""

    def loss(state, x, gate):
        def block(x, state):
            layer = nnx.merge(graph, state)
            return x + gate * layer(x, output_kept=keeps_feed_forward(policy))

        out = rematerialise(block, policy, in_loop=False)(x, state)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return loss


@pytest.mark.parametrize("policy", POLICIES)
def test_gelu_runs_once_more_only_where_the_layer_is_applied_again(policy):
    dim, hidden = 64, 1024
    graph, state = layer_of(dim, hidden, jnp.bfloat16)
    shapes = (state, jnp.zeros((2, 2048, dim), jnp.bfloat16), jnp.zeros((), jnp.bfloat16))
    grad = jax.jit(jax.grad(gated(graph, policy), argnums=(0, 1, 2)))
    with (
        mock.patch.object(devices, "unsupported_triton_device", return_value=None),
        mock.patch.object(devices, "device_kind", return_value="NVIDIA H200"),
    ):
        text = grad.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    runs = {name: text.count(f'name = "bias_gelu_{name}"') for name in ("forward", "backward")}
    again = not keeps_feed_forward(policy)
    assert runs == {"forward": 2 if again else 1, "backward": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_all_policies_give_the_same_gradients(policy):
    graph, state = layer_of(16, 48, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    found, expected = (
        jax.jit(jax.grad(gated(graph, each), argnums=(0, 1, 2)))(state, x, jnp.float32(0.5))
        for each in (policy, "none")
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_is_that_of_the_functions_apart():
    graph, state = layer_of(8, 24, jnp.float32)
    x = jax.random.normal(jax.random.key(1), (1, 3, 8))

    def slope(x, kept):
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, output_kept=kept)))

    along = jnp.cos(x)
    found = [
        jax.jvp(jax.grad(lambda x, kept=kept: slope(x, kept)), (x,), (along,))[1]
        for kept in (True, False)
    ]
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)
