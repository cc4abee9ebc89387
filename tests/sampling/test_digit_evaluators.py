"""Evaluators of the digits, on clips that are drawn by hand in place of a model."""

import dataclasses
import re
from types import SimpleNamespace

import numpy as np
import pytest

from alload_jax.data.datasets.digits import DIGIT, load_digits
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling.evaluators import DigitAccuracy, DigitMotion, Drawing, jerk_over_travel

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


def test_a_pair_is_right_if_both_digits_stand_where_they_were_asked_for():
    found = {
        (tokens, order): DigitAccuracy(per_digit=10).evaluate(
            Drawing(means_of(order), None, tokens, 0, {})
        )
        for tokens, order in ((2, 1), (2, -1), (1, 1))
    }
    assert found[2, 1] == {"digit_accuracy": 1.0, "pair_accuracy": 1.0}
    assert found[2, -1] == {"digit_accuracy": 1.0, "pair_accuracy": pytest.approx(0.1)}
    assert found[1, 1] == {"digit_accuracy": 1.0}  # samples have one class


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
    moving, still = dots(np.floor(path)), dots(np.full((17, 2), 12.0))
    brighter = np.where(moving > 0, np.linspace(1, 3, 17)[:, None, None], -3)
    beyond = np.maximum(brighter, still)
    assert jerk_over_travel(beyond) == jerk_over_travel(np.maximum(moving, still))
    for value in (-3.0, 1.0):  # without light or motion
        assert jerk_over_travel(np.full((17, 16, 16), value)) == 0


def shaken(values, key, labels, size):
    """Draws dots at random places in place of digits."""
    noise = np.random.default_rng(0)
    assert labels.shape == (6, 2)
    assert set(labels[:, 1]) == {10}  # one digit a clip
    paths = noise.uniform(2, 12, (len(labels), size[0], 2))
    return np.stack([dots(path) for path in paths])[..., None]


def test_the_motion_of_clips_is_told_beside_that_of_real_ones():
    found = [
        DigitMotion(clips=6).evaluate(Drawing(shaken, None, 2, 0, {"digits": digits}))
        for digits in ({"motion": "circle"}, {"motion": "drift"}, {})
    ]
    assert all(each["jerk_over_travel"] > 0.1 for each in found)
    circle, drift, unnamed = (each["jerk_over_travel_real"] for each in found)
    assert 0.005 < circle < 0.01 < drift < 0.05
    assert drift == unnamed
    negative = Drawing(shaken, None, 2, -1, {"digits": {}})  # a seed that JAX takes
    assert DigitMotion(clips=6).evaluate(negative)["jerk_over_travel_real"] > 0


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
    with pytest.raises(InputError, match=re.escape(said)):
        evaluator.check(dataclasses.replace(FOUR, **model), manifest_of(*manifest))


def test_data_and_a_model_that_fit_pass():
    for stride in ((1, 1, 1), (4, 1, 1)):
        for evaluator in (DigitAccuracy(per_digit=1), DigitMotion(clips=1, frames=5)):
            evaluator.check(FOUR, manifest_of(stride, DIGITS))


def test_clips_without_motion_or_pixels_are_refused():
    with pytest.raises(InputError, match="frames is 3; third differences need 4"):
        DigitMotion(frames=3)
    for side in ("height", "width"):
        with pytest.raises(InputError, match=f"digit_motion: {side} is 0; it must be at least 1"):
            DigitMotion(**{side: 0})
