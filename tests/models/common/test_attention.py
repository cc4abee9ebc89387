import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import attention
from alload_jax.models.common.cudnn import cudnn_rows
from alload_jax.models.common.segments import AttentionSegments, Segments
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh

LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"


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


def first_tokens(lengths):
    """Rows of one segment each, which begins at the first token."""
    length = jnp.asarray(lengths)[:, None]
    segments = Segments(jnp.zeros_like(length), length, None)
    return AttentionSegments(segments, segments, ((0, 1), (int(max(lengths)), 0)), None)


def test_tokens_behind_a_row_s_length_neither_attend_nor_are_attended_to():
    parts = [heads((4, 7, 3, 8), i) for i in range(3)]
    found = np.asarray(attention(*parts, segments=first_tokens(LENGTHS)))
    for row, length in enumerate(LENGTHS):
        alone = oracle(*(part[row : row + 1, :length] for part in parts)) if length else []
        np.testing.assert_allclose(found[row, :length], np.reshape(alone, (-1, 3, 8)), rtol=2e-5)
        np.testing.assert_array_equal(found[row, length:], 0)


def masked_gradients(parts, implementation):
    """Of a sum over all outputs, those of masked tokens too."""

    def total(*parts):
        output = attention(*parts, segments=first_tokens(LENGTHS), implementation=implementation)
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


def cudnn_calls(function, *parts):
    """The custom calls of a function's gradients, lowered for a GPU on any machine."""
    grads = jax.grad(lambda *p: jnp.sum(function(*p).astype(jnp.float32)), argnums=(0, 1, 2))
    traced = jax.jit(grads).trace(*parts)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @__cudnn" in line]
    return [re.sub(r"%[\w#:]+", "%", call).strip() for call in calls]


@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_is_called_as_jax_calls_it(masked, monkeypatch):
    parts = [jax.ShapeDtypeStruct((2, n, 4, 32), jnp.bfloat16) for n in (64, 32, 32)]
    lengths = (jnp.array([3, 64]), jnp.array([5, 32])) if masked else None
    found = cudnn_calls(lambda *p: cudnn_rows(*p, lengths), *parts)
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    for name, value in (
        ("check_cudnn_version", 91300),
        ("check_compute_capability", True),
        ("is_cuda_compute_capability_equal", False),
    ):
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    names = ("query_seq_lengths", "key_value_seq_lengths")
    given = dict(zip(names, lengths, strict=True)) if masked else {}
    theirs = cudnn_calls(
        lambda *p: jax.nn.dot_product_attention(*p, implementation="cudnn", **given), *parts
    )
    assert len(found) == 2
    assert found == theirs


def test_a_program_with_cudnn_is_lowered_once_for_all_devices():
    """JAX lowers its own primitives of attention anew for each device."""
    lowered = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, fun_name="", **__: lowered.append(fun_name) if event == LOWERING else None
    )

    @jax.jit
    @jax.grad
    def total(query):
        return jnp.sum(cudnn_rows(query, query, query).astype(jnp.float32))

    for device in jax.devices()[:3]:
        placed = jax.sharding.SingleDeviceSharding(device)
        query = jax.ShapeDtypeStruct((2, 32, 4, 32), jnp.bfloat16, sharding=placed)
        total.trace(query).lower(lowering_platforms=("cuda",))
    assert len(lowered) == 1


@pytest.mark.parametrize("lengths", [None, (5, 8)], ids=["whole", "masked"])
def test_each_device_computes_its_own_rows_and_heads(lengths):
    mesh = make_mesh(MeshConfig(tensor=2), jax.devices()[:4])
    sharding, parts = batch_sharding(mesh), [heads((4, 8, 2, 16), i) for i in range(3)]
    segments = lengths and first_tokens(lengths * 2)
    run = jax.jit(lambda *p: attention(*p, segments, sharding=sharding))
    placed = jax.device_put(parts, NamedSharding(mesh, jax.P(sharding.spec[0], None, "tensor")))
    program = run.lower(*placed).compile().as_text()
    assert not any(word in program for word in ("all-gather", "all-reduce", "all-to-all"))
    expected = attention(*parts, segments)
    np.testing.assert_allclose(run(*placed), expected, rtol=1e-5, atol=1e-6)


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
