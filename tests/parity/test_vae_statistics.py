"""The statistics of Wan's latents, against diffusers' own."""

import inspect

import numpy as np
import pytest

from alload_jax.data.sources.files import normalized

pytestmark = pytest.mark.parity


def test_wan_2_1_latents_are_normalised_as_in_diffusers():
    from diffusers import AutoencoderKLWan

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    mean, deviation = (
        np.array(defaults[name].default, np.float32) for name in ("latents_mean", "latents_std")
    )
    latents = np.random.default_rng(0).normal(size=(2, 3, 4, 16)).astype(np.float32)
    np.testing.assert_allclose(
        normalized(latents, "wan2.1"), (latents - mean) / deviation, rtol=1e-6
    )
