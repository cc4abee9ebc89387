"""Evaluators of the digits, on clips that are drawn by hand in place of a model."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from alload_jax.data.datasets.digits import DIGIT, load_digits
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling.evaluators import Drawing
from alload_jax.sampling.evaluators.digits import DigitAccuracy, DigitMotion, jerk_over_travel

IMAGES, LABELS = load_digits()
MEANS = np.stack([IMAGES[digit == LABELS].mean(axis=0) for digit in range(10)])


def means_of(order):
    """Draws stills whose digits are the means of the labels' scans, in an order of places."""

    def draw(values, key, labels, size):
        frames, height, width = size
        places = labels[:, : width // DIGIT][:, ::order]
        stills = np.concatenate([MEANS[column] for column in places.T], axis=2)
        return stills.reshape(len(labels), frames, height, width, 1)

    return draw


@pytest.mark.parametrize(("order", "pairs"), [(1, 1.0), (-1, 0.1)])
def test_a_pair_is_right_if_both_digits_stand_where_they_were_asked_for(order, pairs):
    found = DigitAccuracy(per_digit=10).evaluate(Drawing(means_of(order), None, 2, 0, {}))
    assert found == {"digit_accuracy": 1.0, "pair_accuracy": pytest.approx(pairs)}


def test_pairs_are_not_asked_for_where_samples_have_one_class():
    found = DigitAccuracy(per_digit=1).evaluate(Drawing(means_of(1), None, 1, 0, {}))
    assert found == {"digit_accuracy": 1.0}


def dots(path):
    """A clip of a bright dot, spread over the pixels about each position of [frames, 2]."""
    clip = np.full((len(path), 16, 16), -1.0)
    for frame, place in zip(clip, path, strict=True):
        (y, x), (v, u) = np.divmod(place, 1)[0].astype(int), np.divmod(place, 1)[1]
        frame[y : y + 2, x : x + 2] += 2 * np.outer([1 - v, v], [1 - u, u])
    return clip


def test_jerk_is_that_of_the_path():
    time = np.arange(17)[:, None]
    assert jerk_over_travel(dots(2 + time * [0.5, 0.3])) < 1e-6
    path = 7 + np.random.default_rng(0).uniform(-2, 2, (17, 2))
    travel = np.linalg.norm(np.diff(path, axis=0), axis=1).sum()
    jerk = np.linalg.norm(path[3:] - 3 * path[2:-1] + 3 * path[1:-2] - path[:-3], axis=1).mean()
    assert jerk_over_travel(dots(path)) == pytest.approx(jerk / travel)


def test_a_clip_without_light_or_motion_has_a_finite_figure():
    assert jerk_over_travel(np.full((17, 16, 16), -3.0)) == 0
    assert jerk_over_travel(np.ones((17, 16, 16))) == 0


def shaken(values, key, labels, size):
    """Draws dots at random places in place of digits."""
    noise = np.random.default_rng(0)
    assert labels.shape == (6, 2)
    assert set(labels[:, 1]) == {10}  # one digit a clip
    paths = noise.uniform(2, 12, (len(labels), size[0], 2))
    return np.stack([dots(path) for path in paths])[..., None]


@pytest.mark.parametrize(
    ("origin", "least", "most"),
    [
        ({"digits": {"motion": "circle"}}, 0.005, 0.01),
        ({"digits": {"motion": "drift"}}, 0.01, 0.05),
        ({"digits": {}}, 0.01, 0.05),
    ],
)
def test_the_motion_of_clips_is_told_beside_that_of_real_ones(origin, least, most):
    found = DigitMotion(clips=6).evaluate(Drawing(shaken, None, 2, 0, origin))
    assert found["jerk_over_travel"] > 0.1
    assert least < found["jerk_over_travel_real"] < most


def test_folders_that_name_no_motion_hold_drifting_digits():
    real = [
        DigitMotion(clips=6).evaluate(Drawing(shaken, None, 2, 0, {"digits": content}))
        for content in ({}, {"motion": "drift"})
    ]
    assert real[0] == real[1]


def manifest_of(stride, origin):
    return SimpleNamespace(origin=origin, vae_stride=stride, path="data/manifest.parquet")


FOUR = WanConfig(in_channels=4, num_classes=10, patch_size=(1, 4, 4))
DIGITS = {"digits": {}}


@pytest.mark.parametrize(
    ("evaluator", "model", "manifest", "said"),
    [
        (DigitMotion(), {}, ((4, 1, 1), {"other": {}}), "needs the data set digits"),
        (DigitAccuracy(), {}, ((4, 1, 1), {}), "needs the data set digits"),
        (DigitAccuracy(), {"num_classes": 3}, ((4, 1, 1), DIGITS), "set it to 10"),
        (DigitMotion(frames=6), {}, ((4, 1, 1), DIGITS), "6×16×16 pixels"),
        (DigitMotion(width=10), {}, ((1, 1, 1), DIGITS), "17×16×10 pixels"),
        (DigitAccuracy(), {"patch_size": (1, 3, 3)}, ((4, 1, 1), DIGITS), "(1, 3, 3)"),
    ],
)
def test_data_or_a_model_that_do_not_fit_are_refused_before_training(
    evaluator, model, manifest, said
):
    with pytest.raises(InputError) as error:
        evaluator.check(dataclasses.replace(FOUR, **model), manifest_of(*manifest))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stride", [(1, 1, 1), (4, 1, 1)])
def test_data_and_a_model_that_fit_pass(stride):
    for evaluator in (DigitAccuracy(), DigitMotion()):
        evaluator.check(FOUR, manifest_of(stride, DIGITS))
