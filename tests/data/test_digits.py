from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import yaml
from data_helpers import assert_says
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.datasets.dataset import prepare_dataset
from alload_jax.data.datasets.digits import (
    Digits,
    _reflect,
    load_digits,
    render_clip,
)
from alload_jax.data.manifest import MANIFEST_NAME, read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError
from alload_jax.planning.geometry import Geometry
from alload_jax.planning.samples import samples_from_columns

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = Digits(
    mix=((1, 8, 8, 40), (1, 8, 16, 40), (1, 16, 8, 20), (5, 8, 8, 6), (9, 16, 16, 6)), seed=3
)
SCANS, SCAN_LABELS = sklearn.datasets.load_digits(return_X_y=True)
SCANS = (SCANS.reshape(-1, 8, 8) / 8 - 1).astype(np.float16)
BLANK = np.full((8, 8), -1, np.float32)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "digits"
    SMALL.write(folder)
    return folder


def read_all(folder):
    manifest = read_manifest(folder)
    reader = StoreReader(manifest)
    return manifest, [reader.read(number) for number in range(len(manifest))]


def of_size(folder, size):
    manifest, records = read_all(folder)
    return [records[n] for n in np.flatnonzero((manifest.shape == size).all(axis=1))]


def scan_labels_of(image):
    """Labels of the scans that the picture shows, fading at its rim aside."""
    distance = np.abs(SCANS.astype(np.float32) - image.astype(np.float32)).max(axis=(1, 2))
    return set(SCAN_LABELS[distance < 0.01].tolist())


def draw(digit, frames, height, width, seed):
    clip = render_clip(np.asarray(digit), frames, height, width, np.random.default_rng(seed))
    assert clip.shape == (frames, height, width, 1)
    assert clip.dtype == np.float16
    return clip[..., 0].astype(np.float32)


def mass(clip):
    return (clip + 1).sum(axis=(1, 2))


scan_numbers = st.integers(0, len(SCANS) - 1)
seeds = st.integers(0, 2**32 - 1)
frame_counts = st.sampled_from([1, 5, 9, 13, 17])
sides = st.sampled_from([8, 10, 16, 24])


# ---------------------------------------------------------------- the mix


def config_mixes():
    config = yaml.safe_load((CONFIGS / "digits.yaml").read_text())
    mix = config["data"]["dataset"].get("mix", Digits().mix)
    return [
        pytest.param(Digits().mix, (1, 2, 2), id="default-1x2x2"),
        pytest.param(Digits().mix, (1, 4, 4), id="default-1x4x4"),
        pytest.param(mix, tuple(config["model"]["patch_size"]), id="digits.yaml"),
    ]


def planned(mix, patch):
    frames, height, width, count = np.array(mix).T
    columns = {"frames": frames, "height": height, "width": width}
    columns = {name: np.repeat(column, count) for name, column in columns.items()}
    return samples_from_columns(columns, Geometry((1, 1, 1), patch), "mix")


@pytest.mark.parametrize(("mix", "patch"), config_mixes())
def test_mixes_are_as_mixed_as_real_data(mix, patch):
    samples = planned(mix, patch)
    assert len(samples.buckets()) >= 12
    assert samples.seq_len.max() >= 30 * samples.seq_len.min()
    assert len(np.unique(samples.shape[:, 1:], axis=0)) >= 3


@pytest.mark.parametrize(("mix", "patch"), config_mixes())
def test_mixes_hold_images_and_clips_of_up_to_17_frames(mix, patch):
    frames = {row[0] for row in mix}
    assert min(frames) == 1
    assert max(frames) == 17
    assert all(count % 4 == 1 for count in frames)
    assert all(height % patch[1] == width % patch[2] == 0 for _, height, width, _ in mix)


# ---------------------------------------------------------------- what is made


def test_loaded_digits_are_scikit_learns():
    images, labels = load_digits()
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(images, SCANS)
    np.testing.assert_array_equal(labels, SCAN_LABELS)


def test_there_are_as_many_samples_as_the_mix_asks_for(digits):
    manifest, _ = read_all(digits)
    sizes, counts = np.unique(manifest.shape, axis=0, return_counts=True)
    made = {(*size, count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)}
    assert {tuple(row) for row in SMALL.mix} == {(*size[:3], size[3]) for size in made}
    assert manifest.vae_stride == (1, 1, 1)
    assert set(manifest.channels.tolist()) == {1}


def test_the_same_config_makes_the_same_samples(digits, tmp_path):
    SMALL.write(tmp_path / "again")
    np.testing.assert_array_equal(
        read_manifest(tmp_path / "again").checksum, read_manifest(digits).checksum
    )


def test_another_seed_makes_other_samples(digits, tmp_path):
    Digits(mix=SMALL.mix, seed=4).write(tmp_path / "other")
    same = read_manifest(tmp_path / "other").checksum == read_manifest(digits).checksum
    assert same.mean() < 0.1


def test_small_stills_are_the_real_scans_and_their_labels(digits):
    scans = {scan.tobytes(): label for scan, label in zip(SCANS, SCAN_LABELS, strict=True)}
    for arrays in of_size(digits, (1, 8, 8)):
        assert arrays["latents"].dtype == np.float16
        assert arrays["labels"].tolist() == [scans[arrays["latents"][0, :, :, 0].tobytes()]]


def test_enough_small_stills_show_every_scan(tmp_path):
    Digits(mix=((1, 8, 8, 2 * len(SCANS)),)).write(tmp_path / "digits")
    _, records = read_all(tmp_path / "digits")
    shown = {arrays["latents"].tobytes() for arrays in records}
    assert shown == {scan.tobytes() for scan in SCANS}


@pytest.mark.parametrize(("size", "axis"), [((1, 8, 16), 1), ((1, 16, 8), 0)])
def test_two_digits_stand_side_by_side_in_the_order_of_their_labels(digits, size, axis):
    pairs = [arrays for arrays in of_size(digits, size) if len(arrays["labels"]) == 2]
    for arrays in pairs:
        halves = np.split(arrays["latents"][0, :, :, 0], 2, axis=axis)
        for half, label in zip(halves, arrays["labels"].tolist(), strict=True):
            assert label in scan_labels_of(half)
    assert len(pairs) >= 3


def test_most_of_the_large_samples_show_two_digits(tmp_path):
    Digits(mix=((1, 8, 8, 100), (1, 8, 16, 400))).write(tmp_path / "digits")
    manifest = read_manifest(tmp_path / "digits")
    roomy = manifest.shape[:, 2] == 16
    assert set(manifest.text_length[~roomy].tolist()) == {1}
    assert set(manifest.text_length[roomy].tolist()) == {1, 2}
    assert 0.7 < (manifest.text_length[roomy] == 2).mean() < 0.9


def test_labels_name_classes(digits):
    _, records = read_all(digits)
    labels = np.concatenate([arrays["labels"] for arrays in records])
    assert labels.dtype == np.int32
    assert set(labels.tolist()) == set(range(10))


# ---------------------------------------------------------------- clips


@settings(max_examples=60, deadline=None)
@given(st.lists(scan_numbers, min_size=1, max_size=2), frame_counts, sides, sides, seeds)
def test_clips_stay_between_black_and_white(numbers, frames, height, width, seed):
    clip = draw(SCANS[numbers].astype(np.float32), frames, height, width, seed)
    assert np.isfinite(clip).all()
    assert clip.min() >= -1
    assert clip.max() <= 1
    assert clip.max() > 0


@settings(max_examples=60, deadline=None)
@given(scan_numbers, st.sampled_from([5, 9, 13, 17]), sides, sides, seeds)
def test_consecutive_frames_differ(number, frames, height, width, seed):
    clip = draw(SCANS[[number]].astype(np.float32), frames, height, width, seed)
    assert np.abs(np.diff(clip, axis=0)).max(axis=(1, 2)).min() > 0.01


@settings(max_examples=60, deadline=None)
@given(scan_numbers, st.sampled_from([(24, 24), (32, 32), (16, 48), (48, 16)]), seeds)
def test_digits_stay_whole_inside_large_canvases(number, side, seed):
    masses = mass(draw(SCANS[[number]].astype(np.float32), 17, *side, seed))
    np.testing.assert_allclose(masses, masses.mean(), rtol=0.15)  # corners turn over the edge


@settings(max_examples=30, deadline=None)
@given(scan_numbers, st.sampled_from([(8, 64), (64, 8)]), seeds)
def test_the_canvas_is_black_where_the_digit_is_not(number, side, seed):
    clip = draw(SCANS[[number]].astype(np.float32), 5, *side, seed)
    diagonal = np.ceil(np.sqrt(2) * (8 + 2))
    for frame in clip:
        drawn = np.flatnonzero((frame > -1).any(axis=int(side[0] > side[1])))
        assert np.ptp(drawn) < diagonal


@settings(max_examples=30, deadline=None)
@given(scan_numbers, st.booleans(), st.sampled_from([(16, 32), (32, 16)]), seeds)
def test_each_of_two_digits_keeps_to_its_own_part(number, second, side, seed):
    pair = [BLANK, SCANS[number]] if second else [SCANS[number], BLANK]
    clip = draw(np.stack(pair).astype(np.float32), 17, *side, seed)
    first_half, second_half = np.split(clip, 2, axis=1 + int(side[1] > side[0]))
    own, other = (second_half, first_half) if second else (first_half, second_half)
    assert (mass(other) < 0.15 * mass(own)).all()  # corners turn over the border


@settings(max_examples=60, deadline=None)
@given(scan_numbers, st.sampled_from([(8, 8), (8, 16), (16, 16)]), seeds)
def test_motion_is_visible(number, side, seed):
    clip = draw(SCANS[[number]].astype(np.float32), 17, *side, seed)
    light = clip + 1
    total = light.sum(axis=(1, 2))
    rows, columns = light.sum(axis=2) @ np.arange(side[0]), light.sum(axis=1) @ np.arange(side[1])
    path = np.stack([rows, columns], axis=1) / total[:, None]
    assert np.linalg.norm(np.diff(path, axis=0), axis=1).sum() > 4  # pixels


def bounced(steps, size):
    """Position of a ball after `steps` unit steps between walls at 0 and `size`."""
    place, direction = 0, 1
    for _ in range(abs(steps)):
        if not 0 <= place + direction <= size:
            direction = -direction
        place += direction
    return place


@settings(max_examples=200, deadline=None)
@given(st.integers(-120, 120), st.integers(1, 15), st.fractions(Fraction(1, 8), 8))
def test_reflect_bounces_like_a_ball(steps, size, unit):
    unit = float(unit)
    found = _reflect(np.array([steps * unit]), np.array([size * unit]))
    np.testing.assert_allclose(found, [bounced(steps, size) * unit], atol=1e-9)


def test_nothing_moves_without_space():
    assert _reflect(np.array([0.0, 3.7, -2.0]), np.zeros(3)).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- preparing


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_data_are_made_once(tmp_path, capsys):
    config = Digits(mix=((1, 8, 8, 4),))
    prepare_dataset(tmp_path / "digits", config)
    made = contents(tmp_path / "digits")
    assert str(tmp_path / "digits") in capsys.readouterr().out
    prepare_dataset(str(tmp_path / "digits"), Digits(mix=((1, 8, 8, 4),)))
    assert contents(tmp_path / "digits") == made
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "other", [Digits(mix=SMALL.mix, seed=4), Digits(mix=SMALL.mix[:-1], seed=SMALL.seed)]
)
def test_data_of_another_config_are_refused_and_left_alone(digits, other):
    made = contents(digits)
    with pytest.raises(InputError) as error:
        prepare_dataset(digits, other)
    assert_says(error, digits, "data.dataset", "data.folder", "remove")
    assert contents(digits) == made


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "photo.png").write_bytes(b"precious")
    with pytest.raises(InputError) as error:
        prepare_dataset(tmp_path, Digits(mix=((1, 8, 8, 1),)))
    assert_says(error, tmp_path, "exists")
    assert [path.name for path in tmp_path.iterdir()] == ["photo.png"]


def test_a_manifest_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / MANIFEST_NAME).write_bytes(b"precious")
    with pytest.raises(InputError) as error:
        prepare_dataset(tmp_path, Digits(mix=((1, 8, 8, 1),)))
    assert_says(error, tmp_path, "data.folder")
    assert (tmp_path / MANIFEST_NAME).read_bytes() == b"precious"


@pytest.mark.parametrize(
    "row", [(0, 8, 8, 1), (3, 8, 8, 1), (1, 4, 8, 1), (1, 8, 6, 1), (1, 9, 8, 1), (1, 8, 8, 0)]
)
def test_a_mix_that_cannot_be_drawn_is_refused(tmp_path, row):
    with pytest.raises(InputError) as error:
        Digits(mix=(row,)).write(tmp_path / "digits")
    assert_says(error, "mix")
    assert list(tmp_path.iterdir()) == []
