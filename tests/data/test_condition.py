"""Conditions of a sample: classes or text embeddings, stored, checked and padded."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from alload_jax.data.bucketed import BucketedCollation
from alload_jax.data.collate import Collator
from alload_jax.data.condition import conditions_for
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.wan.config import WanConfig
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


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("computed", ["float32", "bfloat16"])
def test_texts_are_collated_and_padded_with_zeros(stored, computed, tmp_path):
    manifest, texts = write_texts(tmp_path / "data", dtype=stored)
    model = dataclasses.replace(MODEL, dtype=computed)
    conditions = conditions_for(model, manifest)
    plan = make_plan(
        PlanningConfig(policy="dual_constraint", m_mem=16), manifest.samples(model.patch_size), 1, 0
    )
    collation = BucketedCollation(manifest, conditions)
    collate = Collator(StoreReader(manifest), frozenset({0}), collation)
    seen = set()
    for number in range(plan.steps_per_epoch):
        step = collate(plan.step(number))
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": None}, "holds text embeddings of width 6.*set model.text.dim to 6"),
        ({"text": TextConfig(7, 5)}, "holds text of width 6, but model.text.dim is 7"),
        ({"text": TextConfig(6, 4)}, "sample 1 has a text of 5 tokens.*model.text.length is 4"),
    ],
)
def test_models_that_do_not_fit_the_texts(changes, words, tmp_path):
    manifest, _ = write_texts(tmp_path / "data")
    with pytest.raises(InputError, match=words):
        conditions_for(dataclasses.replace(MODEL, **changes), manifest)


def test_classes_do_not_fit_a_model_of_texts(store):
    with pytest.raises(InputError, match=r"holds classes, but model\.text\.dim is 6"):
        conditions_for(MODEL, read_manifest(store))


@pytest.mark.parametrize("changes", [{"image": ImageConfig()}, {"out_channels": 3}])
def test_image_to_video_cannot_be_trained_and_says_so(changes, tmp_path):
    manifest, _ = write_texts(tmp_path / "data")
    with pytest.raises(NotImplementedError, match="do not support the conditioning frames"):
        conditions_for(dataclasses.replace(MODEL, **changes), manifest)


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
