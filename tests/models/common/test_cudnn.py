"""The calls of cuDNN: as JAX makes them, by classes of lengths, and on a GPU."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_near, graded, heads, masked, packed_of, same_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common import cudnn
from alload_jax.models.common.attention import (
    attention,
    query_blocks,
    triton_packed,
    xla_packed,
)
from alload_jax.models.common.cudnn import cudnn_packed, cudnn_rows, length_classes
from alload_jax.models.common.segments import PADDING, AttentionSegments

HEADS, HEAD_DIM = 2, 8
LOWERING = "/jax/core/compile/jaxpr_to_mlir_module_duration"


def parts_of(rows, total_q, total_k, num_heads=4, head_dim=64, dtype=jnp.bfloat16):
    sizes = (total_q, total_k, total_k)
    return [heads((rows, n, num_heads, head_dim), i, dtype) for i, n in enumerate(sizes)]


def cudnn_calls(function, *parts):
    """The custom calls of a function's gradients, lowered for a GPU on any machine."""
    grads = jax.grad(lambda *p: jnp.sum(function(*p).astype(jnp.float32)), argnums=(0, 1, 2))
    traced = jax.jit(grads).trace(*parts)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @__cudnn" in line]
    return [re.sub(r"%[\w#:]+", "%", call).strip() for call in calls]


@pytest.fixture
def of_jax(monkeypatch):
    """JAX's module of cuDNN's attention, which takes this machine for one with a Hopper GPU."""
    module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    checks = {"check_cudnn_version": 91300, "check_compute_capability": True}
    for name, value in (checks | {"is_cuda_compute_capability_equal": False}).items():
        monkeypatch.setattr(module, name, lambda *_, value=value: value)
    return module


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("of_jax")
def test_cudnn_is_called_as_jax_calls_it(masked):
    parts = [jax.ShapeDtypeStruct((2, n, 4, 32), jnp.bfloat16) for n in (64, 32, 32)]
    lengths = (jnp.array([3, 64]), jnp.array([5, 32])) if masked else None
    found = cudnn_calls(lambda *p: cudnn_rows(*p, lengths), *parts)
    names = ("query_seq_lengths", "key_value_seq_lengths")
    given = dict(zip(names, lengths, strict=True)) if masked else {}
    theirs = cudnn_calls(
        lambda *p: jax.nn.dot_product_attention(*p, implementation="cudnn", **given), *parts
    )
    assert len(found) == 2
    assert found == theirs


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cudnn_is_called_for_packed_rows_as_jax_calls_it(of_jax, dtype):
    """JAX shifts lengths and offsets of unused slots, which changes no call."""
    lengths, offsets = ([jnp.zeros((2, n), jnp.int32)] * 2 for n in (3, 4))
    parts = [jax.ShapeDtypeStruct((2, n, 4, 32), dtype) for n in (64, 32, 32)]

    def theirs(query, key, value):
        given = (None, None, *lengths, *offsets)
        options = {"scale": 1 / 32**0.5, "mask_type": of_jax.MaskType.PADDING}
        return of_jax.dot_product_attention(query, key, value, *given, **options)

    @jax.custom_vjp
    def ours(*heads):
        return cudnn.forward(cudnn.CudnnInputs(*heads, lengths, offsets), is_training=False)[0]

    def kept(*heads):
        inputs = cudnn.CudnnInputs(*heads, lengths, offsets)
        output, statistics = cudnn.forward(inputs, is_training=True)
        return output, (heads, statistics, output)

    def back(saved, grad):
        heads, *results = saved
        return tuple(cudnn.backward(cudnn.CudnnInputs(*heads, lengths, offsets), *results, grad))

    ours.defvjp(kept, back)
    assert cudnn_calls(ours, *parts) == cudnn_calls(theirs, *parts)


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


@st.composite
def bounds(draw, tokens):
    """Lengths as a layout bounds them, of rows of `tokens`."""
    above = draw(st.sets(st.integers(1, tokens), min_size=1, max_size=12))
    most = draw(st.sets(st.integers(1, 300), min_size=len(above), max_size=len(above)))
    return tuple(zip([0, *sorted(above)], [*sorted(most, reverse=True), 0], strict=True))


@given(st.integers(1, 3), st.integers(1, 60).map(lambda n: 64 * n), st.data())
@settings(max_examples=30, deadline=None)
def test_classes_hold_every_length_and_never_cost_more_than_one(rows, tokens, data):
    lengths = data.draw(bounds(tokens))
    shape = rows, tokens
    classes = length_classes(shape, shape, lengths, None)
    assert [of.above for of in classes] == [0, *(of.longest for of in classes[:-1])]
    assert classes[-1].longest == lengths[-1][0]
    for of in classes:
        assert of.longest <= of.queries
        assert of.windows * of.queries == rows * tokens
        assert of.slots == rows * dict(lengths)[of.above]
    (single,) = length_classes(shape, shape, (lengths[0], lengths[-1]), None)
    assert sum(of.launched for of in classes) <= single.launched


def test_many_short_segments_beside_a_long_one_cost_as_few_tokens_as_the_row_has():
    for lengths, classes in (
        (((0, 2), (334_560, 0)), 1),  # few segments
        (((0, 224), (1560, 0)), 1),  # segments alike
        (((0, 118), (8160, 5), (65_190, 2), (147_600, 1), (334_560, 0)), None),
    ):
        shape = (1, 350_208)
        found = length_classes(shape, shape, lengths, None)
        if classes:
            assert len(found) == classes
        else:
            assert sum(of.launched for of in found) < 9 * shape[1]


class FakeCudnn:
    """What cuDNN computes of each slot; what it leaves unwritten is not a number."""

    @staticmethod
    def flat(x):
        return jnp.asarray(x, jnp.float32).reshape(-1, *x.shape[2:])

    @classmethod
    def of_slots(cls, x, length, offset):
        """Tokens [slots, window] of each slot, counted over all windows; and which are real."""
        number, window, *of_token = x.shape
        inside = jnp.arange(window) < length.reshape(-1, 1)
        first = offset.reshape(-1)[: length.size, None] // np.prod(of_token)
        return jnp.where(inside, first + jnp.arange(window), number * window), inside

    @classmethod
    def parts(cls, inputs):
        (tokens, real), (keys, inside) = (
            cls.of_slots(*each)
            for each in zip(inputs[:2], inputs.lengths, inputs.offsets, strict=True)
        )
        q, k, v = (cls.taken(x, at) for x, at in zip(inputs[:3], (tokens, keys, keys), strict=True))
        logits = jnp.einsum("nshd,nthd->nhst", q, k) / np.sqrt(HEAD_DIM)
        logits = jnp.where(inside[:, None, None], logits, -jnp.inf)
        return tokens, keys, real, (q, k, v), logits

    @classmethod
    def taken(cls, x, tokens):
        return cls.flat(x).at[tokens].get(mode="fill", fill_value=0)

    @classmethod
    def written(cls, like, tokens, found):
        unwritten = jnp.full_like(cls.flat(like), jnp.nan)
        return unwritten.at[tokens].set(found, mode="drop").reshape(like.shape)

    @classmethod
    def forward(cls, inputs, *, is_training):
        tokens, _, _, (_, _, v), logits = cls.parts(inputs)
        weights = jax.nn.softmax(logits, axis=-1)
        output = cls.written(inputs.query, tokens, jnp.einsum("nhst,nthd->nshd", weights, v))
        return [output, jax.nn.logsumexp(logits, axis=-1)] if is_training else [output]

    @classmethod
    def backward(cls, inputs, statistics, output, grad):
        tokens, keys, real, (q, k, v), logits = cls.parts(inputs)
        real = real[:, None, :, None]
        weights = jnp.exp(logits - jnp.where(real, statistics[..., None], jnp.inf))
        out, dout = cls.taken(output, tokens), cls.taken(grad, tokens)
        delta = jnp.einsum("nshd,nshd->nhs", out, dout)[..., None]
        dlogits = weights * (jnp.einsum("nshd,nthd->nhst", dout, v) - delta) / np.sqrt(HEAD_DIM)
        return [
            cls.written(inputs.query, tokens, jnp.einsum("nhst,nthd->nshd", dlogits, k)),
            cls.written(inputs.key, keys, jnp.einsum("nhst,nshd->nthd", dlogits, q)),
            cls.written(inputs.value, keys, jnp.einsum("nhst,nshd->nthd", weights, dout)),
        ]


@pytest.fixture
def fake_cudnn(monkeypatch):
    for name in ("forward", "backward"):
        monkeypatch.setattr(cudnn, name, getattr(FakeCudnn, name))


def one_behind_another(lengths):
    ends = [np.cumsum([0, *own]).tolist() for own in lengths]
    return [list(zip(end, own, strict=False)) for end, own in zip(ends, lengths, strict=True)]


LENGTHS = one_behind_another([[100, 1, 3, 7, 2, 20, 1, 1, 40], [8, 8, 150, 1, 2, 30]])
CONDITION = one_behind_another([[6, 6, 1, 11, 6, 6, 6, 6, 6], [9, 2, 12, 13, 9, 9]])


@pytest.mark.parametrize("keys", [LENGTHS, CONDITION], ids=["alike", "condition"])
@pytest.mark.usefixtures("fake_cudnn")
def test_attention_by_classes_is_that_of_one(keys):
    total = 256 if keys is LENGTHS else 64
    packed = packed_of(LENGTHS, keys, 256, total, 60)
    longest = None if keys is LENGTHS else 16
    packed = AttentionSegments(
        packed.query, packed.key, ((0, 60), (8, 5), (40, 2), (160, 0)), longest
    )
    assert len(length_classes((2, 256), (2, total), packed.lengths, longest)) > 1
    parts = parts_of(2, 256, total, HEADS, HEAD_DIM, jnp.float32)
    expected = graded(lambda *p: xla_packed(*p, packed), parts)
    found = graded(lambda *p: cudnn_packed(*p, packed), parts)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    alone = jax.jit(cudnn_packed)(*parts, packed)  # without a gradient
    np.testing.assert_allclose(alone, expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fake_cudnn")
def test_a_class_without_segments_changes_nothing():
    rows = one_behind_another([[8] * 31, [1] * 255])
    packed = packed_of(rows, rows, 256, 256, 300)
    wide = dataclasses.replace(packed, lengths=((0, 300), (8, 3), (256, 0)))
    tight = dataclasses.replace(packed, lengths=((0, 300), (8, 0)))
    assert len(length_classes((2, 256), (2, 256), wide.lengths, None)) > 1
    parts = parts_of(2, 256, 256, HEADS, HEAD_DIM, jnp.float32)
    within = jax.jit(cudnn_packed)
    np.testing.assert_allclose(within(*parts, wide), within(*parts, tight), 1e-5, 1e-6)


SHORT = [(n * 16, 16) for n in range(40)] + [(640, 1000), (1640, 300), (1940, 108)]
MANY = [(n * 60, 60) for n in range(17)] + [(1020, 4)]
ODD = [(0, 1000), (1000, 77), (1077, 3), (1080, 1)]
CASES = {
    "odd lengths, one token, unused slots": ([ODD], [ODD], 1081, 1081, 7),
    "queries and keys of other lengths, unused keys": (
        [[(0, 300), (300, 220)], [(0, 520)]],
        [[(0, 64), (64, 1)], [(0, 64)]],
        520,
        192,
        3,
    ),
    "tokens of no segment, and a row without any": (
        [[(8, 300), (400, 100)], []],
        [[(0, 64), (64, 64)], []],
        520,
        192,
        3,
    ),
    "one slot": ([[(0, 128)]], [[(0, 100)]], 128, 128, 1),
    "segments across windows": (
        [[(0, 500), (500, 12), (512, 300), (812, 212)], [(0, 512), (512, 500), (1012, 12)]],
        [[(0, 64), (64, 1), (65, 64), (129, 64)], [(0, 64), (64, 64), (128, 64)]],
        1024,
        256,
        5,
    ),
    "a long segment beside short ones, by classes": ([SHORT], [SHORT], 2048, 2048, 50),
    "many short segments": ([MANY], [MANY], 1024, 1024, 20),
}


@pytest.mark.parametrize("name", CASES)
def test_cudnn_is_called_forward_and_backward_for_each_class(name):
    """Lowered for a GPU on any machine: what JAX's primitives refuse is found without one."""
    queries, _, total_q, total_k, _ = CASES[name]
    packed = packed_of(*CASES[name])
    shapes = (len(queries), total_q), (len(queries), total_k)
    calls = cudnn_calls(lambda *p: cudnn_packed(*p, packed), *parts_of(*shapes[0], total_k))
    assert len(calls) == 2 * len(length_classes(*shapes, packed.lengths, packed.longest_key))


@pytest.mark.parametrize("name", CASES)
def test_lists_of_blocks_are_attention_within_segments(name):
    """Also where tokens of no segment, on either side, are not finite."""
    packed, (queries, _, *totals, _) = packed_of(*CASES[name]), CASES[name]
    parts = parts_of(len(queries), *totals, HEADS, HEAD_DIM, jnp.float32)
    expected = graded(lambda *p: xla_packed(*p, packed), parts)
    sides = (packed.query, packed.key, packed.key)
    parts = [
        jnp.where((side.ids == PADDING)[..., None, None], jnp.nan, part)
        for part, side in zip(parts, sides, strict=True)
    ]
    found = graded(lambda *p: triton_packed(*p, packed, implementation="xla"), parts)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


def test_the_kernel_takes_the_lists_of_segments():
    name = "tokens of no segment, and a row without any"
    packed, (queries, _, *totals, _) = packed_of(*CASES[name]), CASES[name]
    parts = parts_of(len(queries), *totals, num_heads=1)
    exact = [part.astype(jnp.float32) for part in parts]
    expected = graded(lambda *p: xla_packed(*p, packed), exact)
    found = graded(lambda *p: triton_packed(*p, packed, interpret=True), parts)
    assert_near(found[:1], expected[:1], 1e-2)
    assert_near(found[1:], expected[1:], 2e-2)


def check(parts, segments=None, allowed=True, implementation="cudnn"):
    found = graded(lambda *p: attention(*p, segments, implementation=implementation), parts)
    exact = [part.astype(jnp.float32) for part in parts]
    expected = graded(lambda *p: masked(*p, allowed), exact)
    assert all(np.isfinite(each).all() for each in found)
    assert_near(found[:1], expected[:1], 1e-2)
    assert_near(found[1:], expected[1:], 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("implementation", ["cudnn", "triton"])
def test_packed_rows_equal_the_oracle(name, head_dim, implementation):
    packed, (queries, _, *totals, _) = packed_of(*CASES[name]), CASES[name]
    parts = parts_of(len(queries), *totals, head_dim=head_dim)
    check(parts, packed, same_sample(packed.query.ids, packed.key.ids), implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 37])
def test_cudnn_masks_tokens_behind_a_row_s_length(tokens):
    rows = [[(0, 7)], [(0, 1)], [], [(0, 4)]]
    packed = packed_of(rows, rows, tokens, tokens, 1)
    allowed = same_sample(packed.query.ids, packed.key.ids)
    check(parts_of(4, tokens, tokens, head_dim=32), packed, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (37, 37), (272, 2), (1000, 77)])
def test_cudnn_equals_the_oracle_on_whole_rows(queries, keys):
    check(parts_of(2, queries, keys, head_dim=32))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "queries"), [(1, 32_760), (2, 8190)])
def test_cudnn_in_blocks_equals_cudnn_without(rows, queries):
    parts = parts_of(rows, queries, 512, 12, 128)
    assert query_blocks(*parts[:2]) > 1
    expected = graded(lambda *p: jax.nn.dot_product_attention(*p, implementation="cudnn"), parts)
    assert_near(graded(attention, parts), expected, 0.01)
