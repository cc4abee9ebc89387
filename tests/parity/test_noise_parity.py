"""Noise levels and weights of the loss beside those of diffusers."""

import numpy as np
import pytest

from alload_jax.diffusion.timesteps import TimestepConfig, loss_weight, sample_sigma

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("torch")
    return pytest.importorskip("diffusers.training_utils")


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap", "none"])
def test_the_weights_are_those_of_diffusers(theirs, scheme):
    import torch

    sigma = np.linspace(0.001, 1, 500, dtype=np.float32)
    expected = theirs.compute_loss_weighting_for_sd3(scheme, torch.from_numpy(sigma)).numpy()
    np.testing.assert_allclose(loss_weight(sigma, scheme, 5.0), expected, rtol=1e-5)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode", "none"])
def test_the_levels_have_the_distribution_of_diffusers(theirs, scheme):
    """Its draws are places in timesteps from 1000 down to 0: a place u is the level 1 − u."""
    import jax
    import scipy.stats
    import torch

    drawn = theirs.compute_density_for_timestep_sampling(
        scheme, 20_000, 0.5, 1.2, 1.29, generator=torch.Generator().manual_seed(0)
    )
    name = "uniform" if scheme == "none" else scheme
    config = TimestepConfig(distribution=name, mean=-0.5, std=1.2, mode_scale=1.29)
    keys = jax.random.split(jax.random.key(0), 20_000)
    found = np.asarray(jax.vmap(lambda key: sample_sigma(key, config, 16))(keys))
    assert scipy.stats.ks_2samp(found, 1 - drawn.numpy()).pvalue > 1e-3
