"""Joint attention over split samples and their conditions equals that over whole ones."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from alload_jax.models.common.attention import attention
from alload_jax.models.common.joint_rows import packed_joint_rows
from alload_jax.models.common.segments import PADDING, PackedMetadata, SplitRows, segments_of
from alload_jax.sharding.mesh import BATCH_AXES, MeshConfig, make_mesh

HEADS, WIDTH, SLOTS, BEHIND = 4, 2, 4, 12

needs_devices = pytest.mark.skipif(
    len(jax.devices()) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)


class Sample(NamedTuple):
    """Tokens of latents, room for those of the condition, and those that there are."""

    latents: int
    room: int
    condition: int


class Group(NamedTuple):
    """A context group: split samples one after another, and a whole one behind on each rank."""

    region: int
    split: tuple[Sample, ...]
    whole: tuple[Sample, ...]


GROUPS = {
    "condition over a border": Group(8, (Sample(7, 4, 4), Sample(3, 1, 1)), (Sample(5, 3, 2),) * 2),
    "condition on ranks without latents": Group(
        4, (Sample(3, 12, 11), Sample(1, 0, 0)), (Sample(2, 6, 5), Sample(9, 2, 0)) * 2
    ),
    "dropped condition": Group(10, (Sample(14, 4, 0), Sample(1, 1, 1)), (Sample(6, 4, 0),) * 2),
    "several in a region": Group(
        9, (Sample(2, 2, 1), Sample(1, 3, 3), Sample(8, 2, 2)), (Sample(11, 1, 1),) * 2
    ),
}


class Laid(NamedTuple):
    """A group in rows, and where the tokens of each sample are.

    `latents` and `condition`: for each sample the (row, token) of its tokens; of the condition's
    one list for every rank that has a copy, and `joined`, the copy that is in the rank's own row.
    """

    metadata: PackedMetadata
    latents: list
    condition: list
    joined: list


def laid_out(group):
    """The metadata as a collator makes it."""
    ranks, region = len(group.whole), group.region
    table = np.zeros((2, ranks, SLOTS), np.int32)
    conditions, slots = np.zeros_like(table), np.full((ranks, SLOTS), PADDING, np.int32)
    split, whole = np.zeros((2, ranks, SLOTS), np.int32), np.zeros((2, ranks, 1), np.int32)
    used, latents, condition, joined = [0] * ranks, [], [], []

    def add(rank, offset, tokens, sample):
        slot, begin = used[rank], int(conditions[1, rank].sum())
        table[:, rank, slot], conditions[:, rank, slot] = (
            (offset, tokens),
            (begin, sample.condition),
        )
        used[rank] += 1
        return [(rank, begin + n) for n in range(sample.condition)]

    start = 0
    for number, sample in enumerate(group.split):
        split[:, :, number] = np.array([[start], [sample.latents]])
        places = [divmod(start + n, region) for n in range(sample.latents + sample.room)]
        copies = {}
        for rank in sorted({rank for rank, _ in places}):
            own = [(n, at) for n, (r, at) in enumerate(places) if r == rank]
            slots[rank, used[rank]] = number
            count = sum(n < sample.latents for n, _ in own)
            copies[rank] = add(rank, own[0][1], count, sample)
        behind = places[sample.latents : sample.latents + sample.condition]
        latents.append(places[: sample.latents])
        condition.append(list(copies.values()))
        joined.append([copies[rank][n] for n, (rank, _) in enumerate(behind)])
        start += sample.latents + sample.room
    for rank, sample in enumerate(group.whole):
        whole[:, rank, 0] = 0, sample.latents
        copy = add(rank, region, sample.latents, sample)
        latents.append([(rank, region + n) for n in range(sample.latents)])
        condition.append([copy])
        joined.append(copy)
    together = ranks * region
    rows = SplitRows(
        segments_of(whole, BEHIND),
        segments_of(split, together),
        region,
        (((0, 1), (BEHIND, 0)), ((0, len(group.split)), (together, 0))),
        slots=slots,
    )
    room = int(conditions[1].sum(axis=1).max()) + 1
    both = (segments_of(table, region + BEHIND), segments_of(conditions, room))
    metadata = PackedMetadata(*both, rows, (1, 1, 1), ((0, SLOTS), (together, 0)), room)
    return Laid(metadata, latents, condition, joined)


def of_places(x, places):
    rows, tokens = np.array(places, int).reshape(-1, 2).T
    return x[rows, tokens]


def of_places_of_all(x, places):
    return x[:, *np.array(places).T]


def alone(query, key, value):
    weights = jax.nn.softmax(jnp.einsum("shd,thd->hst", query, key) / np.sqrt(WIDTH), axis=-1)
    return jnp.einsum("hst,thd->shd", weights, value)


@needs_devices
@pytest.mark.parametrize("name", GROUPS)
def test_split_samples_attend_to_their_conditions_as_whole_ones(name):
    group = GROUPS[name]
    laid, ranks = laid_out(group), len(group.whole)
    mesh = make_mesh(MeshConfig(context=ranks), jax.devices()[:ranks])
    sharding = NamedSharding(mesh, jax.P(BATCH_AXES))
    rng = np.random.default_rng(0)

    def normal(tokens):
        return rng.normal(size=(4, ranks, tokens, HEADS, WIDTH)).astype(np.float32)

    latents, condition = (
        normal(part.ids.shape[1]) for part in (laid.metadata.tokens, laid.metadata.condition)
    )
    for copies in laid.condition:
        for copy in filter(None, copies):  # every rank computes the same
            condition[:, *np.array(copy).T] = of_places_of_all(condition, copies[0])
    *heads, weight = zip(latents, condition, strict=True)

    def jointly(heads):
        metadata = jax.device_put(laid.metadata, sharding)
        rows = packed_joint_rows(metadata, metadata.condition, sharding)
        joined = (rows.join(*part) for part in heads)
        mixed = attention(*joined, segments=rows.segments, sharding=sharding)
        found = rows.separate(mixed, latents.shape[2])
        valid = metadata.tokens.ids[..., None, None] != PADDING
        return jnp.sum(jnp.where(valid, found[0] * weight[0], 0)) + jnp.sum(
            found[1] * weight[1]
        ), found

    def one_by_one(heads):
        total, outputs = 0.0, []
        for tokens, joined in zip(laid.latents, laid.joined, strict=True):

            def both(pair, tokens=tokens, joined=joined):
                return jnp.concatenate([of_places(pair[0], tokens), of_places(pair[1], joined)])

            outputs.append(alone(*map(both, heads)))
            total += jnp.sum(outputs[-1] * both(weight))
        return total, outputs

    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.value_and_grad(jointly, has_aux=True))(jax.device_put(heads, sharding))
        expected = jax.jit(jax.value_and_grad(one_by_one, has_aux=True))(heads)
    (_, outputs), gradients = jax.device_get(found)
    conditions = np.zeros_like(condition[0])
    for places, joined, output in zip(laid.latents, laid.joined, expected[0][1], strict=True):
        np.testing.assert_allclose(
            of_places(outputs[0], places), output[: len(places)], rtol=1e-5, atol=1e-5
        )
        if joined:
            rows, tokens = np.array(joined).T
            conditions[rows, tokens] = output[len(places) :]
    # Copies on other ranks and padding are zero: nothing of them reaches an output.
    np.testing.assert_allclose(outputs[1], conditions, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, expected[1], strict=True):
        for part, exact in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(part, exact, rtol=1e-4, atol=1e-5)
