"""Sparse self-attention: layout, profile, switching, and the model that uses it."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import assert_near, graded, laid_out
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.errors import InputError
from alload_jax.models.common.segments import (
    PackedMetadata,
    SplitRows,
    SplitTiles,
    TiledSegment,
    TileLayout,
    empty_layout,
    from_tiles,
    lay_out,
    to_tiles,
    with_conditions,
)
from alload_jax.models.common.sparse_attention import config as switching
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig, update_switches
from alload_jax.models.common.sparse_attention.layer import (
    Choice,
    Heads,
    attend,
    attend_split,
    balanced_order,
    exchange_seconds,
    head_exchanges,
    measure,
    measure_split,
)
from alload_jax.models.common.sparse_attention.selectors import (
    Features,
    Predictor,
    Sample,
    profile,
    sample_attention,
)
from alload_jax.models.common.sublayers import apply_rotary
from alload_jax.models.families import abstract_model, family_of, initial_variables
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.devices import DEVICES
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from pallas_kernels.block_sparse_attention import PooledScores

SMALL = WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=3, dtype="float32")
GRID = (3, 12, 14)


def sparse(**fields):
    loose = {"min_tokens": 0, "capacities": (), "max_density": 0.5, "min_sparsity": 0.8}
    return SparseAttentionConfig(**loose | fields)


def with_sparse(remat="none", **fields):
    return dataclasses.replace(SMALL, sparse_attention=sparse(**fields), remat=remat)


def model_of(config):
    """(parameters → model, random parameters of which every one has an effect)."""
    graph, shapes = abstract_model(config)[:2]
    rng, variables = np.random.default_rng(0), flatten_dict(initial_variables(config))
    params = {
        name: rng.normal(0, 0.2, leaf.shape).astype(np.float32) + ("scale" in name)
        for name, leaf in flatten_dict(shapes).items()
    }

    def merged(params):
        return nnx.merge(graph, unflatten_dict(flatten_dict(params) | variables))

    return merged, unflatten_dict(params)


def inputs(rows=2):
    shape = (rows, GRID[0], 2 * GRID[1], 2 * GRID[2], 1)
    latents = jax.random.normal(jax.random.key(3), shape)
    return latents, jnp.array([100.0, 700.0])[:rows], jnp.zeros((rows, 1), jnp.int32)


def run(config, graded=True):
    """(velocity [2, ...], auxiliary values), and gradients by name."""
    merged, params = model_of(config)

    def loss(params):
        output = merged(params).forward(*inputs())
        return (output.velocity**2).mean(), output

    if not graded:
        return tuple(jax.jit(loss)(params)[1])
    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(params)
    return *output, gradients


def jaxpr_of(config):
    merged, params = model_of(config)
    loss = jax.grad(lambda params: merged(params).forward(*inputs(1)).velocity.sum())
    return str(jax.make_jaxpr(loss)(params))


@pytest.fixture(scope="module")
def dense():
    return run(SMALL)


# ---------------------------------------------------------------- layout and lists


@given(grid=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=5, deadline=None)
def test_tiles_hold_each_token_once_and_their_gradient_is_the_inverse(grid):
    tokens = math.prod(grid)
    layout = empty_layout(2, tokens + 5, -(-tokens // 64) + 1, 64)
    for row, offset in enumerate((0, 5)):
        lay_out(layout, row, [TiledSegment(0, offset, grid)])
    x = np.arange(2 * (tokens + 5) * 3, dtype=np.float32).reshape(2, tokens + 5, 3) + 1
    x[0, tokens:] = x[1, :5] = 0  # of no segment
    tiles, pull = jax.vjp(lambda x: to_tiles(x, layout), jnp.asarray(x))
    np.testing.assert_array_equal(from_tiles(tiles, layout), x)
    assert np.count_nonzero(tiles) == 2 * tokens * 3
    assert layout.tokens.sum(axis=1).tolist() == [tokens] * 2
    weight = jnp.asarray(np.random.default_rng(0).normal(size=tiles.shape), jnp.float32)
    np.testing.assert_array_equal(pull(weight)[0], from_tiles(weight, layout))
    with pytest.raises(ValueError, match="row 1: its samples have more than"):
        lay_out(layout, 1, [TiledSegment(n, 0, grid) for n in range(layout.blocks + 1)])


@given(ranks=st.sampled_from([1, 2, 4]), each=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_ranks_get_as_many_heads_of_about_the_same_cost(ranks, each, seed):
    cost = np.random.default_rng(seed).uniform(0.02, 0.5, ranks * each).astype(np.float32)
    order = np.asarray(balanced_order(jnp.asarray(cost), ranks))
    assert sorted(order.tolist()) == list(range(ranks * each))
    loads = cost[order].reshape(ranks, each).sum(axis=1)
    # As by the plain algorithm.
    expected, room = np.zeros(ranks), np.full(ranks, each)
    for head in np.argsort(-cost, kind="stable"):
        rank = int(np.argmin(np.where(room > 0, expected, np.inf)))
        expected[rank] += cost[head]
        room[rank] -= 1
    np.testing.assert_allclose(np.sort(loads), np.sort(expected), rtol=1e-5)


def test_lists_are_compiled_for_falling_densities_of_which_forced_ones_are_one_for_each_layer():
    rules = sparse(max_density=0.5, capacities=(0.1, 0.3))
    assert rules.list_densities() == (0.5, 0.3, 0.1)
    assert dataclasses.replace(rules, capacities=(0.9, 0.5, 0.1)).list_densities() == (0.5, 0.1)
    assert dataclasses.replace(rules, forced=(1.0, 0.2, 0.25)).list_densities() == (0.25, 0.2)
    assert dataclasses.replace(rules, selector="all").list_densities() == (1.0,)
    with pytest.raises(InputError, match="forced is 2 densities; give 3, one for each of"):
        dataclasses.replace(SMALL, sparse_attention=sparse(forced=(0.5, 0.5)))


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("remat", ["full", pytest.param("attention", marks=pytest.mark.slow)])
def test_all_blocks_are_dense_attention(dense, remat):
    found = run(with_sparse(remat, selector="all", forced=(1.0, 0.5, 0.5)))
    np.testing.assert_allclose(found[0], dense[0], atol=2e-5 * jnp.abs(dense[0]).max())
    for one, other in zip(*map(jax.tree.leaves, (found[2], dense[2])), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * max(1.0, float(jnp.abs(other).max())))


def test_a_first_frame_with_a_timestep_of_its_own_stays_together_for_the_norms():
    # Else the norms give NaN (`norms_as_on_gpus`): tiles mix a first frame with later ones.
    velocity = []
    for config in (SMALL, with_sparse(selector="all")):
        merged, params = model_of(config)
        forward = jax.jit(
            lambda params, *given, merged=merged: merged(params).forward(
                *given, first_frame_timestep=jnp.zeros(2)
            )
        )
        velocity.append(forward(params, *inputs()).velocity)
    assert_near(velocity[1], velocity[0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["predictor", "random"])
def test_recomputed_layers_choose_the_same_blocks(dense, selector):
    fields = {"selector": selector, "forced": (0.3, 0.3, 1.0)}
    runs = [run(with_sparse(remat, **fields)) for remat in ("none", "full")]
    assert np.abs(np.asarray(runs[0][0] - dense[0])).max() > 1e-3
    for one, other in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * jnp.abs(other).max())


def test_chosen_blocks_are_kept_by_name_and_in_one_array_whatever_lists_there_are():
    for remat in ("full", "attention"):
        text = jaxpr_of(with_sparse(remat, selector="pooled", forced=(0.3,) * 3))
        assert text.count("top_k[") == 1

    def kept(capacities):
        text = jaxpr_of(with_sparse("full", selector="pooled", capacities=capacities))
        forward = next(line for line in text.splitlines() if "= scan[" in line)
        return forward.count(":u16[3,"), forward.count(":i32[3,1,2,")

    assert kept(()) == kept((0.3, 0.1))


def test_samples_are_dense_and_measure_nothing_where_they_are_short_or_it_is_asked_for(dense):
    tokens = math.prod(GRID)
    fields = {"selector": "pooled", "forced": (0.3,) * 3}
    short, long = (
        run(with_sparse(**fields, min_tokens=n), graded=False) for n in (tokens + 1, tokens)
    )
    begun = run(with_sparse(selector="pooled"), graded=False)  # whose layers are not sparse yet
    for each in (short, begun):
        np.testing.assert_allclose(each[0], dense[0], rtol=1e-5, atol=1e-5)
    assert not any(np.asarray(value).any() for value in short[1].values())
    assert np.abs(np.asarray(long[0] - dense[0])).max() > 1e-3
    config = sparse(**fields)
    assert config.as_dense().identity() == config.identity()
    assert config.as_dense().min_tokens >= 2**31


@pytest.mark.slow
def test_shorter_lists_hold_the_same_blocks():
    """A layer that needs few blocks has the same output whatever longer lists there are."""
    found = []
    for capacities in ((), (0.6, 0.3)):
        merged, params = model_of(
            with_sparse(selector="pooled", max_density=1.0, capacities=capacities, dense_steps=0)
        )
        model = merged(params)
        switch = model.blocks.sparse_attention.switch
        switch.sparse[...] = jnp.array([True, True, False])
        switch.density[...] = jnp.array([[0.3, 0.1], [0.5, 0.2], [1.0, 1.0]])
        found.append(model.forward(*inputs(1)).velocity)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


def test_the_predictor_learns_from_its_loss_alone_and_the_model_from_none_of_it():
    merged, params = model_of(with_sparse(selector="predictor", profile_every=1))

    @jax.jit
    def gradients(params):
        def values(params):
            output = merged(params).forward(*inputs(1))
            return (output.velocity**2).mean(), output.auxiliary[switching.PREDICTOR_LOSS].mean()

        return jax.jacrev(values)(params)

    of_velocity, of_loss = map(flatten_dict, gradients(params))
    for path in of_velocity:
        own = "selector" in path
        assert np.asarray(of_loss[path]).any() == own, path
        assert not (own and np.asarray(of_velocity[path]).any()), path
    assert any(np.asarray(leaf).any() for leaf in of_velocity.values())


def test_features_are_rotated_at_evenly_spaced_frequencies():
    predictor = Predictor(12, 2, 4, jnp.float32, rngs=nnx.Rngs(0))
    x, angles = (
        jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(3, 7, 12), (7, 5)])
    )
    table = jnp.cos(angles), jnp.sin(angles)
    few = [part[..., [0, 2]] for part in table]  # of five
    for linear, found in zip(
        (predictor.query, predictor.key), predictor(x, table, None), strict=True
    ):
        expected = apply_rotary((x @ linear.kernel[...]).reshape(3, 7, 2, 4), few)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- profile


def masses(query, key, tokens, segments, block):
    """Shares of each block of keys, mean over a block's queries, by the formula: [H, N, N]."""
    rows = np.repeat(segments, block)
    valid = (np.arange(block) < tokens[:, None]).reshape(-1)
    logits = np.einsum("shd,thd->hst", query, key) / math.sqrt(query.shape[-1])
    seen = (rows[:, None] == rows[None]) & valid[None] & (rows[None] >= 0)
    logits = np.where(seen, logits, -np.inf)
    top = np.where(seen.any(axis=-1, keepdims=True), logits.max(axis=-1, keepdims=True), 0.0)
    weights = np.exp(logits - top)
    weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    blocks = len(tokens)
    by_block = weights.reshape(len(logits), blocks, block, blocks, block).sum(axis=-1)
    some = (np.arange(block) < tokens[:, None])[None, :, :, None]
    return (by_block * some).sum(axis=2) / np.maximum(tokens, 1)[None, :, None]


def test_sampled_attention_and_its_profile_are_those_of_the_formulas():
    rng, block = np.random.default_rng(0), 64
    tokens = np.array([64, 40, 64, 10, 0])
    segments = np.array([0, 0, 0, 1, -1])
    query, key = (rng.normal(size=(5 * block, 2, 8)) * 2 for _ in range(2))
    layout = TileLayout(None, None, *(x[None] for x in (tokens, segments)), block=64, longest=3)
    arrays = [jnp.asarray(x.reshape(1, 5, 64, 2, 8), jnp.float32) for x in (query, key)]
    config = sparse(selector="predictor", profile_blocks=5, profile_every=1)
    sample = sample_attention(*arrays, jax.tree.map(jnp.asarray, layout), jnp.int32(0), config)
    expected = masses(query, key, tokens, segments, block)[:, np.asarray(sample.block[0])]
    np.testing.assert_allclose(sample.mass[0], expected, atol=1e-5)

    scores = jnp.asarray(rng.normal(size=(1, 2, 5, 5)), jnp.float32)
    of_block = segments[np.asarray(sample.block)][..., None] == np.arange(3)
    found = profile(sample, scores, jnp.asarray(of_block), sparse(selector="pooled"))
    np.testing.assert_array_equal(found.found, [[1, 1, 0]])
    for segment, head in itertools.product(range(2), range(2)):
        sparsity, recall = [], []
        for q, mass in zip(np.asarray(sample.block[0]), expected[head], strict=True):
            if segments[q] != segment:
                continue
            usable = np.flatnonzero((segments == segments[q]) & (segments >= 0) & (tokens > 0))
            if tokens[q] == 0:
                continue
            falling = np.sort(mass[usable])[::-1]
            critical = 1 + int(np.searchsorted(np.cumsum(falling), 0.9 - 1e-7))
            chosen = sorted(usable, key=lambda k: -scores[0, head, q, k])[:critical]
            sparsity.append(1 - critical / len(usable))
            recall.append(mass[chosen].sum() / falling[:critical].sum())
        assert found.sparsity[0, segment, head] == pytest.approx(np.mean(sparsity), abs=1e-5)
        assert found.recall[0, segment, head] == pytest.approx(np.mean(recall), abs=1e-5)


def test_scores_that_are_the_attention_have_full_recall_and_no_loss():
    rng = np.random.default_rng(1)
    mass = rng.dirichlet(np.full(12, 0.2), size=(1, 2, 4)).astype(np.float32)
    sample = Sample(jnp.arange(4)[None], jnp.asarray(mass), jnp.ones((1, 4, 12), bool))
    segments, config = jnp.ones((1, 4, 1), bool), sparse(selector="predictor")
    found = profile(sample, jnp.log(jnp.maximum(sample.mass, 1e-6)), segments, config)
    np.testing.assert_allclose(found.recall, 1, atol=1e-5)
    np.testing.assert_allclose(found.loss, 0, atol=1e-3)
    # By the formula, where a block may attend to one block alone.
    usable, scores = rng.random((4, 12)) < 0.6, rng.normal(size=(2, 4, 12))
    usable[0] = np.arange(12) == 3
    losses = np.zeros((2, 4))
    for head, block in np.ndindex(2, 4):
        pair = (scores[head, block], np.log(np.maximum(mass[0, head, block], 1e-6)))
        found, target = (each[usable[block]] - each[usable[block]].mean() for each in pair)
        sizes = [np.sqrt(each @ each + 1e-6) for each in (found, target)]
        error = np.sqrt((found - target) @ (found - target) + 1e-6) / sizes[1]
        losses[head, block] = 0.95 * (1 - found @ target / np.prod(sizes)) + 0.05 * error
    few = sample._replace(usable=jnp.asarray(usable[None]))
    found = profile(few, jnp.asarray(scores[None], jnp.float32), segments, config)
    np.testing.assert_allclose(found.loss[0, 0], losses.mean(axis=1), rtol=1e-4)
    queries, keys = (jnp.asarray(rng.normal(size=(1, 12, 2, 4)), jnp.float32) for _ in range(2))
    pooled = profile(sample, PooledScores(queries, keys), segments, sparse())
    whole = profile(sample, jnp.einsum("rqhd,rkhd->rhqk", queries, keys), segments, sparse())
    for one, other in zip(pooled, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# ---------------------------------------------------------------- samples over a context group

LENGTHS, CONDITION, TOO_SHORT = (330, 30, 500, 130), 10, 64
"""Tokens of split samples, of which one is in no tile, and of their conditions if they stand in
the row."""


def group_of(ranks, joint, behind):
    """The rows of a group with so many tokens behind the split ones, which are one sample."""
    room = CONDITION * joint
    offsets = (5 + np.cumsum([0, *(length + room for length in LENGTHS[:-1])])).tolist()
    count = -(-(offsets[-1] + LENGTHS[-1] + room) // ranks) + 1
    samples = list(zip(offsets, LENGTHS, strict=True))
    layout = empty_layout(ranks, ranks * count, 20, 64)
    whole = empty_layout(ranks, behind, behind // 64 + 1, 64)
    ordered = [TiledSegment(n, at, (1, 1, length)) for n, (at, length) in enumerate(samples)]
    for row in range(ranks):
        lay_out(layout, row, [each for each in ordered if each.grid[2] >= TOO_SHORT])
        lay_out(whole, row, [TiledSegment(0, 0, (1, 1, behind))] * bool(behind))
    rooms = {"condition_blocks": 4, "longest_condition": 1} if joint else {}
    layout = dataclasses.replace(layout, longest=8, **rooms)
    both = [(at, length + room) for at, length in samples]
    latents, both = (laid_out([each] * ranks, 5, ranks * count) for each in (samples, both))
    if joint:
        layout = with_conditions(*jax.tree.map(jnp.asarray, (layout, latents, both)))
    split = SplitRows(
        laid_out([[(0, behind)]] * ranks, 1, behind),
        both,
        count,
        (((0, 1), (max(1, behind), 0)), ((0, 5), (max(LENGTHS) + room, 0))),
        SplitTiles(whole if behind else None, layout),
    )
    parts = [
        [
            (max(at - first, 0), min(at + length - first, count) - max(at - first, 0))
            for at, length in samples
            if at < first + count and first < at + length
        ]
        for first in range(0, ranks * count, count)
    ]
    own = [(count, behind)] * bool(behind)
    tokens = laid_out([each + own for each in parts], 6, count + behind)
    packed = PackedMetadata(tokens, tokens, split, (1, 1, 600), ((0, 6), (600, 0)), 1)
    return jax.tree.map(jnp.asarray, packed)


def of_one_rank(function, heads, packed, choice):
    """What a function gives of the split tokens of the whole group."""
    arrays = (heads.query, heads.key, heads.value, heads.features)
    together = jax.tree.map(
        lambda x: x[:, : packed.split.split_tokens].reshape(1, -1, *x.shape[2:]), arrays
    )
    first = jax.tree.map(lambda x: x[:1], (packed.split.tiles.split, packed.split.within_split()))
    return function(Heads(*together, heads.density, heads.number), *first, choice)


needs_devices = pytest.mark.skipif(
    len(jax.devices()) < 8 or jax.default_backend() != "cpu", reason="needs 8 CPU devices"
)


def split_case(ranks, num_heads, selector, joint=False, behind=0):
    """Arrays, (arrays → heads), the rows, a choice, and what runs a function on every rank."""
    packed = group_of(ranks, joint, behind)
    config = sparse(selector=selector, min_tokens=TOO_SHORT, max_density=0.6, profile_blocks=64)
    choice = Choice(config, 0.6, "xla", *jnp.zeros(3, jnp.int32))
    shape = (*packed.tokens.ids.shape, num_heads, 4)
    arrays = [2 * normal for normal in np.random.default_rng(0).normal(size=(5, *shape))]

    def heads_of(query, key, value, *features):
        known = {"predictor": Features(*features), "pooled": Features(query, key)}
        density, number = jnp.linspace(0.1, 0.6, num_heads), jnp.arange(num_heads)
        return Heads(query, key, value, known.get(selector), density, number)

    mesh = make_mesh(MeshConfig(context=ranks), jax.devices()[:ranks])

    def on_ranks(function):
        rows = jax.P("context")
        in_specs = Heads(*(rows,) * 4, jax.P(), jax.P()), rows
        run = lambda heads, packed: function(heads, packed, choice)  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)

    return [each.astype(np.float32) for each in arrays], heads_of, packed, choice, on_ranks


def test_fewer_ranks_exchange_heads_where_waiting_costs_more_than_sending():
    sizes = ((2, 4), (8, 12), (8, 24), (3, 4), (5, 10))
    assert [head_exchanges(*each) for each in sizes] == [[2, 1], [4, 2], [8, 4], [1], [5, 1]]

    def fastest(ranks, density, lengths):
        count = 75_600 // ranks
        offsets = np.cumsum([0, *lengths[:-1]]).tolist()
        joint = laid_out([list(zip(offsets, lengths, strict=True))], 3, ranks * count)
        split = SplitRows(joint, joint, count, (((0, 1), (1, 0)),) * 2)
        sizes = {"ranks": ranks, "channels": 128, "itemsize": 2, "device": DEVICES["h200"]}
        density, choices = jnp.asarray(density)[None], head_exchanges(ranks, len(density))
        times = [exchange_seconds(density, split, exchanged=n, **sizes) for n in choices]
        return choices[int(np.argmin(times))]

    alike, unlike, one = [0.1] * 12, [0.3, *[0.05] * 11], (75_600,)
    assert [fastest(ranks, alike, one) for ranks in (2, 4, 8)] == [2, 4, 4]
    assert fastest(2, unlike, one) == 1
    assert fastest(2, unlike, (37_800, 18_000, 18_000)) == 2  # whose ranks have unlike keys
    assert fastest(4, [0.9, *[0.02] * 11], one) < 4
    # By arithmetic: queries with all keys, of heads that are shared out alike.
    joint = laid_out([[(0, 96)]], 1, 100)
    split, device = SplitRows(joint, joint, 50, ()), DEVICES["h200"]
    sizes = {"ranks": 2, "channels": 8, "itemsize": 2, "device": device}
    found = exchange_seconds(jnp.array([[0.4, 0.1, 0.3, 0.05]]), split, exchanged=2, **sizes)
    computed = 14 * 8 * 96 * 96 * 0.45 / (device.peak_flops * device.attention_share)
    sent = 2 * 4 * 50 * 4 * 8 * 2 / 2
    assert found == pytest.approx(computed + sent / device.link_bandwidth, rel=1e-5)


@needs_devices
@pytest.mark.parametrize(
    ("ranks", "num_heads", "exchanged", "selector", "joint"),
    [
        (8, 12, 4, "predictor", False),
        pytest.param(3, 4, 1, "pooled", True, marks=pytest.mark.slow),
        pytest.param(8, 4, 2, "pooled", True, marks=pytest.mark.slow),
        pytest.param(2, 4, 2, "pooled", False, marks=pytest.mark.slow),
        pytest.param(4, 4, 1, "random", False, marks=pytest.mark.slow),
    ],
)
def test_split_samples_attend_to_the_same_blocks(ranks, num_heads, exchanged, selector, joint):
    arrays, heads_of, packed, choice, on_ranks = split_case(ranks, num_heads, selector, joint, 100)
    split = packed.split

    def alone(*arrays):
        heads = heads_of(*arrays)
        front = of_one_rank(attend, heads, packed, choice)
        behind = jax.tree.map(lambda x: x[:, split.split_tokens :], heads[:4])
        own = split.tiles.whole, split.within_whole()
        behind = attend(Heads(*behind, *heads[4:]), *own, choice)
        return jnp.concatenate([front.reshape(ranks, -1, *front.shape[2:]), behind], axis=1)

    def together(*arrays):
        run = on_ranks(partial(attend_split, exchanged=exchanged))
        return run(heads_of(*arrays), packed)

    assert_near(graded(together, arrays)[:4], graded(alone, arrays)[:4], 1e-5)


@needs_devices
@pytest.mark.parametrize(("ranks", "num_heads"), [(3, 4), (8, 12), (2, 4)])
def test_the_profile_of_split_samples_and_its_gradient_are_those_of_one_rank(ranks, num_heads):
    arrays, heads_of, packed, choice, on_ranks = split_case(ranks, num_heads, "predictor")
    ids = np.asarray(packed.split.split.ids[0]).reshape(ranks, -1)
    offset, length, _ = map(np.asarray, packed.tokens)
    exists = length > 0
    slots = np.where(
        exists, ids[np.arange(ranks)[:, None], np.minimum(offset, ids.shape[1] - 1)], 0
    )

    def values(profile):
        return jnp.stack(profile[1:], axis=-1)

    def alone(*features):
        found = values(of_one_rank(measure, heads_of(*arrays[:3], *features), packed, choice))
        return jnp.where(exists[..., None, None], found[0][slots], 0)

    def together(*features):
        heads = heads_of(*arrays[:3], *features)._replace(value=None)
        return values(on_ranks(measure_split)(heads, packed))

    found, expected = (graded(each, arrays[3:]) for each in (together, alone))
    assert all(np.asarray(each).any() for each in expected)
    assert_near(found, expected, 1e-5)


# ---------------------------------------------------------------- switching


def state_of(layers=1, heads=2, **values):
    state = {
        "layer": jnp.arange(layers),
        "step": jnp.zeros(layers, jnp.int32),
        "measured": jnp.zeros(layers, jnp.int32),
        "sparsity": jnp.zeros((layers, heads)),
        "recall": jnp.zeros((layers, heads)),
        "loss": jnp.zeros(layers),
        "sparse": jnp.zeros(layers, bool),
        "density": jnp.full((layers, heads), 0.5),
    }
    return state | {name: jnp.asarray(value) for name, value in values.items()}


def measured(sparsity, recall, share=1.0):
    """Of one layer, means over samples of which a share were measured."""
    return {
        switching.PROFILED: jnp.full(1, share),
        switching.SPARSITY: share * jnp.asarray([sparsity], jnp.float32),
        switching.RECALL: share * jnp.asarray([recall], jnp.float32),
    }


RULES = sparse(selector="pooled", dense_steps=3, anneal_steps=4, max_density=0.5, min_density=0.1)


def test_a_layer_switches_when_it_may_anneals_and_comes_back():
    state, history = state_of(), []
    for step in range(12):
        quality = 0.95 if step < 9 else 0.0
        state = update_switches(RULES, state, measured([0.9, 0.74], [quality] * 2))
        history.append((bool(state["sparse"][0]), *np.asarray(state["density"][0]).tolist()))
    sparse_from = [step for step, (on, *_) in enumerate(history) if on]
    assert sparse_from == list(range(2, 10))  # after 3 steps; back two steps after recall is lost
    np.testing.assert_allclose(
        [first for _, first, _ in history[2:7]], [0.4, 0.3, 0.2, 0.1, 0.1], 1e-5
    )
    np.testing.assert_allclose([second for *_, second in history[2:5]], [0.4, 0.3, 0.26], 1e-5)
    assert history[-1] == (False, 0.5, 0.5)


def test_a_layer_near_its_threshold_stays_as_it_is():
    for sparse_now, sparsity, recall, after in (
        (False, 0.77, 0.95, False),  # near its threshold a layer stays as it is
        (True, 0.77, 0.95, True),
        (False, 0.81, 0.95, True),
        (False, 0.81, 0.88, False),
        (True, 0.81, 0.88, True),
        (True, 0.7, 0.95, False),
    ):
        state = state_of(step=[10], measured=[100], sparse=[sparse_now])
        state |= {"sparsity": jnp.full((1, 2), sparsity), "recall": jnp.full((1, 2), recall)}
        found = update_switches(RULES, state, measured([sparsity] * 2, [recall] * 2))
        assert bool(found["sparse"][0]) == after
        forced = dataclasses.replace(RULES, forced=(0.3,))  # never switches
        found = update_switches(forced, state, measured([sparsity] * 2, [recall] * 2))
        assert bool(found["sparse"][0]) == sparse_now
        np.testing.assert_allclose(found["recall"], [[recall] * 2], rtol=1e-6)


def test_averages_and_the_log_hold_measured_samples_alone():
    state = state_of()
    state = update_switches(RULES, state, measured([0.4, 0.8], [1.0, 1.0], share=0.25))
    np.testing.assert_allclose(state["sparsity"], [[0.4, 0.8]], rtol=1e-6)
    state = update_switches(RULES, state, measured([0.0, 0.0], [0.0, 0.0], share=0.0))
    np.testing.assert_allclose(state["sparsity"], [[0.4, 0.8]], rtol=1e-6)
    state = update_switches(RULES, state, measured([0.8, 0.8], [1.0, 1.0]))
    np.testing.assert_allclose(state["sparsity"], [[0.6, 0.8]], rtol=1e-6)
    assert state["measured"].tolist() == [2]
    assert state["step"].tolist() == [3]
    layers, none = state_of(sparse=[True]), measured([0.0] * 2, [0.0] * 2, share=0.0)
    forced = sparse(selector="pooled", forced=(0.5,))
    found = switching.switch_metrics(forced, layers, none)
    assert found == {switching.DENSITY: 0.5, switching.SPARSE_LAYERS: 1}
    everything = switching.switch_metrics(sparse(selector="all", forced=(0.5,)), layers, none)
    assert everything[switching.DENSITY] == 1
    assert switching.PREDICTOR_LOSS not in switching.switch_metrics(RULES, layers, none)


def test_a_run_continues_with_the_densities_of_its_config():
    config = with_sparse(selector="predictor")
    variables, family = initial_variables(config), family_of(config)
    kept = family.resumed_variables(config, variables)
    jax.tree.map(np.testing.assert_array_equal, kept, variables)
    forced = with_sparse(forced=(1.0, 0.1, 0.4))
    switch = family.resumed_variables(forced, variables)["blocks"]["sparse_attention"]["switch"]
    assert switch["sparse"].tolist() == [False, True, True]
    np.testing.assert_allclose(switch["density"], [[1.0] * 2, [0.1] * 2, [0.4] * 2])


def test_the_family_updates_its_state_and_logs_it():
    config = dataclasses.replace(
        SMALL, sparse_attention=sparse(selector="predictor", dense_steps=0)
    )
    variables, family = initial_variables(config), family_of(config)
    auxiliary = {
        switching.PROFILED: jnp.ones(3),
        switching.SPARSITY: jnp.asarray([[0.9, 0.9], [0.1, 0.1], [0.9, 0.9]]),
        switching.RECALL: jnp.full((3, 2), 0.95),
        switching.PREDICTOR_LOSS: jnp.full(3, 0.3),
        "other": jnp.array([1.0, 3.0]),
    }
    after = family.update_variables(config, variables, auxiliary)
    switch = after["blocks"]["sparse_attention"]["switch"]
    assert switch["sparse"].tolist() == [True, False, True]
    assert switch["layer"].tolist() == [0, 1, 2]
    for before, now in zip(*map(jax.tree.leaves, (variables, after)), strict=True):
        assert (before.shape, before.dtype) == (now.shape, now.dtype)
    metrics = family.step_metrics(config, after, auxiliary)
    assert metrics[switching.SPARSE_LAYERS] == pytest.approx(2 / 3)
    assert metrics[switching.PREDICTOR_LOSS] == pytest.approx(0.3)
    assert metrics["other"] == 2


def test_invalid_values_are_named():
    for fields, message in (
        ({"selector": "best"}, "selector is best; choose one of predictor, pooled, random, all"),
        ({"block": 32}, "block is 32; it must be 64 or 128"),
        ({"capacities": (0.0,)}, r"capacities is \(0.0,\); each must be above 0 and at most 1"),
        ({"min_sparsity": 0.4}, r"min_sparsity is 0.4; it must be at least 1 - max_density, 0.7: "),
        ({"min_density": 0.6}, "min_density is 0.6; it must be at most max_density, 0.3"),
        ({"head_exchange": "fast"}, "head_exchange is fast; it must be most, or fastest with"),
        ({"head_exchange": "fastest", "balance_heads": False}, "head_exchange is fastest; it must"),
        ({"forced": (0.5, 1.5)}, r"forced is \(0.5, 1.5\); each must be above 0"),
    ):
        with pytest.raises(InputError, match=f"model.sparse_attention.{message}"):
            SparseAttentionConfig(**fields)
