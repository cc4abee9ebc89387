"""Training of image-to-video models: packed, bucketed or one by one, and what they are given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layouts import (
    CLASSES,
    SIZES,
    assert_same,
    batches_of,
    disturbed,
    mean_gradient,
    mesh_of,
    normal,
    write_samples,
)

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.families import abstract_model, build_model
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching, noised
from alload_jax.training.trial_step import random_batch

GIVEN, IMAGES = 3, (5, 4)
MODEL: WanConfig = dataclasses.replace(
    CLASSES,
    in_channels=2 + GIVEN,
    out_channels=2,
    text=TextConfig(dim=6, length=4),
    image=ImageConfig(dim=IMAGES[1]),
)
FIRST = FlowMatching(condition_dropout=0.3, given_first_frame=0.6)


def write(folder, text=True):
    def sample(rng, n):
        size = SIZES[n % len(SIZES)]
        if not text:
            return size, rng.integers(0, 10, n % 2 + 1), {}
        more = {"given": normal(rng, *size, GIVEN), "image": normal(rng, *IMAGES)}
        return size, normal(rng, n % 5, 6), more

    return write_samples(folder, 9, sample)


@pytest.mark.slow
def test_every_layout_gives_the_loss_and_gradient_of_one_by_one(tmp_path):
    manifest = write(tmp_path / "data")
    alone = mean_gradient(MODEL, mesh_of(), batches_of(manifest, MODEL, "fixed"))
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(alone)}
    assert any("image_key" in name for name in names)
    for policy in ("balanced", "dual_constraint"):
        batches = batches_of(manifest, MODEL, policy, 2)
        assert_same(mean_gradient(MODEL, mesh_of(), batches), alone)


@pytest.mark.slow
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_every_layout_gives_the_first_frame_to_the_same_videos(tmp_path):
    manifest = write(tmp_path / "data", text=False)
    batches = batches_of(manifest, CLASSES, "fixed")
    alone = mean_gradient(CLASSES, mesh_of(), batches, FIRST)
    assert not np.isclose(alone[0], mean_gradient(CLASSES, mesh_of(), batches)[0], rtol=1e-4)
    batches = batches_of(manifest, CLASSES, "dual_constraint", 2)
    assert_same(mean_gradient(CLASSES, mesh_of(), batches, FIRST), alone)
    options = {"context": 2, "m_mem": 12, "align": 4}
    batches = batches_of(manifest, CLASSES, "balanced", 2, **options)
    assert any(batch.metadata.split is not None for batch in batches)
    assert_same(mean_gradient(CLASSES, mesh_of(2, context=2), batches, FIRST), alone)


def model_of(config):
    model = nnx.merge(abstract_model(config).graph, nnx.state(build_model(config, nnx.Rngs(0))))
    nnx.update(model, disturbed(nnx.state(model, nnx.Param)))
    return model


@pytest.mark.slow
def test_the_loss_is_that_of_the_other_frames_with_the_first_one_clean(tmp_path):
    manifest, model = write(tmp_path / "data", text=False), model_of(CLASSES)
    always = FlowMatching(condition_dropout=0.0, given_first_frame=1.0)
    key = jax.random.key(3)
    sharding = jax.sharding.NamedSharding(mesh_of(), jax.sharding.PartitionSpec())
    for batch in batches_of(manifest, CLASSES, "fixed"):
        noisy = noised(batch, key, always, CLASSES)
        frames, height, width = batch.latents.shape[1:4]
        latents, times = noisy.latents, jnp.full((1, frames), noisy.sigma[0] * 1000)
        skipped = 0
        if frames > 1:
            latents = latents.at[:, 0].set(batch.latents[:, 0])
            times, skipped = times.at[:, 0].set(0), 1
        by_token = jnp.repeat(times, height * width // 4, axis=1)
        found = model.forward(latents, by_token, noisy.condition).velocity
        error = np.square(found - noisy.target)[:, skipped:].mean()
        sums = always(model, jax.tree.map(jnp.asarray, batch), key, sharding)
        np.testing.assert_allclose(sums.loss, error, rtol=1e-5)


def test_a_family_without_a_timestep_for_the_first_frame_refuses_it(tmp_path):
    model = dataclasses.replace(CLASSES, patch_size=(2, 2, 2))
    objective = FlowMatching(given_first_frame=0.5)
    with pytest.raises(InputError, match=r"objective\.given_first_frame is set, but"):
        objective(model_of(model), None, None, None)


def test_a_calibrated_step_has_what_the_model_takes():
    batch = jax.eval_shape(lambda: random_batch(MODEL, (2, 3, 4, 4)))
    assert batch.latents.shape == (2, 3, 4, 4, 2)
    assert batch.given.shape == (2, 3, 4, 4, GIVEN)
    assert batch.image.shape == (2, 257, IMAGES[1])
