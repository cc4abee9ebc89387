"""Sparse joint attention, packed, split or one by one: the same loss and gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_joint_attention_step as whole

from alload_jax.data.batch import signature
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreWriter
from alload_jax.models.common.sparse_attention import SparseAttentionConfig
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh
from alload_jax.training.state import Weights, init_state
from alload_jax.training.step import zero_accumulator

SIZES = [(1, 4, 4), (3, 16, 20)]
"""4 and 240 tokens of latents."""
SPARSE = SparseAttentionConfig(selector="pooled", forced=(0.4, 1.0), min_tokens=64)
MODEL = dataclasses.replace(whole.CLASSES, sparse_attention=SPARSE)
pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("sparse") / "data", np.random.default_rng(0)
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for n in range(6):
            size = SIZES[n % len(SIZES)]
            labels = rng.integers(0, 10, n % 3 + 1).astype(np.int32)
            writer.add(rng.normal(size=(*size, 2)).astype(np.float32), labels, size)
    return read_manifest(folder)


def sums_of(model, batches, context=1):
    """Mean loss and gradients; the heads have different densities."""
    mesh = make_mesh(MeshConfig(context=context), jax.devices()[:context])
    spec, accumulate = whole.accumulate_of(model, mesh)
    state = init_state(spec, mesh, seed=0)
    if model.sparse_attention:
        switch = state.variables["blocks"]["sparse_attention"]["switch"]
        switch["density"] = switch["density"] * jnp.array([1.0, 0.5])
    params = dict(state.params)
    params |= whole.weights_of(dataclasses.replace(model, sparse_attention=None))
    # Attention that is not nearly even, so that it matters which blocks are attended to.
    blocks = params["blocks"] | {
        name: part for name, part in state.params["blocks"].items() if name == "sparse_attention"
    }
    norm = blocks["video"]["query_norm"]
    blocks["video"] = blocks["video"] | {"query_norm": {"scale": 4 + 4 * norm["scale"]}}
    weights = Weights(params | {"blocks": blocks}, {}, state.variables)
    sums = zero_accumulator(spec, mesh, weights, batches[0])
    for batch in batches:
        sums = accumulate(weights, sums, jax.device_put(batch, batch_sharding(mesh)), state.key)
    return jax.tree.map(lambda x: x / sums.weight, (sums.loss, sums.grads))


@pytest.mark.slow
def test_samples_attend_to_the_blocks_they_attend_to_by_themselves(manifest):
    case, options = (MODEL, manifest), {"context": 2, "m_mem": 300, "split_above": 0.5}
    batches = whole.batches_of(case, "balanced", 2, **options)
    split = [batch.metadata.split for batch in batches if batch.metadata.split]
    assert max(int(each.split.length.max()) for each in split) == 240
    plan, collation = whole.plan_of(case, "balanced", 2, **options)
    known = {signature(shape) for shape in collation.shapes(plan)}
    assert {signature(batch) for batch in batches} <= known
    expected = sums_of(MODEL, whole.batches_of(case, "fixed", rows=1, m_mem=300))
    whole.assert_same(sums_of(MODEL, batches, 2), expected)


@pytest.mark.slow
def test_all_blocks_are_dense_attention(manifest):
    control = dataclasses.replace(SPARSE, selector="all", forced=(0.4,))
    found = []
    for sparse in (control, None):
        model = dataclasses.replace(MODEL, num_layers=1, sparse_attention=sparse)
        found.append(sums_of(model, whole.batches_of((model, manifest), "balanced", m_mem=600)))
    whole.assert_same(*found)
