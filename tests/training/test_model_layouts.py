"""Models with more than text, packed, split, bucketed, or one by one: the same gradient.

Joint attention, images and given frames, and sparse attention.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from layouts import (
    CLASSES,
    MERGED,
    SIZES,
    SMALL,
    assert_gathers_no_activations,
    assert_reaches_no_other,
    assert_same,
    batches_of,
    begun,
    disturbed,
    gradient_and_programs,
    mean_gradient,
    mesh_of,
    needs_devices,
    normal,
    plan_of,
    spec_of,
    weights_of,
    write_samples,
    write_sizes,
)

from alload_jax.data.condition import conditions_for, samples_for
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError
from alload_jax.models.common import attention
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.parts import Output
from alload_jax.models.common.segments import to_tokens
from alload_jax.models.common.sparse_attention import config
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.families import abstract_model, build_model
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching, noised
from alload_jax.sharding.mesh import ranks_of
from alload_jax.training.state import Weights, init_state
from alload_jax.training.trial_step import random_batch
from alload_jax.training.validator import HeldOut, ValidationConfig, Validator

# ---------------------------------------------------------------- joint attention

JOINT = HunyuanVideoConfig(
    **(SMALL | {"num_layers": 2, "in_channels": 5, "out_channels": 2, "text": TextConfig(6, 9)}),
    glyphs=TextConfig(5, 7),
    glyph_hidden=12,
    image=ImageConfig(4),
)
SINGLE = HunyuanVideo13bConfig(
    **(SMALL | {"num_layers": 1, "single_layers": 2, "in_channels": 2, "text": TextConfig(6, 9)}),
    pooled_dim=5,
    embedded_guidance=1.0,
)
COUNT = 11
ROUNDING = 1e-3
"""Biases of the refiner's keys have no gradient but rounding."""
SPLIT = {"context": 2, "m_mem": 32, "row_tokens": 32, "split_above": 0.5}
"""So that ranks' borders are within samples, and rows hold several."""


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    """Texts of different lengths, glyphs, images and given frames."""

    def sample(rng, n):
        size = SIZES[rng.integers(len(SIZES))]
        more = {"image": normal(rng, 3, 4), "given": normal(rng, *size, 3)}
        more["parts"] = {"glyphs": normal(rng, rng.integers(0, 4), 5)}
        return size, normal(rng, rng.integers(0, 8), 6), more

    return write_samples(tmp_path_factory.mktemp("joint") / "data", COUNT, sample)


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    """Texts of different lengths, and a pooled one."""

    def sample(rng, n):
        parts = {"parts": {"pooled": normal(rng, 1, 5)}}
        return SIZES[rng.integers(len(SIZES))], normal(rng, rng.integers(0, 8), 6), parts

    return write_samples(tmp_path_factory.mktemp("pooled") / "data", COUNT, sample)


@pytest.fixture(params=["joint", "pooled"])
def joined(request):
    """Data, and the model of blocks of two streams, or also of one."""
    model = JOINT if request.param == "joint" else SINGLE
    return request.getfixturevalue(request.param), model


@needs_devices
@pytest.mark.slow
def test_joint_attention_has_the_gradient_of_the_samples_one_by_one(joined):
    joint, model = joined
    alone = mean_gradient(model, mesh_of(), batches_of(joint, model, "fixed"))
    # Golden files have packed rows of one rank.
    batches = batches_of(joint, model, "equal_tokens", 2, **MERGED)
    assert sum(int((batch.weight > 0).sum()) for batch in batches) == COUNT
    assert_same(mean_gradient(model, mesh_of(2), batches), alone, ROUNDING)
    if model is JOINT:  # more ranks than heads
        batches = batches_of(joint, model, "balanced", 4, **SPLIT | {"context": 4})
        assert any(batch.metadata.split is not None for batch in batches)
        assert_same(mean_gradient(model, mesh_of(4, context=4), batches), alone, ROUNDING)
    batches = batches_of(joint, model, "balanced", 2, **SPLIT)
    split = [batch.metadata.split for batch in batches if batch.metadata.split is not None]
    assert max(int(each.split.length.max()) for each in split) == 18
    found, programs = gradient_and_programs(model, mesh_of(2, context=2), batches)
    assert_same(found, alone, ROUNDING)
    plan, collation = plan_of(joint, model, "balanced", 2, **SPLIT)
    assert len(programs) <= len(collation.shapes(plan)) == len(plan.epoch(0).packing.split_sizes)
    assert any("all-to-all(" in program.as_text() for program in programs)
    assert_gathers_no_activations(programs, batches[0].tokens.shape[1])


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_other_neighbours_and_what_is_not_finite_reach_no_other_sample(joined, context):
    joint, model = joined
    batches = batches_of(joint, model, "balanced", context, **(SPLIT if context > 1 else {}))
    if context > 1:
        batches = [batch for batch in batches if batch.metadata.split is not None]
    batch = max(batches, key=lambda batch: len(np.unique(batch.sample)))
    assert np.bincount(batch.sample[batch.sample >= 0]).max() >= context  # parts of one sample
    assert_reaches_no_other(model, batch, context)


def test_plans_count_both_kinds_of_tokens(joint):
    conditions = conditions_for(JOINT, joint)
    video = joint.samples(JOINT.patch_size).seq_len
    packed, bucketed = (samples_for(JOINT, joint, conditions, kind) for kind in (True, False))
    np.testing.assert_array_equal(bucketed.seq_len, video + conditions.length)
    lengths = joint.part_lengths[:, 0] + joint.text_length + joint.form.image_shape[0]
    np.testing.assert_array_equal(packed.seq_len, video + lengths)
    held_out = HeldOut(StoreReader(joint), conditions)
    validator = Validator(ValidationConfig(share=0.5), spec_of(JOINT), mesh_of(), held_out, None)
    assert [each.seq_len for each in validator.classes] == np.unique(bucketed.seq_len).tolist()


# ---------------------------------------------------------------- images and given frames

GIVEN, IMAGES = 3, (5, 4)
IMAGE_TO_VIDEO: WanConfig = dataclasses.replace(
    CLASSES,
    in_channels=2 + GIVEN,
    out_channels=2,
    text=TextConfig(dim=6, length=4),
    image=ImageConfig(dim=IMAGES[1]),
)
FIRST = FlowMatching(condition_dropout=0.3, given_first_frame=0.6)


def write_given(folder, text=True):
    def sample(rng, n):
        size = SIZES[n % len(SIZES)]
        if not text:
            return size, rng.integers(0, 10, n % 2 + 1), {}
        more = {"given": normal(rng, *size, GIVEN), "image": normal(rng, *IMAGES)}
        return size, normal(rng, n % 5, 6), more

    return write_samples(folder, 9, sample)


class Echo:
    """A model whose velocity is what it is given, and the first frame's timestep."""

    config = CLASSES

    def forward(self, latents, timestep, condition, *, first_frame_timestep, **_):
        return Output(latents + first_frame_timestep[:, None, None, None, None] / 1000, {})

    def forward_packed(
        self, tokens, positions, metadata, timestep, condition, *, first_frame_timestep, **_
    ):
        first = to_tokens(first_frame_timestep, metadata.tokens.ids)
        return Output(tokens + first[..., None] / 1000, {})


def test_first_frames_count_and_are_given_in_packed_rows_as_in_bucketed_ones(tmp_path):
    manifest, key = write_given(tmp_path / "data", text=False), jax.random.key(3)
    for objective in (FIRST, dataclasses.replace(FIRST, weighting="token")):
        of_batch = jax.jit(partial(objective, Echo(), key=key, sharding=None))
        losses = {}
        for policy in ("fixed", "balanced"):
            sums = [of_batch(batch=batch) for batch in batches_of(manifest, CLASSES, policy)]
            losses[policy] = [float(sum(each[n] for each in sums)) for n in (1, 2)]
        np.testing.assert_allclose(losses["balanced"], losses["fixed"], rtol=1e-5)


def model_of(config):
    model = nnx.merge(abstract_model(config).graph, nnx.state(build_model(config, nnx.Rngs(0))))
    nnx.update(model, disturbed(nnx.state(model, nnx.Param)))
    return model


@needs_devices
@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_images_and_first_frames_are_given_alike_in_every_layout(first, tmp_path):
    manifest = write_given(tmp_path / "data", text=not first)
    model, objective = (CLASSES, FIRST) if first else (IMAGE_TO_VIDEO, None)
    batches = batches_of(manifest, model, "fixed")
    alone = mean_gradient(model, mesh_of(), batches, objective)
    if first:
        assert not np.isclose(alone[0], mean_gradient(model, mesh_of(), batches)[0], rtol=1e-4)
    batches = batches_of(manifest, model, "dual_constraint", 2)
    assert_same(mean_gradient(model, mesh_of(), batches, objective), alone)
    options = {"context": 2, "m_mem": 12, "align": 4} if first else {}
    batches = batches_of(manifest, model, "balanced", 2, **options)
    assert any(batch.metadata.split is not None for batch in batches) == first
    mesh = mesh_of(2, context=2) if first else mesh_of()
    assert_same(mean_gradient(model, mesh, batches, objective), alone)


@pytest.mark.slow
def test_the_loss_is_that_of_the_other_frames_with_the_first_one_clean(tmp_path):
    manifest, model = write_given(tmp_path / "data", text=False), model_of(CLASSES)
    always = FlowMatching(condition_dropout=0.0, given_first_frame=1.0)
    key = jax.random.key(3)
    sharding = jax.sharding.NamedSharding(mesh_of(), jax.sharding.PartitionSpec())

    @nnx.jit
    def losses(model, batch):
        noisy = noised(batch, key, always, CLASSES)
        frames, height, width = batch.latents.shape[1:4]
        latents, times = noisy.latents, jnp.full((1, frames), noisy.sigma[0] * 1000)
        skipped = 0
        if frames > 1:
            latents = latents.at[:, 0].set(batch.latents[:, 0])
            times, skipped = times.at[:, 0].set(0), 1
        by_token = jnp.repeat(times, height * width // 4, axis=1)
        found = model.forward(latents, by_token, noisy.condition).velocity
        error = jnp.square(found - noisy.target)[:, skipped:].mean()
        return always(model, batch, key, sharding).loss, error

    for batch in batches_of(manifest, CLASSES, "fixed"):
        np.testing.assert_allclose(*losses(model, jax.tree.map(jnp.asarray, batch)), rtol=1e-5)


@pytest.mark.slow
def test_a_family_without_a_timestep_for_the_first_frame_refuses_it():
    model = dataclasses.replace(CLASSES, patch_size=(2, 2, 2))
    objective = FlowMatching(given_first_frame=0.5)
    with pytest.raises(InputError, match=r"objective\.given_first_frame is set, but"):
        objective(model_of(model), None, None, None)


def test_a_calibrated_step_has_what_the_model_takes():
    batch = jax.eval_shape(lambda: random_batch(IMAGE_TO_VIDEO, (2, 3, 4, 4)))
    assert batch.latents.shape == (2, 3, 4, 4, 2)
    assert batch.given.shape == (2, 3, 4, 4, GIVEN)
    assert batch.image.shape == (2, 257, IMAGES[1])
    text = dataclasses.replace(CLASSES, text=TextConfig(dim=6, length=4))
    batch = jax.eval_shape(lambda: random_batch(text, (2, 3, 4, 4)))
    assert (batch.given, batch.image, batch.condition.shape) == (None, None, (2, 4, 6))
    batch = random_batch(JOINT, (2, 3, 4, 4))  # whose images are condition tokens
    assert (batch.given.shape, batch.image) == ((2, 3, 4, 4, 3), None)
    for part in JOINT.condition_parts():
        values, (offset, length, ids) = batch.condition[part.name]
        assert values.shape == (2, part.length, part.width)
        assert (length == part.length).all()
        assert not np.concatenate([offset, ids], axis=1).any()


# ---------------------------------------------------------------- sparse attention

POOLED = SparseAttentionConfig(selector="pooled", forced=(0.3, 1.0), min_tokens=64)
SPARSE = dataclasses.replace(CLASSES, num_heads=4, num_layers=2, sparse_attention=POOLED)


def with_sparse(**changes):
    return dataclasses.replace(SPARSE, sparse_attention=dataclasses.replace(POOLED, **changes))


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Samples of 4, 550 and 585 tokens."""
    sizes = {(1, 4, 4): 5, (5, 20, 22): 4, (3, 26, 30): 3}
    return write_sizes(tmp_path_factory.mktemp("long") / "data", sizes, lambda _: 2)


def sums_of(model, mesh, batches, state=None, objective=None):
    """Mean loss, gradients and auxiliary values; the heads have different densities."""
    variables = jax.tree.map(np.array, begun(state or model).variables)
    switch = variables["blocks"]["sparse_attention"]["switch"]
    switch["density"] *= np.float32((1.0, 0.4, 0.7, 0.2))
    # Attention that is not nearly even, so that it matters which blocks are attended to.
    params = weights_of(model)
    attention = params["blocks"]["self_attention"]
    norm = {"scale": 4 * attention["query_norm"]["scale"]}
    blocks = params["blocks"] | {"self_attention": attention | {"query_norm": norm}}
    weights = Weights(params | {"blocks": blocks}, {}, variables)
    return mean_gradient(model, mesh, batches, objective, weights, auxiliary=True)


@needs_devices
@pytest.mark.slow
def test_packed_and_split_samples_attend_to_the_blocks_of_whole_ones(long, monkeypatch):
    batches = batches_of(long, SPARSE, "fixed", m_mem=600)
    alone, one = sums_of(SPARSE, mesh_of(), batches), max(batches, key=lambda b: b.latents.size)
    # A thousand times what is allowed between layouts.
    ours, theirs = (
        sums_of(model, mesh_of(), [one])[1]["blocks"]["self_attention"]
        for model in (with_sparse(selector="all"), SPARSE)
    )
    apart = optax.tree.norm(jax.tree.map(jnp.subtract, ours, theirs))
    assert apart > 0.01 * optax.tree.norm(theirs)

    batches = batches_of(long, SPARSE, "balanced", 1, m_mem=1300)
    assert max(int((batch.weight > 0).sum()) for batch in batches) > 2
    layout = batches[0].metadata.row_tiles
    assert (layout.covers_all, layout.longest) == (False, 10)
    assert_same(sums_of(SPARSE, mesh_of(), batches)[:2], alone[:2])
    # The first exchanges as many heads as is predicted to be fast; the second divides no heads.
    switching = {"forced": None, "max_density": 0.3, "capacities": (), "head_exchange": "fastest"}
    by_heads = {"context": 2, "fsdp": 2, "tensor": 2}
    for axes, model in ((by_heads, with_sparse(**switching)), ({"context": 3}, SPARSE)):
        mesh = mesh_of(math.prod(axes.values()), **axes)
        options = {"context": axes["context"], "m_mem": 700, "split_above": 0.3}
        batches = batches_of(long, SPARSE, "balanced", ranks_of(mesh), **options)
        assert max(int(batch.metadata.split.split.length.max()) for batch in batches) in (550, 585)
        assert_same(sums_of(model, mesh, batches, SPARSE)[:2], alone[:2])

    # Rows of one sample each need no attention within segments, which float32 lacks on GPUs.
    monkeypatch.setattr(attention, "xla_packed", None)
    batches = batches_of(long, SPARSE, "equal_tokens", m_mem=1300, **MERGED)
    assert {batch.metadata.tokens.length.shape[1:] for batch in batches} == {(1,)}
    assert_same(sums_of(SPARSE, mesh_of(), batches)[:2], alone[:2])


@needs_devices
@pytest.mark.slow
def test_first_frames_are_given_alike_where_attention_is_sparse(long):
    always = FlowMatching(given_first_frame=1.0)
    batches = batches_of(long, SPARSE, "fixed", m_mem=600)
    alone = sums_of(SPARSE, mesh_of(), batches, objective=always)[:2]
    options = {"context": 2, "m_mem": 700, "split_above": 0.3}
    batches = batches_of(long, SPARSE, "balanced", 2, **options)
    found = sums_of(SPARSE, mesh_of(2, context=2), batches, objective=always)
    assert_same(found[:2], alone)
    assert any(batch.metadata.split.split.length.any() for batch in batches)


@needs_devices
@pytest.mark.slow
def test_the_profile_of_rows_is_about_that_of_their_samples(long):
    """Other blocks of queries are sampled, or some more often."""
    model = with_sparse(selector="predictor", rank=4, profile_blocks=64)
    expected = sums_of(model, mesh_of(), batches_of(long, model, "fixed", m_mem=600))
    options = {"context": 3, "m_mem": 700, "split_above": 0.3}
    batches = batches_of(long, model, "balanced", 3, **options)
    loss, grads, found = sums_of(model, mesh_of(3, context=3), batches)
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


@pytest.mark.slow
def test_weights_without_predictors_get_new_ones():
    model = with_sparse(selector="predictor", rank=4)
    dense = dataclasses.replace(model, sparse_attention=None)
    released = init_state(spec_of(dense), mesh_of(), 1).params
    expected = {name: np.asarray(x) for name, x in flatten_dict(released, sep="/").items()}
    state = init_state(spec_of(model), mesh_of(), 2, released)
    found = flatten_dict(state.params, sep="/")
    for name, value in expected.items():
        np.testing.assert_array_equal(found.pop(name), value)
    sides = [f"blocks/sparse_attention/selector/{side}/kernel" for side in ("key", "query")]
    assert sorted(found) == sides
    assert all(np.asarray(value).any() for value in found.values())
