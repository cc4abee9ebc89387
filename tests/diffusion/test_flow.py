"""The path from data to noise, and weights of its error by noise level, alike in both layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import batches_of, write_samples

from alload_jax.data.batch import PackedBatch
from alload_jax.diffusion.timesteps import (
    TimestepConfig,
    interpolate,
    loss_weight,
    squared_error,
    velocity,
)
from alload_jax.errors import InputError
from alload_jax.models.common.parts import Output, patchify
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching, _with_given, noised

WEIGHTINGS = ("none", "min_snr", "cosmap", "sigma_sqrt")


def test_the_path_runs_from_data_to_noise_at_the_target_velocity():
    data, noise = np.random.default_rng(0).normal(size=(2, 3, 2, 4, 4, 1)).astype(np.float32)
    np.testing.assert_array_equal(interpolate(data, noise, jnp.zeros(3)), data)
    np.testing.assert_array_equal(interpolate(data, noise, jnp.ones(3)), noise)
    sigma = jnp.asarray([0.1, 0.5, 0.7])
    _, slope = jax.jvp(lambda s: interpolate(data, noise, s), (sigma,), (jnp.ones(3),))
    np.testing.assert_allclose(slope, velocity(data, noise), rtol=1e-6)
    expected = ((data - noise) ** 2).reshape(3, -1).mean(axis=1)
    np.testing.assert_allclose(squared_error(data, noise), expected, rtol=1e-6)


def weight(sigma, weighting, gamma=5.0):
    """In float64; min-SNR from its definition for the predicted data."""
    if weighting == "min_snr":
        return sigma**2 * np.minimum(((1 - sigma) / sigma) ** 2, gamma)
    if weighting == "cosmap":
        return 2 / (np.pi * ((1 - sigma) ** 2 + sigma**2))
    return sigma**-2.0 if weighting == "sigma_sqrt" else np.ones_like(sigma)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_weight_is_its_closed_form_finite_at_the_ends_and_passes_nan_on(weighting):
    sigma = np.r_[0.0015, np.linspace(0.001, 1, 200)]
    found = loss_weight(jnp.asarray(sigma, jnp.float32), weighting, 5.0)
    np.testing.assert_allclose(found, weight(sigma, weighting), rtol=1e-4)
    at_ends = {"none": [1, 1], "min_snr": [0, 0], "cosmap": [0.63662] * 2, "sigma_sqrt": [1e6, 1]}
    ends = loss_weight(jnp.asarray([0.0, 1.0]), weighting, 5.0)
    np.testing.assert_allclose(ends, at_ends[weighting], rtol=1e-4)
    if weighting != "none":
        assert np.isnan(jax.jit(lambda sigma: loss_weight(sigma, weighting, 5.0))(jnp.nan))


# ---------------------------------------------------------------- both layouts

MODEL = WanConfig(dim=16, num_heads=2, num_layers=1, in_channels=2, patch_size=(1, 2, 2))


class ZeroVelocity:
    """A model without parameters, so that the loss is known: the mean of the squared target."""

    config = MODEL

    def forward(self, latents, timestep, condition, sharding=None, first_frame_timestep=None):
        return Output(jnp.zeros_like(latents), {})

    def forward_packed(self, tokens, position, metadata, timestep, condition, **others):
        return Output(jnp.zeros_like(tokens), {})


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """A packed micro-batch, and its samples one by one."""
    sizes = (1, 4, 4), (3, 4, 6), (1, 4, 4), (1, 4, 6)
    folder = tmp_path_factory.mktemp("weighting") / "data"
    manifest = write_samples(folder, 4, lambda rng, n: (sizes[n], np.zeros(1, np.int32), {}))
    return [batches_of(manifest, MODEL, policy) for policy in ("balanced", "fixed")]


@pytest.mark.parametrize(
    ("weighting", "distribution", "given"),
    [("min_snr", "logit_normal", 0.0), ("sigma_sqrt", "mode", 0.0), ("none", "uniform", 1.0)],
)
def test_packed_bucketed_and_by_hand_are_the_same(batches, weighting, distribution, given):
    timesteps = TimestepConfig(distribution=distribution, shift=2.0, shift_power=0.5)
    fields = {"given_first_frame": given, "noise_weighting": weighting, "min_snr_gamma": 3.0}
    objective = FlowMatching(timesteps=timesteps, **fields)
    key = jax.random.key(3)
    packed, alone = batches
    assert isinstance(packed[0], PackedBatch)

    def total(parts):
        sums = [objective(ZeroVelocity(), part, key, None) for part in parts]
        return sum(float(each.loss) for each in sums), sum(float(each.weight) for each in sums)

    expected = 0.0
    for batch in alone:
        noisy = noised(batch, key, objective, MODEL)
        predicted = slice(1 if given and batch.latents.shape[1] > 1 else 0, None)
        target = np.asarray(noisy.target, np.float64)[:, predicted]
        error = np.square(target).mean((1, 2, 3, 4))
        levels = np.maximum(np.asarray(noisy.sigma, np.float64), 1e-3)
        expected += float((batch.weight * weight(levels, weighting, 3.0) * error).sum())
    (one_by_one, weights), (together, same) = total(alone), total(packed)
    assert weights == same == 4
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-4)
    np.testing.assert_allclose(together, one_by_one, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_snr_gamma": 0.0}, r"objective\.min_snr_gamma is 0\.0"),
        ({"noise_weighting": "snr"}, r"noise_weighting is 'snr'; choose none or"),
    ],
)
def test_invalid_settings_are_refused(fields, words):
    with pytest.raises(InputError, match=words):
        FlowMatching(**fields)


def test_what_is_given_stands_behind_each_latent_in_patches_too():
    parts = [np.random.default_rng(n).normal(size=(2, 3, 4, 6, n)) for n in (2, 3)]
    expected = np.concatenate(parts, axis=-1)
    np.testing.assert_array_equal(_with_given(*map(jnp.asarray, parts), 1), jnp.asarray(expected))
    arrays = (*parts, expected)
    latents, given, both = (patchify(jnp.asarray(each), (1, 2, 2)) for each in arrays)
    np.testing.assert_array_equal(_with_given(latents, given, 4), both)
