"""Conditions of a sample: classes or text embeddings, stored, checked and padded."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from alload_jax.data.collate import BucketedCollation, Collator
from alload_jax.data.condition import conditions_for, unread
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig

MODEL = WanConfig(text=TextConfig(dim=6, length=5), dtype="float32")


def write_texts(folder, lengths=(3, 5, 1, 0), dtype=np.float32, width=6):
    rng = np.random.default_rng(0)
    texts = [rng.normal(size=(length, width)).astype(dtype) for length in lengths]
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for text in texts:
            writer.add(rng.normal(size=(1, 4, 4, 1)).astype(np.float32), text, (1, 4, 4))
    return read_manifest(folder), texts


@pytest.mark.parametrize(
    ("stored", "computed"),
    [(np.float32, "bfloat16"), (np.float16, "float32"), (ml_dtypes.bfloat16, "float32")],
)
def test_texts_are_collated_and_padded_with_zeros(stored, computed, tmp_path):
    manifest, texts = write_texts(tmp_path / "data", dtype=stored)
    conditions = conditions_for(dataclasses.replace(MODEL, dtype=computed), manifest)
    config = PlanningConfig(policy="dual_constraint", m_mem=16)
    plan = make_plan(config, manifest.samples(MODEL.patch_size), 1, 0)
    collation = BucketedCollation(manifest, conditions)
    collate, seen = Collator(StoreReader(manifest), frozenset({0}), collation), set()
    for step in (collate(plan.step(number)) for number in range(plan.steps_per_epoch)):
        assert not step.problems
        for batch in step.batches:
            assert batch.condition.dtype == computed
            assert batch.condition.shape == conditions.shape(len(batch.sample))
            for row, sample in zip(batch.condition, batch.sample.tolist(), strict=True):
                text = texts[sample] if sample >= 0 else texts[3]
                np.testing.assert_array_equal(row[: len(text)], text.astype(row.dtype))
                assert not row[len(text) :].any()
                seen.add(sample)
    assert seen >= set(range(4))


GIVEN = {"in_channels": 4, "out_channels": 1}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": None}, "holds text embeddings of width 6.*set model.text.dim to 6"),
        ({"text": TextConfig(7, 5)}, "holds text of width 6, but model.text.dim is 7"),
        ({"text": TextConfig(6, 4)}, "sample 1 has a text of 5 tokens.*model.text.length is 4"),
        ({"image": ImageConfig()}, r"image embeddings: none, but model\.image\.dim is 1280"),
        (GIVEN, r"given frames of 0 channels, but model\.in_channels − model\.out_channels is 3"),
    ],
)
def test_models_that_do_not_fit_what_is_stored_are_refused(changes, words, tmp_path):
    manifest, _ = write_texts(tmp_path / "data")
    with pytest.raises(InputError, match=words):
        conditions_for(dataclasses.replace(MODEL, **changes), manifest)


def test_classes_do_not_fit_a_model_of_texts(store):
    with pytest.raises(InputError, match=r"holds classes, but model\.text\.dim is 6"):
        conditions_for(MODEL, read_manifest(store))


def test_images_that_a_model_does_not_read_are_told(tmp_path):
    latents, image = np.zeros((1, 4, 4, 1), np.float32), np.zeros((3, 7), np.float16)
    with StoreWriter(tmp_path / "data", vae_stride=(1, 1, 1)) as writer:
        writer.add(latents, np.zeros((2, 6), np.float16), (1, 4, 4), image=image)
    manifest = read_manifest(tmp_path / "data")
    assert unread(dataclasses.replace(MODEL, image=ImageConfig(7)), manifest) == ""
    assert unread(MODEL, manifest).startswith("each sample has 3 embeddings of width 7 of its")
    assert unread(MODEL, write_texts(tmp_path / "other")[0]) == ""


def test_given_frames_of_joint_models_come_with_their_images(tmp_path):
    latents, given = np.zeros((1, 4, 4, 1), np.float32), np.ones((1, 4, 4, 2), np.float32)
    with StoreWriter(tmp_path / "data", vae_stride=(1, 1, 1)) as writer:
        writer.add(latents, np.zeros((2, 6), np.float16), (1, 4, 4), given=given)
    manifest = read_manifest(tmp_path / "data")
    model = HunyuanVideoConfig(
        in_channels=3, out_channels=1, text=TextConfig(6, 5), image=ImageConfig(7)
    )
    with pytest.raises(InputError, match="given frames without embeddings of their images"):
        conditions_for(model, manifest)
    conditions_for(dataclasses.replace(model, image=None), manifest)


def test_given_frames_and_images_are_stored_and_checked(tmp_path):
    latents, size, text = (
        np.zeros((1, 4, 4, 1), np.float32),
        (1, 4, 4),
        np.zeros((2, 6), np.float16),
    )
    given, image = np.ones((1, 4, 4, 3), np.float32), np.ones((5, 7), np.float16)
    with StoreWriter(tmp_path / "data", vae_stride=(1, 1, 1)) as writer:
        writer.add(latents, text, size, given=given, image=image)
        for change, words in (
            ({"given": given[:, :2]}, r"given has shape \(1, 2, 4, 3\)"),
            ({"given": given.astype(int)}, "given is int64; give floats"),
            ({"given": given * np.nan}, "given hold nan"),
            ({"given": None}, "given is none; the previous samples have 3 channels"),
            ({"image": image[0]}, r"image has shape \(7,\)"),
            ({"image": image[:4]}, "image is 4 embeddings of width 7; the previous"),
        ):
            with pytest.raises(ValueError, match=words):
                writer.add(latents, text, size, **{"given": given, "image": image} | change)
    manifest = read_manifest(tmp_path / "data")
    model = dataclasses.replace(MODEL, **GIVEN, image=ImageConfig(dim=7))
    found = conditions_for(model, manifest)
    assert (found.given_channels, found.image_shape) == (3, (5, 7))
    np.testing.assert_array_equal(StoreReader(manifest).read(0)["given"], given)
    for image_config, words in (
        (ImageConfig(dim=8), r"model\.image\.dim is 8"),
        (ImageConfig(dim=7, positions=6), r"5 image embeddings a sample.*positions is 6"),
    ):
        with pytest.raises(InputError, match=words):
            conditions_for(dataclasses.replace(model, image=image_config), manifest)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (np.zeros((3, 7), np.float32), "previous samples have text of width 6"),
        (np.zeros(3, np.int32), "previous samples have text of width 6"),
        (np.zeros((3, 6), np.int32), "text is int32"),
        (np.zeros((1, 3, 6), np.float32), r"condition has shape \(1, 3, 6\)"),
    ],
)
def test_a_folder_holds_one_kind_of_condition(condition, words, tmp_path):
    latents, size = np.zeros((1, 4, 4, 1), np.float32), (1, 4, 4)
    with StoreWriter(tmp_path / "data", vae_stride=(1, 1, 1)) as writer:
        writer.add(latents, np.zeros((2, 6), np.float32), size)
        with pytest.raises(ValueError, match=words):
            writer.add(latents, condition, size)
    assert read_manifest(tmp_path / "data").text_length.tolist() == [2]
