import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
from data_helpers import assert_says

from alload_jax.config import read_config
from alload_jax.data.datasets import prepare_dataset
from alload_jax.data.datasets.digits import (
    Digits,
    load_digits,
)
from alload_jax.data.manifest import MANIFEST_NAME, read_manifest
from alload_jax.data.pixel_latents import fold_frames, unfold_frames
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError
from alload_jax.planning.samples import Geometry, samples_from_columns

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = Digits(
    mix=((1, 8, 8, 40), (1, 8, 16, 40), (1, 16, 8, 20), (5, 8, 8, 6), (9, 16, 16, 6)), seed=3
)
SCANS, SCAN_LABELS = sklearn.datasets.load_digits(return_X_y=True)
SCANS = (SCANS.reshape(-1, 8, 8) / 8 - 1).astype(np.float16)


@pytest.fixture(scope="module", params=[1, 4])
def config(request):
    return dataclasses.replace(SMALL, frames_per_latent=request.param)


@pytest.fixture(scope="module")
def digits(tmp_path_factory, config):
    folder = tmp_path_factory.mktemp("made") / "digits"
    config.write(folder)
    return folder


def read_all(folder):
    """The manifest and the records, whose latents are unfolded to pixels."""
    manifest = read_manifest(folder)
    reader = StoreReader(manifest)
    records = [reader.read(number) for number in range(len(manifest))]
    per_latent = manifest.vae_stride[0]
    return manifest, [
        arrays | {"latents": unfold_frames(arrays["latents"], per_latent)} for arrays in records
    ]


def of_size(folder, size):
    manifest, records = read_all(folder)
    return [records[n] for n in np.flatnonzero((manifest.shape == size).all(axis=1))]


def scan_labels_of(image):
    """Labels of the scans that the picture shows, fading at its rim aside."""
    distance = np.abs(SCANS.astype(np.float32) - image.astype(np.float32)).max(axis=(1, 2))
    return set(SCAN_LABELS[distance < 0.01].tolist())


# ---------------------------------------------------------------- the mix


def config_of(name):
    return read_config(["--config", str(CONFIGS / name)])


@pytest.fixture(params=["default-1x2x2", "default-1x4x4", "digits.yaml"])
def mixed(request):
    """A data set, and the patch size of models that are trained on it."""
    if request.param == "digits.yaml":
        config = config_of(request.param)
        return config.data.dataset, config.model.patch_size
    return Digits(), tuple(map(int, request.param.removeprefix("default-").split("x")))


def planned(dataset, patch):
    frames, height, width, count = np.array(dataset.mix).T
    columns = {"frames": frames, "height": height, "width": width}
    columns = {name: np.repeat(column, count) for name, column in columns.items()}
    geometry = Geometry((dataset.frames_per_latent, 1, 1), patch)
    return samples_from_columns(columns, geometry, "mix")


def test_mixes_are_as_mixed_as_real_data(mixed):
    samples = planned(*mixed)
    assert len(samples.buckets()) >= 12
    assert samples.seq_len.max() >= 30 * samples.seq_len.min()
    assert len(np.unique(samples.shape[:, 1:], axis=0)) >= 3


def test_mixes_hold_images_and_clips_of_up_to_17_frames(mixed):
    dataset, patch = mixed
    mix, frames = dataset.mix, {row[0] for row in dataset.mix}
    assert min(frames) == 1
    assert max(frames) == 17
    assert all(count % 4 == 1 for count in frames)
    assert all(height % patch[1] == width % patch[2] == 0 for _, height, width, _ in mix)


def test_the_configs_that_share_a_folder_make_the_same_data_as_the_command():
    datasets = [config_of(name).data for name in ("digits.yaml", "digits_mmdit.yaml")]
    assert {data.folder for data in datasets} == {"data/digits"}
    assert [data.dataset for data in datasets] == [Digits(), Digits()]


@pytest.mark.parametrize("name", ["digits.yaml", "digits_mmdit.yaml", "digits_sparse.yaml"])
def test_a_latent_of_the_configs_has_the_models_channels(name):
    config = config_of(name)
    assert config.model.latent_channels == config.data.dataset.frames_per_latent


# ---------------------------------------------------------------- what is made


def test_loaded_digits_are_scikit_learns():
    images, labels = load_digits()
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(images, SCANS)
    np.testing.assert_array_equal(labels, SCAN_LABELS)


def test_there_are_as_many_samples_as_the_mix_asks_for(digits, config):
    manifest, _ = read_all(digits)
    sizes, counts = np.unique(manifest.shape, axis=0, return_counts=True)
    made = {(*size, count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)}
    assert {tuple(row) for row in SMALL.mix} == {(*size[:3], size[3]) for size in made}
    assert manifest.vae_stride == (config.frames_per_latent, 1, 1)
    assert set(manifest.channels.tolist()) == {config.frames_per_latent}


def test_latents_hold_the_same_clips_whatever_their_frames(tmp_path):
    for frames in (1, 4):
        dataclasses.replace(SMALL, frames_per_latent=frames).write(tmp_path / str(frames))
    (_, plain), (manifest, _) = read_all(tmp_path / "1"), read_all(tmp_path / "4")
    folded = StoreReader(manifest)
    for number, arrays in enumerate(plain):
        stored = folded.read(number)
        np.testing.assert_array_equal(stored["latents"], fold_frames(arrays["latents"], 4))
        np.testing.assert_array_equal(stored["labels"], arrays["labels"])


def test_the_same_config_makes_the_same_samples(digits, config, tmp_path):
    config.write(tmp_path / "again")
    np.testing.assert_array_equal(
        read_manifest(tmp_path / "again").checksum, read_manifest(digits).checksum
    )


def test_another_seed_makes_other_samples(digits, config, tmp_path):
    dataclasses.replace(config, seed=4).write(tmp_path / "other")
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


def test_runs_that_begin_together_make_data_once(tmp_path):
    config, together = Digits(mix=((1, 8, 8, 400),)), threading.Barrier(4)

    def prepare(_):
        together.wait()
        prepare_dataset(tmp_path / "data" / "digits", config)

    with ThreadPoolExecutor(4) as runs:
        list(runs.map(prepare, range(4)))
    config.write(tmp_path / "alone")
    names = {path.name for path in (tmp_path / "alone").iterdir()}
    assert {path.name for path in (tmp_path / "data" / "digits").iterdir()} == names
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["digits"]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"mix": SMALL.mix[:-1]},
        {"motion": "drift"},
        {"motion": "drift", "frames_per_latent": 1},
    ],
)
def test_data_of_another_config_are_refused_and_left_alone(digits, config, other):
    made = contents(digits)
    with pytest.raises(InputError) as error:
        prepare_dataset(digits, dataclasses.replace(config, **other))
    assert_says(error, digits, "data.dataset", "data.folder", "remove")
    assert contents(digits) == made


def test_a_folder_that_names_no_motion_holds_drifting_digits(tmp_path):
    config = Digits(mix=((5, 8, 8, 1),), motion="drift", frames_per_latent=1)
    assert config.origin() == {"digits": {"mix": [[5, 8, 8, 1]], "seed": 0}}
    config.write(tmp_path / "old")
    prepare_dataset(tmp_path / "old", config)
    with pytest.raises(InputError) as error:
        prepare_dataset(tmp_path / "old", Digits(mix=config.mix))
    assert_says(error, tmp_path / "old", "data.dataset", "data.folder", "remove")


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
