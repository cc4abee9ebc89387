import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alload_jax.models.common.attention import attention
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh


def oracle(query, key, value):
    query, key, value = (np.asarray(part, np.float64) for part in (query, key, value))
    logits = np.einsum("bshd,bthd->bhst", query, key) / np.sqrt(query.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhst,bthd->bshd", weights / weights.sum(-1, keepdims=True), value)


def heads(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (33, 5), (4, 77)])
def test_equals_the_float64_oracle(queries, keys):
    query, key, value = (heads((2, n, 3, 8), i) for i, n in enumerate((queries, keys, keys)))
    np.testing.assert_allclose(
        attention(query, key, value), oracle(query, key, value), rtol=2e-5, atol=2e-6
    )


LENGTHS = np.array([7, 1, 0, 4])


def test_tokens_behind_a_row_s_length_neither_attend_nor_are_attended_to():
    parts = [heads((4, 7, 3, 8), i) for i in range(3)]
    found = np.asarray(attention(*parts, lengths=jnp.asarray(LENGTHS)))
    for row, length in enumerate(LENGTHS):
        alone = oracle(*(part[row : row + 1, :length] for part in parts)) if length else []
        np.testing.assert_allclose(found[row, :length], np.reshape(alone, (-1, 3, 8)), rtol=2e-5)
        np.testing.assert_array_equal(found[row, length:], 0)


def masked_gradients(parts, implementation):
    """Of a sum over all outputs, those of masked tokens too."""

    def total(*parts):
        output = attention(*parts, lengths=jnp.asarray(LENGTHS), implementation=implementation)
        return jnp.sum(
            output.astype(jnp.float32) * jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        )

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*parts)


def test_masked_tokens_have_no_gradient_even_if_they_are_not_finite():
    parts = [heads((4, 7, 3, 8), i) for i in range(3)]
    masked = (np.arange(7) >= LENGTHS[:, None])[..., None, None]
    clean = masked_gradients(parts, "xla")
    spoilt = masked_gradients([jnp.where(masked, jnp.nan, part) for part in parts], "xla")
    for found, other in zip(clean, spoilt, strict=True):
        np.testing.assert_array_equal(found, other)
        np.testing.assert_array_equal(np.where(masked, found, 0), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 37])
def test_cudnn_masks_as_xla_does(tokens):
    parts = [heads((4, tokens, 4, 32), i, jnp.bfloat16) for i in range(3)]
    plain = masked_gradients([part.astype(jnp.float32) for part in parts], "xla")
    for found, expected in zip(masked_gradients(parts, "cudnn"), plain, strict=True):
        expected = np.asarray(expected, np.float64)
        error = np.linalg.norm(np.asarray(found, np.float64) - expected)
        assert error < 2e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("lengths", [None, (5, 8)], ids=["whole", "masked"])
def test_query_key_and_value_are_split_alike(lengths):
    """JAX's cuDNN attention refuses what is not, and XLA is free to split values by heads."""
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:4])
    sharding, shape = batch_sharding(mesh), jax.ShapeDtypeStruct((4, 8, 2, 16), jnp.bfloat16)
    found = jax.make_jaxpr(
        lambda *parts: attention(
            *parts, lengths=lengths and jnp.array(lengths * 2), sharding=sharding
        )
    )(shape, shape, shape)
    constraints = [
        each.params["sharding"].spec
        for each in found.eqns
        if each.primitive.name == "sharding_constraint"
    ]
    assert constraints == [jax.P(sharding.spec[0], None, "tensor")] * 3


def test_cudnn_on_a_cpu_is_refused_with_the_reason():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU here")
    query = heads((1, 4, 2, 8), 0, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="the backend is 'cpu'"):
        attention(query, query, query, implementation="cudnn")


def test_an_unknown_implementation_is_named():
    query = heads((1, 4, 2, 8), 0)
    with pytest.raises(ValueError, match="'flash9'"):
        attention(query, query, query, implementation="flash9")


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (37, 37), (272, 2), (1000, 77)])
def test_cudnn_equals_the_oracle_in_values_and_gradients(queries, keys):
    parts = [heads((2, n, 4, 32), i, jnp.bfloat16) for i, n in enumerate((queries, keys, keys))]

    def total(implementation, *parts):
        output = attention(*parts, implementation=implementation)
        return jnp.sum(
            output.astype(jnp.float32) * jnp.cos(jnp.arange(output.size)).reshape(output.shape)
        )

    output = attention(*parts, implementation="cudnn")
    expected = oracle(*parts)
    assert np.linalg.norm(np.asarray(output, np.float64) - expected) < 1e-2 * np.linalg.norm(
        expected
    )
    fused = jax.grad(lambda *p: total("cudnn", *p), argnums=(0, 1, 2))(*parts)
    plain = jax.grad(lambda *p: total("xla", *p), argnums=(0, 1, 2))(
        *(part.astype(jnp.float32) for part in parts)
    )
    for ours, theirs in zip(fused, plain, strict=True):
        theirs = np.asarray(theirs, np.float64)
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert error < 2e-2 * np.linalg.norm(theirs)
