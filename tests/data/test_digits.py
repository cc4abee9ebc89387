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
from alload_jax.data.datasets.digits import Digits, load_digits
from alload_jax.data.manifest import MANIFEST_NAME, read_manifest
from alload_jax.data.pixel_latents import fold_frames, unfold_frames
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError
from alload_jax.planning.samples import Geometry, samples_from_columns

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = Digits(
    mix=((1, 8, 8, 40), (1, 8, 16, 40), (1, 16, 8, 20), (5, 8, 8, 6), (9, 16, 16, 6)),
    seed=3,
    frames_per_latent=4,
)
SCANS, SCAN_LABELS = sklearn.datasets.load_digits(return_X_y=True)
SCANS = (SCANS.reshape(-1, 8, 8) / 8 - 1).astype(np.float16)
TINY = Digits(mix=((1, 8, 8, 4),))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "digits"
    SMALL.write(folder)
    return folder


def read_all(folder):
    """The manifest and the records, whose latents are unfolded to pixels."""
    manifest = read_manifest(folder)
    reader, per_latent = StoreReader(manifest), manifest.vae_stride[0]
    records = [reader.read(number) for number in range(len(manifest))]
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


@pytest.mark.parametrize("patch", [(1, 2, 2), (1, 4, 4), None])
def test_mixes_are_as_mixed_as_real_data_and_hold_images_and_clips_of_up_to_17_frames(patch):
    dataset = Digits()
    if patch is None:
        config = config_of("digits.yaml")
        dataset, patch = config.data.dataset, config.model.patch_size
    frames, height, width, count = np.array(dataset.mix).T
    columns = {"frames": frames, "height": height, "width": width}
    columns = {name: np.repeat(column, count) for name, column in columns.items()}
    geometry = Geometry((dataset.frames_per_latent, 1, 1), patch)
    samples = samples_from_columns(columns, geometry, "mix")
    assert len(samples.buckets()) >= 12
    assert samples.seq_len.max() >= 30 * samples.seq_len.min()
    assert len(np.unique(samples.shape[:, 1:], axis=0)) >= 3
    assert (min(frames), max(frames)) == (1, 17)
    assert (frames % 4 == 1).all()
    assert not (height % patch[1]).any()
    assert not (width % patch[2]).any()


def test_the_configs_make_the_same_data_as_the_command_whose_latents_fit_their_models():
    configs = [config_of(f"digits{name}.yaml") for name in ("", "_mmdit", "_sparse")]
    for config in configs:
        assert config.model.latent_channels == config.data.dataset.frames_per_latent
    assert {config.data.folder for config in configs[:2]} == {"data/digits"}
    assert [config.data.dataset for config in configs[:2]] == [Digits(), Digits()]


# ---------------------------------------------------------------- what is made


def test_loaded_digits_are_scikit_learns():
    images, labels = load_digits()
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    np.testing.assert_array_equal(images, SCANS)
    np.testing.assert_array_equal(labels, SCAN_LABELS)


def test_there_are_as_many_samples_as_the_mix_asks_for_and_labels_name_classes(digits):
    manifest, records = read_all(digits)
    sizes, counts = np.unique(manifest.shape, axis=0, return_counts=True)
    made = {(*size, count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)}
    assert made == set(SMALL.mix)
    assert manifest.vae_stride == (4, 1, 1)
    assert set(manifest.channels.tolist()) == {4}
    labels = np.concatenate([arrays["labels"] for arrays in records])
    assert labels.dtype == np.int32
    assert set(labels.tolist()) == set(range(10))


def test_latents_hold_the_same_clips_whatever_their_frames(digits, tmp_path):
    dataclasses.replace(SMALL, frames_per_latent=1).write(tmp_path / "1")
    plain, folded = read_all(tmp_path / "1")[1], StoreReader(read_manifest(digits))
    for number, arrays in enumerate(plain):
        stored = folded.read(number)
        np.testing.assert_array_equal(stored["latents"], fold_frames(arrays["latents"], 4))
        np.testing.assert_array_equal(stored["labels"], arrays["labels"])


def test_the_same_config_makes_the_same_samples_and_another_seed_others(digits, tmp_path):
    expected = read_manifest(digits).checksum
    for seed, least, most in ((3, 1, 1), (4, 0, 0.1)):
        dataclasses.replace(SMALL, seed=seed).write(tmp_path / str(seed))
        same = (read_manifest(tmp_path / str(seed)).checksum == expected).mean()
        assert least <= same <= most


def test_small_stills_are_the_real_scans_and_their_labels_and_show_every_scan(digits, tmp_path):
    scans = {scan.tobytes(): label for scan, label in zip(SCANS, SCAN_LABELS, strict=True)}
    for arrays in of_size(digits, (1, 8, 8)):
        assert arrays["latents"].dtype == np.float16
        assert arrays["labels"].tolist() == [scans[arrays["latents"][0, :, :, 0].tobytes()]]
    Digits(mix=((1, 8, 8, len(SCANS)),), frames_per_latent=1).write(tmp_path / "digits")
    _, records = read_all(tmp_path / "digits")
    assert {arrays["latents"].tobytes() for arrays in records} == scans.keys()


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


# ---------------------------------------------------------------- preparing


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def assert_refused(folder, dataset, *said):
    made = contents(folder)
    with pytest.raises(InputError) as error:
        prepare_dataset(folder, dataset)
    assert_says(error, folder, *said)
    assert contents(folder) == made


def test_data_are_made_once(tmp_path, capsys):
    prepare_dataset(tmp_path / "digits", TINY)
    made = contents(tmp_path / "digits")
    assert str(tmp_path / "digits") in capsys.readouterr().out
    prepare_dataset(str(tmp_path / "digits"), dataclasses.replace(TINY))
    assert contents(tmp_path / "digits") == made
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("other", [{"seed": 4}, {"mix": SMALL.mix[:-1]}, {"motion": "drift"}])
def test_data_of_another_config_are_refused_and_left_alone(digits, other):
    changed = dataclasses.replace(SMALL, **other)
    assert_refused(digits, changed, "data.dataset", "data.folder", "remove")


def test_a_folder_that_names_no_motion_holds_drifting_digits(tmp_path):
    config = Digits(mix=((5, 8, 8, 1),), motion="drift", frames_per_latent=1)
    assert config.origin() == {"digits": {"mix": [[5, 8, 8, 1]], "seed": 0}}
    config.write(tmp_path / "old")
    prepare_dataset(tmp_path / "old", config)
    circling = Digits(mix=config.mix)
    assert_refused(tmp_path / "old", circling, "data.dataset", "data.folder", "remove")


@pytest.mark.parametrize(
    ("name", "said"), [("photo.png", "exists"), (MANIFEST_NAME, "data.folder")]
)
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path, name, said):
    (tmp_path / name).write_bytes(b"precious")
    assert_refused(tmp_path, TINY, said)


@pytest.mark.parametrize(
    "row", [(0, 8, 8, 1), (3, 8, 8, 1), (1, 4, 8, 1), (1, 8, 6, 1), (1, 9, 8, 1), (1, 8, 8, 0)]
)
def test_a_mix_that_cannot_be_drawn_is_refused(tmp_path, row):
    with pytest.raises(InputError) as error:
        Digits(mix=(row,)).write(tmp_path / "digits")
    assert_says(error, "mix")
    assert list(tmp_path.iterdir()) == []


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


def test_without_scikit_learn_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"scikit-learn; install alload-jax\[digits\]"):
        Digits().write(tmp_path / "digits")
    assert not list(tmp_path.iterdir())
