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


@settings(max_examples=100, deadline=None)
@given(PER_LATENT, st.integers(0, 5), st.sampled_from([1, 3]), DTYPES, st.integers(0, 99))
def test_frames_come_back_from_their_latents(per_latent, groups, channels, dtype, seed):
    frames = pixels((per_latent * groups + 1, 2, 3, channels), seed, dtype)
    latents = fold_frames(frames, per_latent)
    assert latents.dtype == dtype
    grid = Geometry((per_latent, 1, 1)).latent_grid(*np.array(frames.shape[:3])[:, None])
    assert latents.shape == (*grid[0], per_latent * channels)
    np.testing.assert_allclose(unfold_frames(latents, per_latent), frames, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(PER_LATENT, st.integers(0, 4), st.sampled_from([1, 3]), st.integers(0, 99))
def test_a_latent_holds_frames_in_its_channels(per_latent, groups, channels, seed):
    frames = pixels((per_latent * groups + 1, 2, 3, channels), seed)
    latents = fold_frames(frames, per_latent)
    for group, latent in enumerate(latents):
        for place in range(per_latent):
            held = latent[..., place * channels : (place + 1) * channels]
            number = 0 if group == 0 else (group - 1) * per_latent + place + 1
            np.testing.assert_array_equal(held, frames[number])


@settings(max_examples=30, deadline=None)
@given(PER_LATENT, st.integers(0, 4), st.lists(st.integers(1, 3), max_size=2))
def test_batches_are_unfolded_clip_by_clip(per_latent, groups, batch):
    latents = pixels((*batch, groups + 1, 2, 2, 3 * per_latent), 0)
    found = unfold_frames(latents, per_latent)
    assert found.shape == (*batch, per_latent * groups + 1, 2, 2, 3)
    for place in np.ndindex(*batch):
        np.testing.assert_array_equal(found[place], unfold_frames(latents[place], per_latent))


def test_the_first_frame_is_the_mean_of_its_copies():
    latents = np.arange(8, dtype=np.float32).reshape(2, 1, 1, 4)
    assert unfold_frames(latents, 4).ravel().tolist() == [1.5, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("stride", "channels", "expected"),
    [
        ((1, 1, 1), 1, 1),
        ((1, 1, 1), 3, 3),
        ((1, 1, 1), 4, None),
        ((1, 1, 1), 16, None),
        ((4, 1, 1), 4, 1),
        ((4, 1, 1), 12, 3),
        ((4, 1, 1), 1, None),
        ((4, 1, 1), 3, None),
        ((4, 1, 1), 16, None),
        ((3, 1, 1), 3, 1),
        ((4, 8, 8), 4, None),
        ((4, 8, 8), 12, None),
        ((1, 1, 8), 1, None),
        ((4, 16, 16), 48, None),
    ],
)
def test_pixels_are_told_from_latents_of_a_vae(stride, channels, expected):
    assert pixel_channels(stride, channels) == expected
