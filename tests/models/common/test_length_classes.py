"""Classes of lengths: which there are, and that attention shown by them is the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models.common import cudnn
from alload_jax.models.common.attention import xla_packed
from alload_jax.models.common.cudnn import cudnn_packed, length_classes
from alload_jax.models.common.segments import AttentionSegments, segments_of

HEADS, HEAD_DIM = 2, 8


@st.composite
def bounds(draw, tokens):
    """Lengths as a layout bounds them, of rows of `tokens`."""
    above = draw(st.sets(st.integers(1, tokens), min_size=1, max_size=12))
    most = draw(st.sets(st.integers(1, 300), min_size=len(above), max_size=len(above)))
    return tuple(zip([0, *sorted(above)], [*sorted(most, reverse=True), 0], strict=True))


@given(st.integers(1, 3), st.integers(1, 60).map(lambda n: 64 * n), st.data())
@settings(max_examples=60, deadline=None)
def test_classes_hold_every_length_and_never_cost_more_than_one(rows, tokens, data):
    lengths = data.draw(bounds(tokens))
    shape = rows, tokens
    classes = length_classes(shape, shape, lengths, None)
    assert [of.above for of in classes] == [0, *(of.longest for of in classes[:-1])]
    assert classes[-1].longest == lengths[-1][0]
    for of in classes:
        assert of.longest <= of.windows.queries
        assert of.windows.number * of.windows.queries == rows * tokens
        assert of.slots == rows * dict(lengths)[of.above]
    (single,) = length_classes(shape, shape, (lengths[0], lengths[-1]), None)
    assert sum(of.launched for of in classes) <= single.launched


def test_few_segments_or_segments_alike_are_one_class():
    shape = (1, 350_208)
    assert len(length_classes(shape, shape, ((0, 2), (334_560, 0)), None)) == 1
    assert len(length_classes(shape, shape, ((0, 224), (1560, 0)), None)) == 1


def test_many_short_segments_beside_a_long_one_cost_as_few_tokens_as_the_row_has():
    shape = (1, 350_208)
    lengths = ((0, 118), (8160, 5), (65_190, 2), (147_600, 1), (334_560, 0))
    classes = length_classes(shape, shape, lengths, None)
    assert sum(of.launched for of in classes) < 9 * shape[1]


class FakeCudnn:
    """What cuDNN's primitives compute of each slot; what they leave unwritten is not a number."""

    def __init__(self, name):
        self.bind = self.forward if "fwd" in name else self.backward

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
    def parts(cls, arrays):
        query, key, _, _, q_length, k_length, q_offset, k_offset, *_ = arrays
        tokens, real = cls.of_slots(query, q_length, q_offset)
        keys, inside = cls.of_slots(key, k_length, k_offset)
        q, k, v = (cls.taken(x, at) for x, at in zip(arrays, (tokens, keys, keys), strict=False))
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
    def forward(cls, *arrays, is_training, **_):
        tokens, _, _, (_, _, v), logits = cls.parts(arrays)
        weights = jax.nn.softmax(logits, axis=-1)
        output = cls.written(arrays[0], tokens, jnp.einsum("nhst,nthd->nshd", weights, v))
        return [output, jax.nn.logsumexp(logits, axis=-1)] if is_training else [output]

    @classmethod
    def backward(cls, *arrays, **_):
        statistics, output, grad = arrays[10:]
        tokens, keys, real, (q, k, v), logits = cls.parts(arrays)
        real = real[:, None, :, None]
        weights = jnp.exp(logits - jnp.where(real, statistics[..., None], jnp.inf))
        out, dout = cls.taken(output, tokens), cls.taken(grad, tokens)
        delta = jnp.einsum("nshd,nshd->nhs", out, dout)[..., None]
        dlogits = weights * (jnp.einsum("nshd,nthd->nhst", dout, v) - delta) / np.sqrt(HEAD_DIM)
        return [
            cls.written(arrays[0], tokens, jnp.einsum("nhst,nthd->nshd", dlogits, k)),
            cls.written(arrays[1], keys, jnp.einsum("nhst,nshd->nthd", dlogits, q)),
            cls.written(arrays[2], keys, jnp.einsum("nhst,nshd->nthd", weights, dout)),
        ]


def rows_of(lengths, slots, tokens):
    """Segments one after another; the row's rest is in none."""
    table = np.zeros((2, len(lengths), slots), np.int32)
    for row, own in enumerate(lengths):
        table[1, row, : len(own)] = own
        table[0, row, : len(own)] = np.cumsum([0, *own[:-1]])
    return segments_of(table, tokens)


LENGTHS = [[100, 1, 3, 7, 2, 20, 1, 1, 40], [8, 8, 150, 1, 2, 30]]
CONDITION = [[6, 6, 1, 11, 6, 6, 6, 6, 6], [9, 2, 12, 13, 9, 9]]


@pytest.mark.parametrize("alike", [True, False])
def test_attention_by_classes_is_that_of_one(alike, monkeypatch):
    monkeypatch.setattr(cudnn, "_primitive", FakeCudnn)
    monkeypatch.setattr(cudnn, "_options", lambda _: {})
    tokens = rows_of(LENGTHS, 60, 256)
    keys = tokens if alike else rows_of(CONDITION, 60, 64)
    lengths = ((0, 60), (8, 5), (40, 2), (160, 0))
    packed = AttentionSegments(tokens, keys, lengths, None if alike else 16)
    assert len(length_classes((2, 256), keys.ids.shape, lengths, packed.longest_key)) > 1
    rng = np.random.default_rng(0)
    shapes = [(2, 256), keys.ids.shape, keys.ids.shape, (2, 256)]
    *parts, weight = (
        jnp.asarray(rng.normal(size=(*shape, HEADS, HEAD_DIM)), jnp.float32) for shape in shapes
    )
    packed = jax.tree.map(jnp.asarray, packed)

    def loss(parts, within):
        output = within(*parts, packed)
        return jnp.sum(output * weight), output

    graded = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, output), grads = graded(parts, cudnn_packed)
    (_, expected), exact = graded(parts, xla_packed)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.jit(cudnn_packed)(*parts, packed), expected, 1e-5, 1e-5)
    for ours, theirs in zip(grads, exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_class_without_segments_changes_nothing(monkeypatch):
    monkeypatch.setattr(cudnn, "_primitive", FakeCudnn)
    monkeypatch.setattr(cudnn, "_options", lambda _: {})
    short = rows_of([[8] * 31, [1] * 255], 300, 256)
    packed = AttentionSegments(short, short, ((0, 300), (8, 3), (256, 0)), None)
    parts = [
        jnp.asarray(np.random.default_rng(n).normal(size=(2, 256, HEADS, HEAD_DIM)), jnp.float32)
        for n in range(3)
    ]
    tight = dataclasses.replace(packed, lengths=((0, 300), (8, 0)))
    packed, tight = jax.tree.map(jnp.asarray, (packed, tight))
    assert len(length_classes((2, 256), (2, 256), packed.lengths, None)) > 1
    within = jax.jit(cudnn_packed)
    np.testing.assert_allclose(within(*parts, packed), within(*parts, tight), 1e-5, 1e-6)
