"""Sparse attention in packed rows and context groups: as of each sample by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from layouts import (
    CLASSES,
    assert_same,
    batches_of,
    mean_gradient,
    mesh_of,
    plan_of,
    spec_of,
    weights_of,
    write_sizes,
)
from test_joint_attention_step import CLASSES as JOINT_CLASSES

from alload_jax.data.batch import signature
from alload_jax.models.common.sparse_attention import SparseAttentionConfig, config
from alload_jax.sharding.mesh import ranks_of
from alload_jax.training.state import Weights, init_state

SIZES = {(1, 4, 4): 5, (5, 20, 22): 4, (3, 26, 30): 3}
"""(frames, height, width) of latents and how many: 4, 550 and 585 tokens."""
SPARSE = SparseAttentionConfig(selector="pooled", forced=(0.3, 1.0), min_tokens=64)
MODEL = dataclasses.replace(CLASSES, num_heads=4, num_layers=2, sparse_attention=SPARSE)
PREDICTOR = dataclasses.replace(
    MODEL,
    sparse_attention=dataclasses.replace(SPARSE, selector="predictor", rank=4, profile_blocks=64),
)
JOINT = dataclasses.replace(
    JOINT_CLASSES, sparse_attention=dataclasses.replace(SPARSE, forced=(0.4, 1.0))
)

needs_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def with_sparse(model, **changes):
    sparse = dataclasses.replace(model.sparse_attention, **changes)
    return dataclasses.replace(model, sparse_attention=sparse)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_sizes(tmp_path_factory.mktemp("long") / "data", SIZES, lambda _: 2)


def sums_of(model, mesh, batches):
    """Mean loss, gradients and auxiliary values; the heads have different densities."""
    state = init_state(spec_of(model), mesh, seed=0)
    params, variables = dict(state.params), state.variables
    if model.sparse_attention:
        switch = variables["blocks"]["sparse_attention"]["switch"]
        heads = (1.0, 0.4, 0.7, 0.2) if model.num_heads == 4 else (1.0, 0.5)
        switch["density"] = switch["density"] * jnp.array(heads)
    # Attention that is not nearly even, so that it matters which blocks are attended to.
    if model.joint_attention:
        params |= weights_of(dataclasses.replace(model, sparse_attention=None))
        params["blocks"] = state.params["blocks"] | params["blocks"]
        video = params["blocks"]["video"]
        norm = {"scale": 4 + 4 * video["query_norm"]["scale"]}
        params["blocks"] = params["blocks"] | {"video": video | {"query_norm": norm}}
    else:
        params = weights_of(model)
        attention = params["blocks"]["self_attention"]
        norm = {"scale": 4 * attention["query_norm"]["scale"]}
        blocks = params["blocks"] | {"self_attention": attention | {"query_norm": norm}}
        params = params | {"blocks": blocks}
    weights = Weights(params, {}, variables)
    return mean_gradient(model, mesh, batches, weights=weights, auxiliary=True)


@pytest.fixture(scope="module")
def expected(manifest):
    """Of every sample by itself, on one device."""
    return sums_of(MODEL, mesh_of(), batches_of(manifest, MODEL, "fixed", m_mem=600))


@pytest.mark.slow
def test_sparse_attention_differs_from_dense(manifest, expected):
    model = with_sparse(MODEL, selector="all")
    found = sums_of(model, mesh_of(), batches_of(manifest, model, "fixed", m_mem=600))
    # A thousand times what is allowed between layouts.
    ours, theirs = (each[1]["blocks"]["self_attention"] for each in (found, expected))
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, ours, theirs))
    assert apart > 0.01 * optax.tree.norm(theirs)


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, {"context": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_packed_and_split_samples_attend_to_the_blocks_of_whole_ones(axes, manifest, expected):
    mesh, options = mesh_of(8 if axes else 1, **axes), {"m_mem": 1300}
    if axes:
        options = {"context": 2, "m_mem": 700, "split_above": 0.3}
    batches = batches_of(manifest, MODEL, "balanced", ranks_of(mesh), **options)
    if axes:
        longest = [int(batch.metadata.split.split.length.max()) for batch in batches]
        assert {550, 585} & set(longest)
    else:
        assert max(int((batch.weight > 0).sum()) for batch in batches) > 2
        layout = batches[0].metadata.row_tiles
        assert (layout.covers_all, layout.longest) == (False, 10)
    assert_same(sums_of(MODEL, mesh, batches)[:2], expected[:2])


@needs_devices
@pytest.mark.slow
def test_the_profile_of_rows_is_about_that_of_their_samples(manifest):
    """Other blocks of queries are sampled, or some more often."""
    alone = batches_of(manifest, PREDICTOR, "fixed", m_mem=600)
    expected, options = sums_of(PREDICTOR, mesh_of(), alone), {"m_mem": 700, "split_above": 0.3}
    batches = batches_of(manifest, PREDICTOR, "balanced", 2, context=2, **options)
    loss, grads, found = sums_of(PREDICTOR, mesh_of(2, context=2), batches)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[config.PROFILED], 7 / 12, rtol=1e-5)
    for name in (config.SPARSITY, config.RECALL, config.PREDICTOR_LOSS):
        np.testing.assert_allclose(found[name], expected[2][name], rtol=0.02)
    predictor, wanted = (
        each["blocks"]["sparse_attention"]["selector"] for each in (grads, expected[1])
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (predictor, wanted)), strict=True):
        size = np.linalg.norm(theirs)
        assert size > 0
        assert np.linalg.norm(np.asarray(ours) - theirs) < 0.2 * size


def test_rows_without_a_long_sample_have_no_tiles(manifest):
    model = with_sparse(MODEL, min_tokens=4096)
    (first, *_) = batches_of(manifest, model, "balanced", 1, m_mem=1300)
    assert first.metadata.row_tiles is None


def test_the_programs_of_a_plan_have_the_tiles_of_its_batches(manifest):
    plan, collation = plan_of(manifest, MODEL, "balanced", 2, context=2, m_mem=700)
    known = {signature(shape) for shape in collation.shapes(plan)}
    found = batches_of(manifest, MODEL, "balanced", 2, context=2, m_mem=700)
    assert {signature(batch) for batch in found} <= known


def test_weights_without_predictors_get_new_ones():
    dense = dataclasses.replace(PREDICTOR, sparse_attention=None)
    released = init_state(spec_of(dense), mesh_of(), 1).params
    expected = {name: np.asarray(x) for name, x in flatten_dict(released, sep="/").items()}
    state = init_state(spec_of(PREDICTOR), mesh_of(), 2, released)
    found = flatten_dict(state.params, sep="/")
    for name, value in expected.items():
        np.testing.assert_array_equal(found.pop(name), value)
    sides = [f"blocks/sparse_attention/selector/{side}/kernel" for side in ("key", "query")]
    assert sorted(found) == sides
    assert all(np.asarray(value).any() for value in found.values())


# ---------------------------------------------------------------- joint attention
