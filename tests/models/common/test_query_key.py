"""Heads of attention from their projection: with kernels, as XLA computes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alload_jax.models.common import query_key
from alload_jax.models.common.linear import Linear
from alload_jax.models.common.rotary import apply_rotary
from alload_jax.sharding.mesh import AXES, BATCH_AXES

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
    def total(x, linear, norm):
        heads = query_key.project_heads(x, linear, norm, rotary, num_heads=HEADS, sharding=sharding)
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
        query_key, "rms_norm_rotary", partial(query_key.rms_norm_rotary, interpret=True)
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

    run = query_key.rms_norm_rotary
    monkeypatch.setattr(query_key, "rms_norm_rotary", interpreted)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, sharding)
        step = nnx.jit(partial(with_gradient, rotary=rotary, sharding=sharding))
        close(step(placed, linear, norm), expected)
    assert called[0][2:] == (("tensor",) if tensor > 1 else ())
