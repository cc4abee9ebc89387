"""Latents that hold pixels of one frame or of several."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.pixel_latents import fold_frames, pixel_channels, unfold_frames
from alload_jax.planning.samples import Geometry

PER_LATENT = st.integers(1, 8)
DTYPES = st.sampled_from([np.float16, np.float32])


def pixels(shape, seed, dtype=np.float32):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(dtype)


@settings(max_examples=80, deadline=None)
@given(PER_LATENT, st.integers(0, 5), st.sampled_from([1, 3]), DTYPES, st.integers(0, 99))
def test_a_latent_holds_frames_in_its_channels_which_come_back(
    per_latent, groups, channels, dtype, seed
):
    frames = pixels((per_latent * groups + 1, 2, 3, channels), seed, dtype)
    latents = fold_frames(frames, per_latent)
    assert latents.dtype == dtype
    grid = Geometry((per_latent, 1, 1)).latent_grid(*np.array(frames.shape[:3])[:, None])
    assert latents.shape == (*grid[0], per_latent * channels)
    for group, latent in enumerate(latents):
        for place in range(per_latent):
            held = latent[..., place * channels : (place + 1) * channels]
            number = 0 if group == 0 else (group - 1) * per_latent + place + 1
            np.testing.assert_array_equal(held, frames[number])
    found = unfold_frames(latents, per_latent)
    np.testing.assert_allclose(found, frames, rtol=1e-6)
    batch = unfold_frames(np.stack([latents, -latents])[:, None], per_latent)  # clip by clip
    np.testing.assert_array_equal(batch, np.stack([found, -found])[:, None])


def test_the_first_frame_is_the_mean_of_its_copies():
    latents = np.arange(8, dtype=np.float32).reshape(2, 1, 1, 4)
    assert unfold_frames(latents, 4).ravel().tolist() == [1.5, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("stride", "channels", "expected"),
    [
        *(((1, 1, 1), channels, found) for channels, found in ((1, 1), (3, 3), (4, None))),
        *(((4, 1, 1), channels, found) for channels, found in ((4, 1), (12, 3), (3, None))),
        *(((4, 1, 1), 16, None), ((3, 1, 1), 3, 1), ((1, 1, 8), 1, None)),
        *(((4, 8, 8), 4, None), ((4, 8, 8), 12, None), ((4, 16, 16), 48, None)),
    ],
)
def test_pixels_are_told_from_latents_of_a_vae(stride, channels, expected):
    assert pixel_channels(stride, channels) == expected
