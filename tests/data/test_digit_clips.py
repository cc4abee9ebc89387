"""Clips of digits: where the digits stand and how they move."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.datasets.digits import _reflect, load_digits, render_clip

SCANS, _ = load_digits()
BLANK = np.full((8, 8), -1, np.float32)


def draw(digit, frames, height, width, seed, motion):
    rng = np.random.default_rng(seed)
    clip = render_clip(np.asarray(digit), frames, height, width, rng, motion)
    assert clip.shape == (frames, height, width, 1)
    assert clip.dtype == np.float16
    return clip[..., 0].astype(np.float32)


def mass(clip):
    return (clip + 1).sum(axis=(1, 2))


scan_numbers = st.integers(0, len(SCANS) - 1)
seeds = st.integers(0, 2**32 - 1)
frame_counts = st.sampled_from([1, 5, 9, 13, 17])
sides = st.sampled_from([8, 10, 16, 24])
motions = st.sampled_from(["circle", "drift"])


@settings(max_examples=60, deadline=None)
@given(st.lists(scan_numbers, min_size=1, max_size=2), frame_counts, sides, sides, seeds, motions)
def test_clips_stay_between_black_and_white_and_frames_differ(
    numbers, frames, height, width, seed, motion
):
    clip = draw(SCANS[numbers], frames, height, width, seed, motion)
    assert np.isfinite(clip).all()
    assert clip.min() >= -1
    assert clip.max() <= 1
    assert clip.max() > 0
    assert np.abs(np.diff(clip, axis=0)).max(axis=(1, 2)).min(initial=1) > 0.01


@settings(max_examples=40, deadline=None)
@given(
    scan_numbers,
    st.sampled_from([(24, 24), (32, 32), (16, 48), (48, 16), (8, 64), (64, 8)]),
    seeds,
    motions,
)
def test_digits_stay_whole_and_the_canvas_black_where_they_are_not(number, side, seed, motion):
    clip = draw(SCANS[[number]], 17, *side, seed, motion)
    if min(side) > 8:
        masses = mass(clip)
        np.testing.assert_allclose(masses, masses.mean(), rtol=0.15)  # corners turn over the edge
    diagonal = np.ceil(np.sqrt(2) * (8 + 2))
    for frame in clip:
        drawn = np.flatnonzero((frame > -1).any(axis=int(side[0] > side[1])))
        assert np.ptp(drawn) < diagonal


@settings(max_examples=30, deadline=None)
@given(scan_numbers, st.booleans(), st.sampled_from([(16, 32), (32, 16)]), seeds, motions)
def test_each_of_two_digits_keeps_to_its_own_part(number, second, side, seed, motion):
    pair = [BLANK, SCANS[number]] if second else [SCANS[number], BLANK]
    clip = draw(np.stack(pair), 17, *side, seed, motion)
    first_half, second_half = np.split(clip, 2, axis=1 + int(side[1] > side[0]))
    own, other = (second_half, first_half) if second else (first_half, second_half)
    assert (mass(other) < 0.15 * mass(own)).all()  # corners turn over the border


def centroids(clip):
    """Where the light of each frame is, [frames, 2]."""
    light = clip + 1
    rows, columns = (light.sum(axis=3 - n) @ np.arange(clip.shape[n]) for n in (1, 2))
    return np.stack([rows, columns], axis=1) / light.sum(axis=(1, 2))[:, None]


@settings(max_examples=30, deadline=None)
@given(scan_numbers, st.sampled_from([(8, 8), (8, 16), (16, 16)]), seeds, motions)
def test_motion_is_visible(number, side, seed, motion):
    path = centroids(draw(SCANS[[number]], 17, *side, seed, motion))
    assert np.linalg.norm(np.diff(path, axis=0), axis=1).sum() > 4  # pixels


@settings(max_examples=30, deadline=None)
@given(scan_numbers, st.sampled_from([16, 24, 32]), st.sampled_from([21, 25, 33]), seeds)
def test_digits_go_round_clockwise_from_the_top(number, side, frames, seed):
    path = centroids(draw(SCANS[[number]], frames, side, side, seed, "circle"))
    centre = path[:20].mean(axis=0)  # of a whole circle
    rows, columns = (path - centre).T
    radius = 0.375 * (side - 8)
    np.testing.assert_allclose(np.hypot(rows, columns), radius, atol=0.05)
    angle = np.unwrap(np.arctan2(columns, -rows))
    np.testing.assert_allclose(angle, 2 * np.pi / 20 * np.arange(frames), atol=0.03)


@pytest.mark.parametrize(("motion", "moves"), [("circle", 1), ("drift", 20)])
def test_digits_move_alike_on_circles_alone(motion, moves):
    for side in ((8, 8), (8, 16), (16, 16)):
        clips = {draw(SCANS[[7]], 17, *side, seed, motion).tobytes() for seed in range(20)}
        assert len(clips) == moves
    pair = draw(SCANS[[7, 7]], 17, 16, 32, 0, motion)
    assert np.array_equal(*np.split(pair, 2, axis=2)) == (moves == 1)


def test_drifting_digits_are_those_of_folders_that_name_no_motion():
    path = centroids(draw(SCANS[[7]], 5, 16, 16, 11, "drift"))
    expected = [[6.092, 7.750], [5.352, 7.384], [4.618, 7.013], [3.884, 6.647], [3.166, 6.266]]
    np.testing.assert_allclose(path, expected, atol=0.002)


def bounced(steps, size):
    """Position of a ball after `steps` unit steps between walls at 0 and `size`."""
    place, direction = 0, 1
    for _ in range(abs(steps)):
        if not 0 <= place + direction <= size:
            direction = -direction
        place += direction
    return place


@settings(max_examples=100, deadline=None)
@given(st.integers(-120, 120), st.integers(1, 15), st.fractions(Fraction(1, 8), 8))
def test_reflect_bounces_like_a_ball(steps, size, unit):
    unit = float(unit)
    found = _reflect(np.array([steps * unit]), np.array([size * unit]))
    np.testing.assert_allclose(found, [bounced(steps, size) * unit], atol=1e-9)


def test_nothing_moves_without_space():
    assert _reflect(np.array([0.0, 3.7, -2.0]), np.zeros(3)).tolist() == [0, 0, 0]
