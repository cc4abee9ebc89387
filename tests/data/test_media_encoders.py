"""Encoders of captions and frames, and the processes that encode for all workers."""

import base64
import io
import json
import os
from collections import Counter
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
import toy_encoders
from data_helpers import contents
from media_helpers import changed, moving_frames, prepare, skipped, write_video
from PIL import Image

from alload_jax.data.manifest import read_manifest
from alload_jax.data.prepare import unit
from alload_jax.data.prepare.encoders import (
    GIVEN_ENCODERS,
    ByteText,
    ClassText,
    EncoderOptions,
    uniform_vectors,
)
from alload_jax.data.prepare.settings import MediaSettings
from alload_jax.data.record import with_text_of_epoch
from alload_jax.data.store import StoreReader, damaged_records
from alload_jax.encoders import TEXT_ENCODERS, VAE_ENCODERS
from alload_jax.errors import InputError


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    captions = [["stop!", "go!!! now then"], ["quiet"], ["a huge thing"], [""]]
    for number, texts in enumerate(captions):
        Image.new("RGB", (40, 40), (90 + number, 90, 90)).save(folder / f"{number}.png")
        (folder / f"{number}.json").write_text(json.dumps({"caption": texts}))
    Image.new("RGB", (40, 40), (255, 255, 255)).save(folder / "white.png")
    write_video(folder / "clip.mkv", moving_frames(9))
    return folder


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "weights").write_text("half")
    return folder


def encoded(media, out, weights, **changes):
    flags = {"vae": "weighed", "vae_folder": str(weights), "files_per_shard": 1}
    flags |= {"text": "spoken", "text_folder": str(weights), "captions": "all"}
    prepare(media, out, **flags | changes)
    return out


def test_all_kinds_of_tokens_of_each_caption_and_given_frames_are_stored(media, weights, tmp_path):
    out = encoded(media, tmp_path / "out", weights, image_to_video="ends")
    manifest = read_manifest(out)
    reader = StoreReader(manifest)
    assert list(damaged_records(reader)) == []
    assert manifest.form.parts == (("shouts", 3),)
    assert manifest.text_length.tolist() == [9, 5, 0, 0, 0]  # at most the encoder's own length
    assert manifest.part_lengths.tolist() == [[3], [0], [0], [0], [0]]
    assert skipped(out) == {"2.png": "the text encoder gives values that are not finite"}
    arrays = reader.read(0)
    assert changed(out)["0.png"] == {"caption cut, 5 tokens too long"}
    assert arrays["text"].dtype == arrays["shouts"].dtype == np.float16
    np.testing.assert_array_equal(arrays["text"][:, 0], [ord(letter) for letter in "stop!"])
    np.testing.assert_array_equal(arrays["shouts"], [[1, 1, 1]])
    drawn = Counter()
    for epoch in range(40):
        taken = with_text_of_epoch(arrays, seed=1, epoch=epoch, sample=0)
        drawn[len(taken["text"]), len(taken["shouts"])] += 1
    assert drawn.keys() == {(5, 1), (9, 3)}
    assert manifest.origin["vae"] == {"name": "weighed", "weights": "half"}
    assert manifest.origin["image_to_video"] == {"given": "ends"}
    (clip,) = np.flatnonzero(manifest.shape[:, 0] > 1)
    given = reader.read(clip)["given"]
    assert given.shape == (9, 32, 32, 2)
    assert (given[..., 1] > given[..., 0]).all()  # of its last frame, more is white
    one = read_manifest(encoded(media, tmp_path / "one", weights, captions="one", text_length=7))
    assert one.text_length.tolist() == [5, 5, 0, 0, 0]


def test_previews_show_frames_as_they_are_before_the_vae(media, weights, tmp_path):
    flags = {"vae": "weighed", "vae_folder": str(weights), "files_per_shard": 1}
    report = prepare(media, tmp_path / "out", **flags)
    strips = [Image.open(io.BytesIO(base64.b64decode(each))) for each in report.previews]
    assert [strip.size for strip in strips] == [*[(32, 32)] * 4, (6 * 32, 32), (32, 32)]
    assert [strip.getpixel((9, 9)) for strip in strips[:4]] == [(90 + n, 90, 90) for n in range(4)]
    (weights / "weights").write_text("nan")
    out, given = tmp_path / "new" / "out", {"image_to_video": "ends"}  # which are finite
    with pytest.raises(InputError, match="no file can be used"):
        prepare(media, out, report=tmp_path / "list", **flags, **given)


def processes(weights):
    """Processes that encoded, with the GPUs that they saw."""
    return {int(p.name.split("-")[1]): p.read_text() for p in weights.glob("process-*")}


def test_a_process_on_each_gpu_encodes_for_all_workers(media, weights, tmp_path, monkeypatch):
    (weights / "weights").write_text("picky")
    one = encoded(media, tmp_path / "one", weights, image_to_video="ends")
    assert processes(weights).keys() == {os.getpid()}
    monkeypatch.setattr(unit, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    two = encoded(media, tmp_path / "two", weights, image_to_video="ends", workers=2)
    seen = processes(weights)
    del seen[os.getpid()]
    assert sorted(seen.values()) == ["3", "5"]
    assert contents(one) == contents(two)
    assert skipped(two)["white.png"] == "white"


def test_processes_see_one_gpu_each(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, expected in ((0, [None]), (1, [None]), (2, ["0", "1"])):
        monkeypatch.setattr(unit, "device_count", lambda count=count: count)
        assert unit._devices() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    assert unit._devices() == ["5", "3"]


def test_an_encoding_process_that_fails_or_ends_is_an_error_of_one_line(weights):
    vae, spawn = toy_encoders.WeighedPixels.make(EncoderOptions(weights)), get_context("spawn")
    job = unit.Job(weights, MediaSettings(), vae, ByteText())
    with unit.encoding_processes(job, spawn) as (remote,):
        job = replace(job, remote=remote)
        said = {"refuses": "the weights are damaged", "ends": "the process that encodes ended"}
        for fault, words in said.items():
            (weights / "weights").write_text(fault)
            with pytest.raises(InputError, match=words):
                job.call("vae", "encode", np.zeros((1, 8, 8, 3), np.uint8))


def test_data_are_prepared_as_the_models_of_an_encoder_take_them():
    sizes = {"wan": (1, 2, 2), "hunyuan_video": (1, 1, 1), "hunyuan_video_13b": (1, 2, 2)}
    assert {name: VAE_ENCODERS.get(name).patch_size for name in sizes} == sizes
    needs_image = {"wan": False, "hunyuan_video": True}
    assert {name: GIVEN_ENCODERS.get(name).needs_image for name in needs_image} == needs_image
    lengths = {"bytes": 256, "umt5": 512, "hunyuan_video": 1000, "hunyuan_video_13b": 256}
    assert {name: TEXT_ENCODERS.get(name).default_length for name in lengths} == lengths


def test_byte_embeddings_never_change():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # SplitMix64's first from seed 0
    expected = [(2 * value / 2**64 - 1) * 3**0.5 for value in published]
    assert uniform_vectors(0, 1, 2)[0] == pytest.approx(expected, abs=1e-12)
    found = ByteText().encode("ab")
    assert found.dtype == np.float16
    assert found.tobytes() == ByteText().encode("abc")[:2].tobytes()
    long = ByteText(length=4000).encode("x" * 4000)
    assert abs(long.astype(float).std() - 1) < 0.05
    assert not np.array_equal(long[0], long[1])
    assert len(ByteText(length=4).encode("猫猫")) == 3  # no half characters
    assert [ByteText(length=4).surplus_tokens(text) for text in ("猫猫", "four")] == [2, 0]
    assert ByteText().encode(None).shape == (0, 64)
    for length in (1, 2**16):
        assert ByteText.make(EncoderOptions(text_length=length)).length == length
    with pytest.raises(InputError, match="--text-length is 65537"):
        ByteText.make(EncoderOptions(text_length=2**16 + 1))


@pytest.mark.parametrize(
    ("texts", "expected", "classes"),
    [
        (["dog", "cat", "dog"], [1, 0, 1], ["cat", "dog"]),
        (["3", "0", "03"], [3, 0, 3], ["0", "1", "2", "3"]),
    ],
)
def test_captions_can_be_classes(tmp_path, texts, expected, classes):
    media = tmp_path / "pictures"
    media.mkdir()
    for number, text in enumerate([*texts, None]):
        Image.new("RGB", (32, 32)).save(media / f"{number}.png")
        if text is not None:
            (media / f"{number}.txt").write_text(text + "\n")
    prepare(media, tmp_path / "out", text="class")
    manifest = read_manifest(tmp_path / "out")
    reader = StoreReader(manifest)
    assert [reader.read(n)["labels"].tolist() for n in range(3)] == [[n] for n in expected]
    assert manifest.origin["text"]["classes"] == classes
    assert "no caption" in skipped(tmp_path / "out")["3.png"]
    assert len(ClassText.make(EncoderOptions(captions=["9999"])).classes) == 10_000
    assert ClassText.make(EncoderOptions(captions=["12345678"])).classes == ("12345678",)
    for captions, words in ((["10000"], "10,001 classes, more than 10,000"), ([""], "no file has")):
        with pytest.raises(InputError, match=words):
            ClassText.make(EncoderOptions(captions=captions))
