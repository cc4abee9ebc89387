"""Split samples of a model with joint attention: the same loss and gradient as whole ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_joint_attention_step as whole
from flax import nnx
from test_joint_attention_step import (
    CLASSES,
    accumulate_of,
    assert_same,
    batches_of,
    mean_gradient,
    plan_of,
    weights_of,
)

from alload_jax.data.batch import signature
from alload_jax.models.families import abstract_model
from alload_jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh
from alload_jax.training.state import Weights
from alload_jax.training.step import zero_accumulator

case, one_by_one = whole.case, whole.one_by_one
"""Fixtures."""

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs 4 devices")


def options(case, context):
    """So that ranks' borders are within samples, and rows hold several."""
    tokens = 32 if case[0].text else 24
    return {"context": context, "m_mem": tokens, "row_tokens": tokens, "split_above": 0.5}


def split_batches(case, context):
    return batches_of(case, "balanced", context, **options(case, context))


def mesh_of(context):
    return make_mesh(MeshConfig(context=context), jax.devices()[:context])


def gradient_and_program(model, batches, context):
    """The mean gradient by one program, and the program's text."""
    mesh = mesh_of(context)
    spec, accumulate = accumulate_of(model, mesh)
    weights, key = Weights(weights_of(model), {}, {}), jax.random.key_data(jax.random.key(0))
    sums = zero_accumulator(spec, mesh, weights, batches[0])
    placed = jax.device_put(batches, batch_sharding(mesh))
    programs = {}
    for batch in placed:
        kind = signature(batch)
        if kind not in programs:
            programs[kind] = accumulate.lower(weights, sums, batch, key).compile()
        sums = programs[kind](weights, sums, batch, key)
    found = sums.loss / sums.weight, jax.tree.map(lambda g: g / sums.weight, sums.grads)
    return found, [program.as_text() for program in programs.values()]


KINDS = ["classes", pytest.param("image", marks=pytest.mark.slow)]


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_split_samples_have_the_gradient_of_whole_ones(case, one_by_one):
    batches = split_batches(case, 2)
    split = [batch.metadata.split for batch in batches if batch.metadata.split is not None]
    assert max(int(each.split.length.max()) for each in split) == 18
    found, programs = gradient_and_program(case[0], batches, 2)
    assert_same(found, one_by_one)
    plan, collation = plan_of(case, "balanced", 2, **options(case, 2))
    assert len(programs) <= len(collation.shapes(plan)) == len(plan.epoch(0).packing.split_sizes)
    tokens = batches[0].tokens.shape[1]
    assert any("all-to-all(" in program for program in programs)
    for line in "\n".join(programs).splitlines():
        if "all-gather(" in line:
            # Of activations no rank gets those of another but by the exchange of heads.
            assert not any(f"{sep}{tokens}," in line.split("all-gather(")[0] for sep in ",[")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["classes"], indirect=True)
def test_over_four_ranks(case):
    model = dataclasses.replace(CLASSES, num_heads=4)
    expected = mean_gradient(model, batches_of((model, case[1]), "fixed", rows=1))
    batches = split_batches((model, case[1]), 4)
    regions = {batch.metadata.split.split_tokens for batch in batches if batch.metadata.split}
    assert regions
    assert_same(gradient_and_program(model, batches, 4)[0], expected)


def velocities(model, batch, context):
    """The velocity of every sample, by its number; parts of split ones together."""
    sharding = batch_sharding(mesh_of(context))
    graph, params = abstract_model(model).graph, weights_of(model)

    @jax.jit
    def run(batch):
        module = nnx.merge(graph, params)
        timestep = jnp.where(batch.sample >= 0, 100.0 + batch.sample, 0.0)
        tokens = batch.tokens
        if batch.given is not None:
            parts = (x.reshape(*x.shape[:2], 4, -1) for x in (tokens, batch.given))
            tokens = jnp.concatenate(list(parts), axis=-1).reshape(*tokens.shape[:2], -1)
        inputs = (tokens, batch.position, batch.metadata, timestep, batch.condition)
        return module.forward_packed(*inputs, sharding=sharding).velocity

    found, (offset, length, _) = (
        np.asarray(run(jax.device_put(batch, sharding))),
        batch.metadata.tokens,
    )
    parts = {}
    for row, slot in zip(*np.nonzero(length), strict=True):
        here = slice(offset[row, slot], offset[row, slot] + length[row, slot])
        part = (int(batch.first[row, slot]), found[row, here])
        parts.setdefault(int(batch.sample[row, slot]), []).append(part)
    return {
        sample: np.concatenate([part for _, part in sorted(each, key=lambda part: part[0])])
        for sample, each in parts.items()
    }


@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_neighbours_and_what_is_not_finite_reach_no_other_sample(case):
    model = case[0]
    batches = [batch for batch in split_batches(case, 2) if batch.metadata.split is not None]
    batch = max(batches, key=lambda batch: len(np.unique(batch.sample)))
    before = velocities(model, batch, 2)
    assert len(before) > 1
    spoilt = int(np.bincount(batch.sample[batch.sample >= 0]).argmax())
    assert (batch.sample == spoilt).sum() > 1
    for value in (7.0, np.nan):
        changed = jax.tree.map(np.copy, batch)
        for row, slot in zip(*np.nonzero(batch.sample == spoilt), strict=True):
            changed.tokens[row, batch.metadata.tokens.ids[row] == slot] = value
            if model.text:
                for tokens in changed.condition.values():
                    tokens.values[row, tokens.segments.ids[row] == slot] = value
        after = velocities(model, changed, 2)
        for sample, expected in before.items():
            if sample == spoilt:
                assert np.isnan(after[sample]).all() == np.isnan(value)
                assert not np.array_equal(after[sample], expected)
            else:
                np.testing.assert_array_equal(after[sample], expected)
