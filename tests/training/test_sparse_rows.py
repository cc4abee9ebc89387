"""Sparse attention in packed rows and context groups: as of each sample by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_packed_step import (
    CLASSES,
    assert_same,
    batches_of,
    disturbed,
    plan_with,
    spec_of,
    write_sizes,
)

from alload_jax.data.batch import signature
from alload_jax.models.common.sparse_attention import SparseAttentionConfig, config
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh, ranks_of
from alload_jax.training.state import Weights, init_state
from alload_jax.training.step import make_accumulate, zero_accumulator

SIZES = {(1, 4, 4): 5, (5, 20, 22): 4, (3, 26, 30): 3}
"""(frames, height, width) of latents and how many: 4, 550 and 585 tokens."""
SPARSE = SparseAttentionConfig(selector="pooled", forced=(0.3, 1.0), min_tokens=64)
MODEL = dataclasses.replace(CLASSES, num_heads=4, num_layers=2, sparse_attention=SPARSE)
PREDICTOR = dataclasses.replace(SPARSE, selector="predictor", rank=4, profile_blocks=64)

needs_devices = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return write_sizes(tmp_path_factory.mktemp("long") / "data", SIZES, lambda _: 2)


def sums_of(model, mesh, batches):
    """Mean loss, gradients and auxiliary values; the heads have different densities."""
    state = init_state(spec_of(model), mesh, seed=0)
    variables = state.variables
    switch = variables["blocks"]["sparse_attention"]["switch"]
    switch["density"] = switch["density"] * jnp.array([1.0, 0.4, 0.7, 0.2])
    params = disturbed(state.params)
    # Attention that is not nearly even, so that it matters which blocks are attended to.
    norm = params["blocks"]["self_attention"]["query_norm"]
    norm["scale"] = 4 * norm["scale"]
    weights = Weights(params, {}, variables)
    accumulate = make_accumulate(spec_of(model), mesh)
    sums = zero_accumulator(spec_of(model), mesh, weights, batches[0])
    for batch in batches:
        sums = accumulate(weights, sums, jax.device_put(batch, batch_sharding(mesh)), state.key)
    total = sums.weight
    return jax.tree.map(lambda x: x / total, (sums.loss, sums.grads, sums.auxiliary))


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="module")
def expected(manifest):
    """Of every sample by itself, on one device."""
    return sums_of(MODEL, one_device(), batches_of(manifest, MODEL, "fixed", m_mem=600))


@pytest.mark.slow
def test_sparse_attention_differs_from_dense(manifest, expected):
    dense = dataclasses.replace(SPARSE, selector="all")
    model = dataclasses.replace(MODEL, sparse_attention=dense)
    found = sums_of(model, one_device(), batches_of(manifest, model, "fixed", m_mem=600))
    # A thousand times what is allowed between layouts.
    ours, theirs = (each[1]["blocks"]["self_attention"] for each in (found, expected))
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, ours, theirs))
    assert apart > 0.01 * optax.tree.norm(theirs)


@pytest.mark.slow
def test_packed_samples_attend_to_the_blocks_they_attend_to_by_themselves(manifest, expected):
    batches = batches_of(manifest, MODEL, "balanced", 1, m_mem=1300)
    assert max(int((batch.weight > 0).sum()) for batch in batches) > 2
    layout = batches[0].metadata.row_tiles
    assert not layout.covers_all
    assert layout.longest == 10
    assert_same(sums_of(MODEL, one_device(), batches)[:2], expected[:2])


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize("balance", [True, False])
def test_split_samples_attend_to_the_blocks_of_whole_ones(balance, manifest, expected):
    axes = {"context": 2, "fsdp": 2, "tensor": 2} if balance else {"context": 4, "fsdp": 2}
    mesh = make_mesh(MeshConfig(**axes))
    sparse = dataclasses.replace(SPARSE, balance_heads=balance)
    model = dataclasses.replace(MODEL, sparse_attention=sparse)
    options = {"context": axes["context"], "m_mem": 700, "split_above": 0.3}
    batches = batches_of(manifest, model, "balanced", ranks_of(mesh), **options)
    longest = [int(batch.metadata.split.split.length.max()) for batch in batches]
    assert {550, 585} & set(longest)
    assert_same(sums_of(model, mesh, batches)[:2], expected[:2])


@pytest.fixture(scope="module")
def measured(manifest):
    """Profiles of every sample by itself, on one device."""
    model = dataclasses.replace(MODEL, sparse_attention=PREDICTOR)
    return sums_of(model, one_device(), batches_of(manifest, model, "fixed", m_mem=600))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{}, pytest.param({"context": 2}, marks=needs_devices)])
def test_the_profile_of_rows_is_about_that_of_their_samples(axes, manifest, measured):
    """Other blocks of queries are sampled, or some more often."""
    model = dataclasses.replace(MODEL, sparse_attention=PREDICTOR)
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[: axes.get("context", 1)])
    options = {"context": axes.get("context", 1), "m_mem": 700 if axes else 1300}
    if axes:
        options["split_above"] = 0.3
    batches = batches_of(manifest, model, "balanced", ranks_of(mesh), **options)
    loss, grads, found = sums_of(model, mesh, batches)
    np.testing.assert_allclose(loss, measured[0], rtol=1e-5)
    np.testing.assert_allclose(found[config.PROFILED], 7 / 12, rtol=1e-5)
    for name in (config.SPARSITY, config.RECALL, config.PREDICTOR_LOSS):
        np.testing.assert_allclose(found[name], measured[2][name], rtol=0.02)
    predictor = grads["blocks"]["sparse_attention"]["selector"]
    wanted = measured[1]["blocks"]["sparse_attention"]["selector"]
    for ours, theirs in zip(*map(jax.tree.leaves, (predictor, wanted)), strict=True):
        size = np.linalg.norm(theirs)
        assert size > 0
        assert np.linalg.norm(np.asarray(ours) - theirs) < 0.2 * size


def test_rows_without_a_long_sample_have_no_tiles(manifest):
    sparse = dataclasses.replace(SPARSE, min_tokens=4096)
    model = dataclasses.replace(MODEL, sparse_attention=sparse)
    (first, *_) = batches_of(manifest, model, "balanced", 1, m_mem=1300)
    assert first.metadata.row_tiles is None


def test_the_programs_of_a_plan_have_the_tiles_of_its_batches(manifest):
    plan, collation = plan_with(manifest, MODEL, "balanced", 2, context=2, m_mem=700)
    known = {signature(shape) for shape in collation.shapes(plan)}
    found = batches_of(manifest, MODEL, "balanced", 2, context=2, m_mem=700)
    assert {signature(batch) for batch in found} <= known
