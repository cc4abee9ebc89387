"""A model with joint attention, packed, split, bucketed, or one by one: the same gradient."""

import dataclasses

import jax
import numpy as np
import pytest
from layouts import (
    MERGED,
    SIZES,
    assert_gathers_no_activations,
    assert_reaches_no_other,
    assert_same,
    batches_of,
    gradient_and_programs,
    mean_gradient,
    mesh_of,
    normal,
    plan_of,
    write_samples,
)

from alload_jax.data.batch import signature
from alload_jax.data.condition import conditions_for, samples_for
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig

CLASSES = HunyuanVideoConfig(
    dim=16,
    ffn_dim=24,
    num_heads=2,
    num_layers=2,
    in_channels=2,
    patch_size=(1, 2, 2),
    dtype="float32",
)
TEXT = dataclasses.replace(
    CLASSES,
    in_channels=5,
    out_channels=2,
    text=TextConfig(6, 9),
    glyphs=TextConfig(5, 7),
    glyph_hidden=12,
    image=ImageConfig(4),
)
MODELS = {"classes": CLASSES, "image": TEXT}
COUNT = 11
ROUNDING = 1e-3
"""Biases of the refiner's keys have no gradient but rounding."""

needs_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
slow = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=MODELS,
)
def case(request, tmp_path_factory):
    """Data and a model: texts of different lengths, images and given frames or not."""
    name, model = request.param, MODELS[request.param]

    def sample(rng, n):
        size, more = SIZES[rng.integers(len(SIZES))], {}
        condition = rng.integers(0, 10, n % 2 + 1).astype(np.int32)
        if model.text:
            condition = normal(rng, rng.integers(0, 8), 6)
            more["parts"] = {"glyphs": normal(rng, rng.integers(0, 4), 5)}
        if name == "image":
            more |= {"image": normal(rng, 3, 4), "given": normal(rng, *size, 3)}
        return size, condition, more

    return write_samples(tmp_path_factory.mktemp("joint") / "data", COUNT, sample), model


@pytest.fixture(scope="module")
def one_by_one(case):
    return mean_gradient(case[1], mesh_of(), batches_of(*case, "fixed"))


LAYOUTS = [
    ("balanced", 1, {}),
    ("first_fit", 1, {"align": 4}),
    ("dual_constraint", 2, {}),
    ("equal_tokens", 1, MERGED),
]


@slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_gradient_of_the_samples_one_by_one(layout, case, one_by_one):
    policy, ranks, options = layout
    batches = batches_of(*case, policy, ranks, **options)
    assert sum(int((batch.weight > 0).sum()) for batch in batches) == COUNT
    assert_same(mean_gradient(case[1], mesh_of(ranks), batches), one_by_one, ROUNDING)
    plan, collation = plan_of(*case, policy, ranks, **options)
    assert {signature(batch) for batch in batches} <= {
        signature(shapes) for shapes in collation.shapes(plan)
    }
    assert policy != "balanced" or len(collation.shapes(plan)) == 1


def split_options(case, context):
    """So that ranks' borders are within samples, and rows hold several."""
    tokens = 32 if case[1].text else 24
    return {"context": context, "m_mem": tokens, "row_tokens": tokens, "split_above": 0.5}


@slow
@needs_devices
def test_split_samples_have_the_gradient_of_whole_ones(case, one_by_one):
    batches = batches_of(*case, "balanced", 2, **split_options(case, 2))
    split = [batch.metadata.split for batch in batches if batch.metadata.split is not None]
    assert max(int(each.split.length.max()) for each in split) == 18
    found, programs = gradient_and_programs(case[1], mesh_of(2, context=2), batches)
    assert_same(found, one_by_one, ROUNDING)
    plan, collation = plan_of(*case, "balanced", 2, **split_options(case, 2))
    assert len(programs) <= len(collation.shapes(plan)) == len(plan.epoch(0).packing.split_sizes)
    assert any("all-to-all(" in program for program in programs)
    assert_gathers_no_activations(programs, batches[0].tokens.shape[1])


@slow
@needs_devices
@pytest.mark.parametrize("context", [1, 2])
def test_other_neighbours_and_what_is_not_finite_reach_no_other_sample(case, context):
    options = split_options(case, context) if context > 1 else {}
    batches = batches_of(*case, "balanced", context, **options)
    if context > 1:
        batches = [batch for batch in batches if batch.metadata.split is not None]
    batch = max(batches, key=lambda batch: len(np.unique(batch.sample)))
    assert np.bincount(batch.sample[batch.sample >= 0]).max() >= context  # parts of one sample
    assert_reaches_no_other(case[1], batch, context)


def test_plans_count_both_kinds_of_tokens(case):
    manifest, model = case
    conditions = conditions_for(model, manifest)
    video = manifest.samples(model.patch_size).seq_len
    packed, bucketed = (samples_for(model, manifest, conditions, kind) for kind in (True, False))
    most = conditions.length
    np.testing.assert_array_equal(bucketed.seq_len, video + most)
    expected = np.full(COUNT, most)
    if model.text:
        parts = manifest.part_lengths[:, 0] + manifest.text_length
        expected = parts + (manifest.form.image_shape or [0])[0]
    np.testing.assert_array_equal(packed.seq_len, video + expected)
    for batch in batches_of(*case, "balanced"):
        tokens = (batch.metadata.tokens.length * (batch.weight > 0)).sum(axis=1)
        for part in batch.condition.values() if model.text else ():
            tokens = tokens + part.segments.length.sum(axis=1)
        assert (tokens <= batch.tokens.shape[1]).all()
