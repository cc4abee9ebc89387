"""From latents to pixels, and pictures as latents."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from alload_jax.data.pixel_latents import fold_frames
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling.conditions import decoded, family_fps
from alload_jax.sampling.encoders import Encoders, as_latent
from alload_jax.sampling.requests import Request, Target

VAE = SimpleNamespace(decode=lambda latents: np.zeros((len(latents), 8, 8, 3), np.uint8))
MODEL = WanConfig(in_channels=4)
REQUEST = Request((5, 2, 2), (2, 2, 2), 0, Path("x.gif"), None, None, None, None, 0)


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_unfolded(channels):
    frames = np.random.default_rng(0).normal(size=(5, 2, 2, channels)).astype(np.float32)
    request = REQUEST._replace(frames_per_latent=4)
    found = decoded(fold_frames(frames, 4), request, None)
    np.testing.assert_allclose(found, frames, rtol=1e-6)
    np.testing.assert_array_equal(decoded(frames, REQUEST, None), frames)


def test_latents_of_a_vae_are_decoded():
    assert decoded(np.ones((2, 1, 1, 16), np.float32), REQUEST, VAE).shape == (2, 8, 8, 3)


@pytest.mark.parametrize(
    ("stride", "channels", "vae", "pictures", "frames"),
    [
        ((1, 1, 1), 1, None, 1, 1),
        ((4, 1, 1), 4, None, 1, 4),
        ((4, 1, 1), 12, None, 3, 4),
        ((4, 8, 8), 16, None, None, 1),
        ((4, 8, 8), 4, None, None, 1),
        ((4, 8, 8), 16, VAE, 3, 1),
    ],
)
def test_frames_of_a_latent_are_told_where_it_holds_pixels(stride, channels, vae, pictures, frames):
    model = dataclasses.replace(MODEL, in_channels=channels)
    target = Target(model, stride, 1, 1, Encoders(vae=vae))
    assert target.picture_channels == pictures
    assert target.frames_per_latent == frames


@pytest.mark.parametrize(
    ("channels", "stride", "expected"),
    [
        (1, (1, 1, 1), None),
        (4, (4, 1, 1), None),
        (16, (4, 8, 8), 16.0),
        (16, (1, 1, 1), None),
        (48, (4, 16, 16), 24.0),
        (16, None, 16.0),
    ],
)
def test_the_frame_rate_of_a_family_is_that_of_its_vae(channels, stride, expected):
    assert family_fps(dataclasses.replace(MODEL, in_channels=channels), stride) == expected


@pytest.mark.parametrize(
    ("channels", "frames", "kept"), [(1, 1, 1), (3, 1, 3), (4, 4, 1), (12, 4, 3), (3, 3, 1)]
)
def test_a_picture_is_the_first_latent(channels, frames, kept):
    picture = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    latent = as_latent(picture, channels, frames)
    assert latent.shape == (1, 4, 6, channels)
    assert latent.dtype == np.float32
    values = picture.astype(np.float32) / 127.5 - 1
    expected = values if kept == 3 else values.mean(axis=-1, keepdims=True)
    copies = latent.reshape(4, 6, frames, kept)
    np.testing.assert_allclose(copies, np.repeat(expected[:, :, None], frames, axis=2), atol=1e-6)
