from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import layernorm_modulate, residual_layernorm_modulate

KINDS = (AxisType.Auto, AxisType.Explicit)
SPEC = PartitionSpec(None, "sequence", None)


CHOICES = {
    "triton": {"implementation": "triton", "interpret": True},
    "xla": {"implementation": "xla"},
}
KERNELS = CHOICES["triton"]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def split(kind, x):
    """A mesh of eight devices over the sequence, x on it, and what the functions must be told."""
    mesh = jax.make_mesh((8,), ("sequence",), (kind,))
    sharding = NamedSharding(mesh, SPEC)
    told = {"sharding": sharding} if kind == AxisType.Auto else {}
    return mesh, jax.device_put(x, sharding), told


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES)
def test_shards_that_begin_inside_a_segment_block(kind, choice):
    x, table = normal(0, 2, 80, 32), normal(1, 12, 32)
    ids = jnp.broadcast_to(jnp.arange(80) // 7, (2, 80))
    expected = layernorm_modulate(x, table, table, segment_ids=ids, implementation="xla")
    mesh, there, told = split(kind, x)
    run = partial(layernorm_modulate, segment_block=7, **CHOICES[choice], **told)
    with jax.set_mesh(mesh):
        out = jax.jit(run)(there, table, table, segment_ids=ids)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_replicated_tables_beside_a_sharded_x(kind):
    x, scale = normal(0, 2, 16, 32), normal(1, 2, 32)

    def loss(scale, x, choice, **told):
        out = layernorm_modulate(x, scale, scale, **CHOICES[choice], **told)
        return jnp.sum(jnp.sin(out))

    expected = jax.jit(partial(jax.grad(loss), choice="xla"))(scale, x)
    mesh, there, told = split(kind, x)
    with jax.set_mesh(mesh):
        gradient = jax.jit(partial(jax.grad(loss), choice="triton", **told))(scale, there)
    np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_a_hidden_auto_axis_beside_an_explicit_one_must_be_told():
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), (AxisType.Explicit, AxisType.Auto))
    x = jax.device_put(normal(0, 2, 16, 8), NamedSharding(mesh, PartitionSpec("data")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"Auto axes \['sequence'\]"):
        layernorm_modulate(x, normal(1, 2, 8), normal(2, 2, 8), **KERNELS)


def test_a_checked_shard_map_is_named():
    mesh = jax.make_mesh((8,), ("sequence",), (AxisType.Auto,))

    def inside(x, scale):
        return layernorm_modulate(x, scale, scale, **KERNELS)

    mapped = jax.shard_map(inside, mesh=mesh, in_specs=(SPEC, PartitionSpec()), out_specs=SPEC)
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        mapped(normal(0, 2, 16, 8), normal(1, 2, 8))


def test_second_derivatives_are_refused():
    x, scale = normal(0, 1, 2, 8), normal(1, 1, 8)

    def loss(x):
        return jnp.sum(layernorm_modulate(x, scale, scale, **KERNELS) ** 2)

    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.hessian(loss)(x)
    _, pull = jax.vjp(loss, x)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        jax.grad(lambda cotangent: pull(cotangent)[0].sum())(1.0)


@pytest.mark.parametrize("choice", CHOICES)
def test_what_padding_holds_does_not_reach_the_gate(choice):
    x, gate = normal(0, 1, 12, 8), normal(1, 2, 8)
    ids = jnp.array([[0] * 4 + [-1] * 4 + [1] * 4])
    y = jnp.where(ids[..., None] < 0, jnp.nan, x)

    def loss(gate):
        run = residual_layernorm_modulate(
            x, y, gate, gate, gate, segment_ids=ids, **CHOICES[choice]
        )
        return sum(map(jnp.sum, run))

    assert np.isfinite(jax.jit(jax.grad(loss))(gate)).all()


def test_a_segment_beyond_the_table_makes_the_residual_nan_too():
    x, table = normal(0, 1, 12, 8), normal(1, 2, 8)
    h, _ = residual_layernorm_modulate(
        *(x, x, table, table, table),
        segment_ids=jnp.full((1, 12), 7),
        **KERNELS,
    )
    assert np.isnan(h).all()


@pytest.mark.parametrize("y_dtype", [jnp.float32, jnp.bfloat16])
def test_without_a_gate_both_gradients_are_the_same(y_dtype):
    x, scale = normal(0, 2, 5, 96), normal(1, 2, 96)

    def loss(x, y, choice):
        run = residual_layernorm_modulate(x, y, None, scale, scale, **CHOICES[choice])
        return sum(jnp.sum(jnp.sin(part.astype(jnp.float32))) for part in run)

    y = normal(2, 2, 5, 96).astype(y_dtype)
    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    kernel, xla = (gradient(x, y, choice) for choice in CHOICES)
    assert kernel[1].dtype == y_dtype
    for ours, theirs in zip(kernel, xla, strict=True):
        np.testing.assert_allclose(
            ours.astype(np.float32), theirs.astype(np.float32), atol=1e-5, rtol=2**-7
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": -1.0}, "eps is -1.0; it must be a finite number"),
        ({"eps": "small"}, "eps is 'small'"),
        ({"segment_block": 2.5}, "segment_block is 2.5; it must be an int"),
        ({"sharding": SPEC}, "must be a jax.sharding.NamedSharding"),
    ],
)
def test_wrong_static_arguments_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        layernorm_modulate(normal(0, 2, 5, 8), normal(1, 2, 8), normal(2, 2, 8), **options)


def test_numpy_arrays_are_arrays():
    x, scale = np.ones((2, 3, 8), np.float32), np.ones((1, 8), np.float32)
    out = layernorm_modulate(x, scale, scale, segment_ids=np.zeros((2, 3), np.int32))
    np.testing.assert_allclose(out, 1.0)
