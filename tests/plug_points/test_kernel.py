"""A kernel from outside of the package takes a file of its reference and one of Triton kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from scaled_silu import scaled_silu


def gradients(x, scale, given, **options):
    out, pull = jax.vjp(lambda *operands: scaled_silu(*operands, **options), x, scale)
    return out, *pull(given)


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    x, given = (jax.random.normal(key, (2, 4, 128)) for key in keys[:2])
    return x, jax.random.normal(keys[2], (128,)), given


def test_its_kernels_compute_what_its_reference_means(arrays):
    expected = gradients(*arrays, implementation="xla")
    for found, wanted in zip(gradients(*arrays, interpret=True), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_its_vector_s_gradient_is_summed_over_a_mesh(arrays):
    mesh = jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec("data", "context"))
    run = jax.jit(lambda *given: gradients(*given, interpret=True, sharding=sharding))
    for found, wanted in zip(run(*arrays), gradients(*arrays, implementation="xla"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_it_cannot_do_is_said(arrays):
    with pytest.raises(NotImplementedError, match=r"scaled_silu: 'triton' cannot run, the backend"):
        scaled_silu(*arrays[:2], implementation="triton")
    with pytest.raises(ValueError, match="choose one of auto, triton, xla"):
        scaled_silu(*arrays[:2], implementation="mosaic")

    def twice(x):
        return jax.grad(lambda each: scaled_silu(each, arrays[1], interpret=True).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="scaled_silu: the kernels differentiate once"):
        jax.grad(twice)(arrays[0])


def test_auto_takes_the_reference_where_nothing_is_faster(arrays):
    text = jax.jit(scaled_silu).lower(*(jnp.asarray(each) for each in arrays[:2])).as_text()
    assert "triton" not in text
