"""Conditions of a sample, which a model must fit: classes, texts, given frames and images."""

import dataclasses

import numpy as np
import pytest

from alload_jax.data.condition import Conditions, conditions_for, unread
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.wan.transformer import WanConfig

MODEL = WanConfig(text=TextConfig(dim=6, length=5), dtype="float32")
GIVEN = {"in_channels": 4, "out_channels": 1}
LATENTS = np.zeros((1, 4, 4, 1), np.float32)


def write(folder, texts, **images):
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for text in texts:
            writer.add(LATENTS, text, (1, 4, 4), **images)
    return read_manifest(folder)


def random_texts(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(length, 6)).astype(dtype) for length in (3, 5, 1, 0)]


def test_texts_are_padded_with_zeros_of_the_model_s_dtype(tmp_path):
    manifest = write(tmp_path / "data", random_texts(np.float16))
    for dtype in ("float32", "bfloat16"):
        conditions = conditions_for(dataclasses.replace(MODEL, dtype=dtype), manifest)
        empty = conditions.empty(2)
        assert (empty.shape, empty.dtype) == ((2, 5, 6), dtype)
        assert not empty.any()
        text = conditions.of(StoreReader(manifest).read(0))
        np.testing.assert_array_equal(text, random_texts(np.float16)[0])


def test_classes_are_those_that_the_model_knows():
    conditions = Conditions(2, np.dtype(np.int32), None, null_label=3)
    assert conditions.given(1) is conditions.image(1) is None
    for labels, known in (([0, 2], True), ([], True), ([3], False), ([1, -1], False)):
        arrays = {"labels": np.array(labels, np.int32)}
        if known:
            assert conditions.of(arrays) is arrays["labels"]
            continue
        said = "must be from 0 to below model.num_classes, which is 3"
        with pytest.raises(ValueError, match=said):
            conditions.of(arrays)


def test_models_that_do_not_fit_what_is_stored_are_refused(tmp_path):
    manifest = write(tmp_path / "data", random_texts())
    for changes, words in (
        ({"text": None}, "holds text embeddings of width 6.*set model.text.dim to 6"),
        ({"text": TextConfig(7, 5)}, "holds text of width 6, but model.text.dim is 7"),
        ({"text": TextConfig(6, 4)}, "sample 1 has a text of 5 tokens.*model.text.length is 4"),
        ({"image": ImageConfig()}, r"image embeddings: none, but model\.image\.dim is 1280"),
        (GIVEN, r"given frames of 0 channels, but model\.in_channels − model\.out_channels is 3"),
    ):
        with pytest.raises(InputError, match=words):
            conditions_for(dataclasses.replace(MODEL, **changes), manifest)
    classes = write(tmp_path / "classes", [np.zeros(1, np.int32)])
    with pytest.raises(InputError, match=r"holds classes, but model\.text\.dim is 6"):
        conditions_for(MODEL, classes)


def test_given_frames_and_images_are_stored_and_fit_a_model_or_not(tmp_path):
    given, image = np.ones((1, 4, 4, 3), np.float32), np.ones((5, 7), np.float16)
    manifest = write(tmp_path / "data", random_texts(), given=given, image=image)
    model = dataclasses.replace(MODEL, **GIVEN, image=ImageConfig(dim=7))
    found = conditions_for(model, manifest)
    assert (found.given_channels, found.image_shape) == (3, (5, 7))
    arrays = StoreReader(manifest).read(0)
    np.testing.assert_array_equal(arrays["given"], given)
    np.testing.assert_array_equal(arrays["image"], image)
    for image_config, words in (
        (ImageConfig(dim=8), r"model\.image\.dim is 8"),
        (ImageConfig(dim=7, positions=6), r"5 image embeddings a sample.*positions is 6"),
    ):
        with pytest.raises(InputError, match=words):
            conditions_for(dataclasses.replace(model, image=image_config), manifest)
    # Of a joint model, given frames come with their images.
    manifest = write(tmp_path / "joint", random_texts(), given=given[..., :2])
    joint = HunyuanVideoConfig(
        in_channels=3, out_channels=1, text=TextConfig(6, 5), image=ImageConfig(7)
    )
    with pytest.raises(InputError, match="given frames without embeddings of their images"):
        conditions_for(joint, manifest)
    conditions_for(dataclasses.replace(joint, image=None), manifest)


def test_given_frames_and_images_that_a_model_does_not_read_are_told(tmp_path):
    held = {"given": np.zeros((1, 4, 4, 3), np.float32), "image": np.zeros((3, 7), np.float16)}
    manifest = write(tmp_path / "data", random_texts(), **held)
    channels, image = unread(MODEL, manifest)
    assert channels.startswith("each sample has given frames of 3 channels, which are not read")
    assert image.startswith("each sample has 3 embeddings of width 7 of its")
    assert not unread(dataclasses.replace(MODEL, **GIVEN, image=ImageConfig(7)), manifest)
    assert not unread(MODEL, write(tmp_path / "other", random_texts()))
