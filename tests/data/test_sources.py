"""Samples that others wrote, against the same samples in a store."""

import dataclasses
import pickle

import jax
import numpy as np
import pytest
from data_helpers import assert_says
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import (
    STRIDE,
    channels_first,
    make_samples,
    write_fastvideo,
    write_musubi,
    write_tensor_files,
)

from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.sources.arrays import channels_last, latent_shape
from alload_jax.data.sources.files import normalized
from alload_jax.data.sources.grain_samples import GrainSamples
from alload_jax.data.sources.opening import find_source_name, open_source
from alload_jax.data.sources.parquet import Parquet
from alload_jax.data.sources.safetensors_folder import SafetensorsFolder
from alload_jax.data.store import BadRecordError, StoreReader, StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig

SAMPLES = make_samples(7)
MODEL = WanConfig(in_channels=16, text=TextConfig(dim=6, length=8), dtype="float32")
READ_AS = {
    "musubi": None,
    "parquet": Parquet(normalize="none"),
    "safetensors": SafetensorsFolder(normalize="none", mask="prompt_attention_mask"),
}
WRITERS = {
    "musubi": write_musubi,
    "parquet": write_fastvideo,
    "safetensors": write_tensor_files,
}


class Records:
    """A data source of Grain over the samples."""

    def __len__(self):
        return len(SAMPLES)

    def __getitem__(self, index):
        return SAMPLES[index]


def size_of(index):
    return SAMPLES[index].size


def arrays_of(record):
    return {"latents": record.latents, "text": record.text}


def grain_samples(**options):
    return GrainSamples(Records(), size_of, STRIDE, arrays_of, text_length=4, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("sources")
    for name, write in WRITERS.items():
        write(parent / name, SAMPLES)
    with StoreWriter(parent / "store", vae_stride=STRIDE) as writer:
        for sample in SAMPLES:
            writer.add(sample.latents, sample.text, sample.size, caption=sample.caption)
    return parent


def opened(folders, name):
    if name == "grain":
        return grain_samples()
    return open_source(str(folders / name), READ_AS.get(name))


def batches_of(source, policy):
    """All batches of an epoch."""
    source.require_settings()
    manifest = source.manifest
    manifest.require(16, MODEL.patch_size)
    samples = manifest.samples(MODEL.patch_size)
    plan = make_plan(PlanningConfig(policy=policy, m_mem=24), samples, 2, 0)
    collation = collation_for(plan, manifest, MODEL, conditions_for(MODEL, manifest))
    collate = Collator(source, frozenset({0, 1}), collation, plan.group_ranks)
    steps = [collate(plan.step(number)) for number in range(plan.steps_per_epoch)]
    assert not any(step.problems for step in steps)
    return [batch for step in steps for batch in step.batches]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("musubi", "first_fit"), ("parquet", "dual_constraint")),
        *(("safetensors", "first_fit"), ("grain", "dual_constraint")),
    ],
)
def test_batches_equal_those_of_a_store(name, policy, folders):
    expected = batches_of(StoreReader(opened(folders, "store").manifest), policy)
    found = batches_of(opened(folders, name), policy)
    assert len(found) == len(expected) > 1
    for batch, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)


@pytest.mark.parametrize("name", ["store", *WRITERS])
def test_the_files_say_what_reads_them(name, folders):
    assert find_source_name(str(folders / name)) == name
    manifest = open_source(str(folders / name)).manifest
    assert manifest.folder == folders / name
    assert manifest.vae_stride == STRIDE
    assert manifest.shape.tolist() == [list(sample.size) for sample in SAMPLES]
    assert manifest.form.text_dim == 6
    assert set(manifest.channels) == {16}
    sizes = {file: (folders / name / file).stat().st_size for file in manifest.shard_bytes}
    assert manifest.shard_bytes == sizes
    files = [path for path in (folders / name).rglob("*.*") if path.name != "manifest.parquet"]
    assert len(sizes) == len(files)


@pytest.mark.parametrize("name", [*WRITERS, "grain"])
def test_a_source_pickles_and_names_captions(name, folders):
    source = opened(folders, name)
    again = pickle.loads(pickle.dumps(source))
    arrays = again.read(3)
    np.testing.assert_array_equal(arrays["latents"], SAMPLES[3].latents)
    np.testing.assert_array_equal(arrays["text"], SAMPLES[3].text)
    captions = [None, None] if name == "grain" else ["caption 4", "caption 0"]
    assert again.captions([4, 0]) == captions
    if name == "parquet":  # of which a single file is a source, too
        file = folders / "parquet" / "worker_0" / "data_chunk_1.parquet"
        source = open_source(str(file), READ_AS[name])
        assert len(source.manifest) == 3
        np.testing.assert_array_equal(source.read(1)["latents"], SAMPLES[4].latents)


# ---------------------------------------------------------------- identity


@pytest.mark.parametrize("name", WRITERS)
def test_identity_is_that_of_the_content(name, folders, tmp_path):
    expected = opened(folders, name).manifest.identity()
    last = SAMPLES[-1]
    for number, (samples, same) in enumerate(
        (
            (SAMPLES, True),
            ([SAMPLES[1], SAMPLES[0], *SAMPLES[2:]], False),
            ([*SAMPLES[:-1], last._replace(latents=-last.latents)], False),
            ([*SAMPLES[:-1], last._replace(text=-last.text)], False),
        )
    ):
        WRITERS[name](tmp_path / str(number), samples)
        found = open_source(str(tmp_path / str(number)), READ_AS[name]).manifest.identity()
        assert (found == expected) == same


def test_identity_says_how_latents_are_normalised_and_is_given_of_grain_sources(folders):
    none, wan = (
        open_source(str(folders / "parquet"), Parquet(normalize=normalize)).manifest.identity()
        for normalize in ("none", "wan2.1")
    )
    assert none != wan
    one, same, other = (grain_samples(identity=each).manifest.identity() for each in "aab")
    assert one == same != other


# ---------------------------------------------------------------- normalisation, stride, padding


def test_raw_latents_are_normalised_by_the_named_vae(tmp_path):
    at_zero, at_one = normalized(np.array([[0.0] * 16, [1.0] * 16]), "wan2.1")
    deviation = 1 / (at_one - at_zero)
    mean = -at_zero * deviation
    write_fastvideo(tmp_path / "raw", SAMPLES, raw=lambda latents: latents * deviation + mean)
    source = open_source(str(tmp_path / "raw"), Parquet(normalize="wan2.1"))
    for number, sample in enumerate(SAMPLES):
        latents = source.read(number)["latents"]
        np.testing.assert_allclose(latents, sample.latents.astype(np.float32), atol=1e-5)


def test_training_needs_to_know_whether_and_by_which_vae_latents_are_normalised(folders):
    for name in ("parquet", "safetensors"):
        with pytest.raises(InputError) as error:
            open_source(str(folders / name)).require_settings()
        assert_says(error, folders / name, "data.source.normalize", "wan2.1")
    with pytest.raises(InputError) as error:
        open_source(str(folders / "parquet"), Parquet(normalize="wan2.2"))
    assert_says(error, folders / "parquet", 16, 48, "data.source.normalize")


def test_a_stride_that_is_not_recorded_is_the_usual_one_or_given(tmp_path):
    write_tensor_files(tmp_path / "usual", make_samples(2, channels=48))
    assert open_source(str(tmp_path / "usual")).manifest.vae_stride == (4, 16, 16)
    write_tensor_files(tmp_path / "other", make_samples(2, channels=5))
    with pytest.raises(InputError) as error:
        open_source(str(tmp_path / "other"))
    assert_says(error, tmp_path / "other", "5 channels", "data.source.vae_stride")
    given = open_source(str(tmp_path / "other"), SafetensorsFolder(vae_stride=(2, 4, 4)))
    assert given.manifest.vae_stride == (2, 4, 4)
    assert given.manifest.shape.tolist() == [[1, 16, 24], [5, 16, 16]]


@settings(max_examples=50, deadline=None)
@given(
    layout=st.sampled_from(["CTHW", "TCHW", "THWC"]),
    axes=st.tuples(*[st.integers(1, 4)] * 4),
    batched=st.booleans(),
)
def test_channels_stand_last_whatever_the_layout(layout, axes, batched):
    latents = np.arange(np.prod(axes)).reshape(axes)
    stored = latents.transpose([*map("THWC".index, layout)])
    stored = stored[None] if batched else stored
    np.testing.assert_array_equal(channels_last(stored, layout), latents)
    assert latent_shape(stored.shape, layout) == (axes[:3], axes[3])
    if axes[0] == 1:
        picture = np.squeeze(stored[0] if batched else stored, layout.index("T"))
        np.testing.assert_array_equal(channels_last(picture, layout), latents)


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 1, 2, 3, 4), (1, 0, 2, 2), (10**7, 1, 1)])
def test_other_shapes_are_no_latents(shape):
    with pytest.raises(ValueError, match="latents have shape"):
        latent_shape(shape, "CTHW")


def test_text_may_lie_in_files_of_its_own(tmp_path, folders):
    from safetensors.numpy import save_file

    for number, sample in enumerate(SAMPLES):
        save_file({"z": channels_first(sample.latents)}, tmp_path / f"{number}.safetensors")
        save_file({"t5": sample.text}, tmp_path / f"{number}_te.safetensors")
    config = SafetensorsFolder(
        latents="z", text="t5", text_suffix="_te.safetensors", normalize="none"
    )
    found = batches_of(open_source(str(tmp_path), config), "dual_constraint")
    expected = batches_of(opened(folders, "store"), "dual_constraint")
    for batch, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)


# ---------------------------------------------------------------- Grain


class Broken(Records):
    def __getitem__(self, index):
        if index == 2:
            raise OSError("disk gone")
        sample = SAMPLES[index]
        if index == 3:
            return sample._replace(latents=sample.latents[:, :1])
        if index == 4:
            return sample._replace(text=np.full((1, 6), np.nan, np.float32))
        return sample


@pytest.mark.parametrize(
    ("sample", "words"), [(2, "disk gone"), (3, "latents of shape"), (4, "NaN"), (5, "at most 1")]
)
def test_bad_records_of_a_grain_source_are_named(sample, words):
    source = GrainSamples(Broken(), size_of, STRIDE, arrays_of)
    with pytest.raises(BadRecordError) as error:
        source.read(sample)
    assert_says(error, "Broken", f"sample {sample}", words)


@pytest.mark.parametrize(
    ("records", "geometry", "words"),
    [
        ([], size_of, "holds no samples"),
        ([{"video": 1}], size_of, "latents, and text or labels"),
        ([{"latents": 1, "labels": [1]}], size_of, "4 axes"),
        ([arrays_of(SAMPLES[0])], lambda index: (1, 0, 8), "geometry"),
        ([arrays_of(SAMPLES[0])], lambda index: 7, "geometry"),
    ],
)
def test_a_grain_source_that_cannot_be_used_is_refused(records, geometry, words):
    with pytest.raises(InputError) as error:
        GrainSamples(records, geometry, STRIDE)
    assert_says(error, "list", words)


def test_classes_of_a_grain_source_are_labels():
    records = [{"latents": SAMPLES[0].latents, "labels": np.array([3, 1])}]
    source = GrainSamples(records, lambda index: SAMPLES[0].size, STRIDE)
    np.testing.assert_array_equal(source.read(0)["labels"], [3, 1])
    assert source.manifest.form.text_dim is None
    assert conditions_for(dataclasses.replace(MODEL, text=None), source.manifest).length == 2
