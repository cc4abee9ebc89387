"""Classes of lengths: which there are, and that attention shown by them is the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.models import packed_attention
from alload_jax.models.length_classes import length_classes
from alload_jax.models.packed_attention import cudnn_packed, xla_packed
from alload_jax.models.segments import Packed, segments_of

HEADS, HEAD_DIM = 2, 8


@given(
    st.integers(1, 3),
    st.integers(1, 60).map(lambda n: 64 * n),
    st.integers(1, 300),
    st.floats(0.01, 1),
)
@settings(max_examples=60, deadline=None)
def test_classes_hold_every_length_and_never_cost_more_than_one(rows, tokens, slots, share):
    longest = max(1, int(share * tokens))
    shape = rows, tokens
    classes = length_classes(shape, shape, rows * slots, (longest, longest), alike=True)
    assert [of.above for of in classes] == [-1, *(of.longest for of in classes[:-1])]
    assert classes[-1].longest == longest
    assert classes[0].slots == rows * slots
    for of in classes:
        assert of.longest <= of.windows.queries
        assert of.windows.number * of.windows.queries == rows * tokens
        # So many segments longer than `above` would fill all rows.
        assert of.slots == rows * slots or (of.slots + 1) * (of.above + 1) > rows * tokens
    single = length_classes(shape, shape, 1, (longest, longest), alike=True)[-1].windows
    assert sum(of.launched for of in classes) <= rows * slots * single.queries


def test_many_short_segments_beside_a_long_one_cost_as_few_tokens_as_the_row_has():
    shape = (1, 350_208)
    classes = length_classes(shape, shape, 274, (334_560, 334_560), alike=True)
    assert sum(of.launched for of in classes) < 20 * shape[1]
    assert len(length_classes(shape, shape, 2, (334_560, 334_560), alike=True)) == 1


class FakeCudnn:
    """What cuDNN's primitives compute, slot by slot; what they leave unwritten is not a number."""

    def __init__(self, name):
        self.bind = self.forward if "fwd" in name else self.backward

    @staticmethod
    def slots(arrays):
        query, key, _, _, q_length, k_length, q_offset, k_offset, *_ = arrays
        elements = query.shape[2] * query.shape[3]
        for n in range(q_length.size):
            sides = []
            for x, length, offset in ((query, q_length, q_offset), (key, k_length, k_offset)):
                number, window = x.shape[:2]
                place = jnp.arange(window)
                inside = place < length.reshape(-1)[n]
                token = offset.reshape(-1)[n] // elements + place
                sides += [jnp.where(inside, token, number * window), inside]
            yield n, *sides

    @staticmethod
    def flat(x):
        return jnp.asarray(x, jnp.float32).reshape(-1, *x.shape[2:])

    @classmethod
    def logits(cls, arrays, tokens, keys, inside):
        q, k = (
            cls.flat(x).at[at].get(mode="fill", fill_value=0)
            for x, at in zip(arrays[:2], (tokens, keys), strict=True)
        )
        return jnp.where(inside, jnp.einsum("shd,thd->hst", q, k) / np.sqrt(HEAD_DIM), -jnp.inf)

    @classmethod
    def forward(cls, *arrays, is_training, **_):
        output = jnp.full_like(cls.flat(arrays[0]), jnp.nan)
        statistics = []
        for _, tokens, _, keys, inside in cls.slots(arrays):
            logits = cls.logits(arrays, tokens, keys, inside)
            weights = jax.nn.softmax(logits, axis=-1)
            v = cls.flat(arrays[2]).at[keys].get(mode="fill", fill_value=0)
            output = output.at[tokens].set(jnp.einsum("hst,thd->shd", weights, v), mode="drop")
            statistics.append(jax.nn.logsumexp(logits, axis=-1))
        shaped = output.reshape(arrays[0].shape)
        return [shaped, jnp.stack(statistics)] if is_training else [shaped]

    @classmethod
    def backward(cls, *arrays, **_):
        statistics, output, grad = arrays[10:]
        grads = [jnp.full_like(cls.flat(x), jnp.nan) for x in arrays[:3]]
        for n, tokens, real, keys, inside in cls.slots(arrays):
            logits = cls.logits(arrays, tokens, keys, inside)
            lse = jnp.where(real, statistics[n], 0.0)[..., None]
            weights = jnp.where(real[None, :, None] & inside, jnp.exp(logits - lse), 0.0)
            out, dout, q = (
                cls.flat(x).at[tokens].get(mode="fill", fill_value=0)
                for x in (output, grad, arrays[0])
            )
            k, v = (cls.flat(x).at[keys].get(mode="fill", fill_value=0) for x in arrays[1:3])
            delta = jnp.einsum("shd,shd->hs", out, dout)[..., None]
            dlogits = weights * (jnp.einsum("shd,thd->hst", dout, v) - delta) / np.sqrt(HEAD_DIM)
            found = (
                jnp.einsum("hst,thd->shd", dlogits, k),
                jnp.einsum("hst,shd->thd", dlogits, q),
                jnp.einsum("hst,shd->thd", weights, dout),
            )
            for place, (at, part) in enumerate(zip((tokens, keys, keys), found, strict=True)):
                grads[place] = grads[place].at[at].set(part, mode="drop")
        return [x.reshape(like.shape) for x, like in zip(grads, arrays[:3], strict=True)]


def rows_of(lengths, slots, tokens):
    """Segments one after another, the row's rest one more."""
    table = np.zeros((2, len(lengths), slots), np.int32)
    for row, own in enumerate(lengths):
        own = [*own, tokens - sum(own)]
        table[1, row, : len(own)] = own
        table[0, row, : len(own)] = np.cumsum([0, *own[:-1]])
    return segments_of(table, tokens)


LENGTHS = [[100, 1, 3, 7, 2, 20, 1, 1, 40], [8, 8, 150, 1, 2, 30]]
CONDITION = [[6, 6, 1, 11, 6, 6, 6, 6, 6], [9, 2, 12, 13, 9, 9]]


@pytest.mark.parametrize("alike", [True, False])
def test_attention_by_classes_is_that_of_one(alike, monkeypatch):
    monkeypatch.setattr(packed_attention, "_primitive", FakeCudnn)
    monkeypatch.setattr(packed_attention, "_options", lambda _: {})
    tokens = rows_of(LENGTHS, 60, 256)
    keys = tokens if alike else rows_of(CONDITION, 60, 64)
    packed = Packed(tokens, keys, (160, 160 if alike else 16), alike)
    classes = length_classes((2, 256), keys.ids.shape, 120, packed.longest, alike)
    assert len(classes) > 1
    rng = np.random.default_rng(0)
    shapes = [(2, 256), keys.ids.shape, keys.ids.shape, (2, 256)]
    *parts, weight = (
        jnp.asarray(rng.normal(size=(*shape, HEADS, HEAD_DIM)), jnp.float32) for shape in shapes
    )
    packed = jax.tree.map(jnp.asarray, packed)

    def loss(parts, within):
        output = within(*parts, packed)
        return jnp.sum(output * weight), output

    (_, output), grads = jax.value_and_grad(loss, has_aux=True)(parts, cudnn_packed)
    (_, expected), exact = jax.value_and_grad(loss, has_aux=True)(parts, xla_packed)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(cudnn_packed(*parts, packed), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(grads, exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_class_without_segments_changes_nothing(monkeypatch):
    monkeypatch.setattr(packed_attention, "_primitive", FakeCudnn)
    monkeypatch.setattr(packed_attention, "_options", lambda _: {})
    short = rows_of([[8] * 31, [1] * 255], 300, 256)
    packed = Packed(short, short, (256, 256), alike=True)
    parts = [
        jnp.asarray(np.random.default_rng(n).normal(size=(2, 256, HEADS, HEAD_DIM)), jnp.float32)
        for n in range(3)
    ]
    tight = dataclasses.replace(packed, longest=(8, 8))
    packed, tight = jax.tree.map(jnp.asarray, (packed, tight))
    assert len(length_classes((2, 256), (2, 256), 600, packed.longest, alike=True)) > 1
    np.testing.assert_allclose(
        cudnn_packed(*parts, packed), cudnn_packed(*parts, tight), rtol=1e-5, atol=1e-6
    )
