"""Clips of digits: what a folder holds, how they move, and latents that hold their pixels."""

import dataclasses

import numpy as np
import pytest
import sklearn.datasets
from data_helpers import says
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.datasets import prepare_dataset
from alload_jax.data.datasets.digits import Digits, load_digits
from alload_jax.data.manifest import MANIFEST_NAME, read_manifest
from alload_jax.data.record import fold_frames, pixel_channels, unfold_frames
from alload_jax.data.store import StoreReader
from alload_jax.errors import InputError
from alload_jax.planning.samples import Geometry

MIX = ((1, 8, 8, 40), (1, 8, 16, 100), (1, 16, 8, 100), (5, 8, 8, 6), (9, 16, 16, 6))
SMALL = Digits(mix=MIX, seed=3, frames_per_latent=4)
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


def test_the_mix_is_made_of_real_scans_and_their_labels(digits):
    images, labels = load_digits()
    assert (images.dtype, labels.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(images, SCANS)
    np.testing.assert_array_equal(labels, SCAN_LABELS)
    manifest, records = read_all(digits)
    sizes, counts = np.unique(manifest.shape, axis=0, return_counts=True)
    made = {(*size, count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)}
    assert made == set(SMALL.mix)
    assert manifest.vae_stride == (4, 1, 1)
    assert set(manifest.channels.tolist()) == {4}
    assert set(np.concatenate([arrays["labels"] for arrays in records]).tolist()) == {*range(10)}
    scans = {scan.tobytes(): label for scan, label in zip(SCANS, SCAN_LABELS, strict=True)}
    for arrays in of_size(digits, (1, 8, 8)):
        assert arrays["latents"].dtype == np.float16
        assert arrays["labels"].tolist() == [scans[arrays["latents"][0, :, :, 0].tobytes()]]


def test_the_same_config_makes_the_same_samples_and_another_seed_others(digits, tmp_path):
    expected = read_manifest(digits).checksum
    for seed, least, most in ((3, 1, 1), (4, 0, 0.1)):
        dataclasses.replace(SMALL, seed=seed).write(tmp_path / str(seed))
        same = (read_manifest(tmp_path / str(seed)).checksum == expected).mean()
        assert least <= same <= most


def scan_labels_of(image):
    """Labels of the scans that the picture shows, fading at its rim aside."""
    distance = np.abs(SCANS.astype(np.float32) - image.astype(np.float32)).max(axis=(1, 2))
    return set(SCAN_LABELS[distance < 0.01].tolist())


@pytest.mark.parametrize(("size", "axis"), [((1, 8, 16), 1), ((1, 16, 8), 0)])
def test_most_large_samples_show_two_digits_in_the_order_of_their_labels(digits, size, axis):
    samples = of_size(digits, size)
    pairs = [arrays for arrays in samples if len(arrays["labels"]) == 2]
    for arrays in pairs:
        halves = np.split(arrays["latents"][0, :, :, 0], 2, axis=axis)
        for half, label in zip(halves, arrays["labels"].tolist(), strict=True):
            assert label in scan_labels_of(half)
    assert 0.7 < len(pairs) / len(samples) < 0.9


def test_as_many_samples_show_two_digits_as_are_asked_for(tmp_path):
    for share, least, most in ((0, 0, 0), (0.3, 0.15, 0.45), (1, 1, 1)):
        Digits(mix=((1, 8, 8, 5), (5, 8, 16, 100)), pairs=share).write(tmp_path / str(share))
        lengths = read_manifest(tmp_path / str(share)).text_length
        assert set(lengths[:5]) == {1}
        assert least <= (lengths[5:] == 2).mean() <= most


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def assert_refused(folder, dataset, *said):
    made = contents(folder)
    with says(folder, *said):
        prepare_dataset(folder, dataset)
    assert contents(folder) == made


def test_data_are_made_once_and_others_are_refused_and_left_alone(tmp_path, capsys):
    prepare_dataset(tmp_path / "digits", TINY)
    made = contents(tmp_path / "digits")
    assert str(tmp_path / "digits") in capsys.readouterr().out
    prepare_dataset(str(tmp_path / "digits"), dataclasses.replace(TINY))
    assert contents(tmp_path / "digits") == made
    assert capsys.readouterr().out == ""
    for other in ({"seed": 4}, {"mix": ((1, 8, 8, 5),)}, {"motion": "drift"}, {"pairs": 0.5}):
        changed = dataclasses.replace(TINY, **other)
        assert_refused(tmp_path / "digits", changed, "data.dataset", "data.folder", "remove")
    for name, said in (("photo.png", "exists"), (MANIFEST_NAME, "or leave data.dataset out")):
        (tmp_path / f"of {name}").mkdir()
        (tmp_path / f"of {name}" / name).write_bytes(b"precious")
        assert_refused(tmp_path / f"of {name}", TINY, said)
    # A folder that names no motion holds drifting digits.
    old = Digits(mix=((5, 8, 8, 1),), motion="drift", frames_per_latent=1)
    assert old.origin() == {"digits": {"mix": [[5, 8, 8, 1]], "seed": 0}}
    prepare_dataset(tmp_path / "old", old)
    assert_refused(tmp_path / "old", Digits(mix=old.mix), "data.dataset", "remove")


def test_what_cannot_be_drawn_is_refused(monkeypatch, tmp_path):
    rows = [(0, 8, 8, 1), (3, 8, 8, 1), (1, 6, 8, 1), (1, 8, 6, 1), (1, 9, 8, 1), (1, 8, 9, 1)]
    others = {"mix": ()}, {"seed": -1}, {"pairs": 2}
    for wrong in (*({"mix": (row,)} for row in (*rows, (1, 8, 8, 0))), *others):
        with pytest.raises(InputError, match=r"data\.dataset\."):
            Digits(**wrong)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"scikit-learn; install alload-jax\[digits\]"):
        Digits().write(tmp_path / "digits")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("motion", "total"), [("circle", 30.86), ("drift", -2.86)])
def test_digits_are_drawn_as_ever(motion, total, tmp_path):
    """All pixels are summed up, each with a factor of its place: folders may be gone on with."""
    dataclasses.replace(SMALL, motion=motion).write(tmp_path / "made")
    pixels = np.concatenate([each["latents"].ravel() for each in read_all(tmp_path / "made")[1]])
    assert np.cos(np.arange(pixels.size)) @ pixels.astype(float) == pytest.approx(total, abs=0.05)
    assert np.prod(Digits().mix, axis=1).sum() == 11878400


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(0, 5), st.sampled_from([1, 3]), st.sampled_from(["f2", "f4"]))
def test_a_latent_holds_frames_in_its_channels_which_come_back(per_latent, groups, channels, dtype):
    rng = np.random.default_rng(0)
    frames = rng.uniform(-1, 1, (per_latent * groups + 1, 2, 3, channels)).astype(dtype)
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
    # The first frame is the mean of its copies.
    latents = np.arange(8, dtype=np.float32).reshape(2, 1, 1, 4)
    assert unfold_frames(latents, 4).ravel().tolist() == [1.5, 4, 5, 6, 7]


def test_pixels_are_told_from_latents_of_a_vae():
    for stride, channels, expected in (
        *(((1, 1, 1), channels, found) for channels, found in ((1, 1), (3, 3), (4, None))),
        *(((4, 1, 1), channels, found) for channels, found in ((4, 1), (12, 3), (3, None))),
        *(((4, 1, 1), 16, None), ((3, 1, 1), 3, 1), ((1, 1, 8), 1, None)),
        *(((4, 8, 8), 4, None), ((4, 8, 8), 12, None), ((4, 16, 16), 48, None)),
    ):
        assert pixel_channels(stride, channels) == expected
