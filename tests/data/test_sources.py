"""Samples that others wrote, against the same samples in a store."""

import pickle

import jax
import numpy as np
import pyarrow as pa
import pytest
from data_helpers import CACHES, says
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from source_files import (
    STRIDE,
    channels_first,
    fastvideo_row,
    fastvideo_schema,
    make_samples,
    triplet,
    write_fastvideo,
    write_musubi,
    write_rows,
    write_tensor_files,
)

from alload_jax.data.collate import Collator, collation_for
from alload_jax.data.condition import conditions_for
from alload_jax.data.sources.arrays import channels_last, latent_shape, normalized
from alload_jax.data.sources.grain_samples import GrainSamples
from alload_jax.data.sources.opening import SafetensorsFolder, find_source_name, open_source
from alload_jax.data.sources.parquet import Parquet
from alload_jax.data.store import BadRecordError, StoreWriter
from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig

SAMPLES = make_samples(7)
MODEL = WanConfig(in_channels=16, text=TextConfig(dim=6, length=8), dtype="float32")
PAIRS = SafetensorsFolder(
    latents="z", text="t5", text_suffix="_te.safetensors", normalize="none", vae_stride=STRIDE
)


def write_pairs(folder, samples):
    folder.mkdir(parents=True)
    for number, sample in enumerate(samples):
        save_file({"z": channels_first(sample.latents)}, folder / f"{number}.safetensors")
        note = {"caption": sample.caption}
        save_file({"t5": sample.text}, folder / f"{number}_te.safetensors", note)


def write_store(folder, samples):
    with StoreWriter(folder, vae_stride=STRIDE) as writer:
        for sample in samples:
            writer.add(sample.latents, sample.text, sample.size, caption=sample.caption)


KINDS = CACHES | {"store": (write_store, None), "pairs": (write_pairs, PAIRS)}


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
    for name, (write, _) in KINDS.items():
        write(parent / name, SAMPLES)
    return parent


def opened(folders, name):
    return grain_samples() if name == "grain" else open_source(str(folders / name), KINDS[name][1])


def batches_of(source, policy):
    """All batches of an epoch, read in another process."""
    source.require_settings()
    manifest, source = source.manifest, pickle.loads(pickle.dumps(source))
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
        *(("musubi", "first_fit"), ("parquet", "dual_constraint"), ("pairs", "dual_constraint")),
        *(("safetensors", "first_fit"), ("grain", "dual_constraint")),
    ],
)
def test_batches_equal_those_of_a_store(name, policy, folders):
    source = opened(folders, name)
    expected = batches_of(opened(folders, "store"), policy)
    found = batches_of(source, policy)
    assert len(found) == len(expected) > 1
    for batch, other in zip(found, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, batch, other)
    captions = [None, None] if name == "grain" else ["caption 4", "caption 0"]
    assert source.captions([4, 0]) == captions


@pytest.mark.parametrize("name", ["store", "musubi", "parquet", "safetensors"])
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
    if name == "parquet":  # of which a single file is a source, too
        file = folders / "parquet" / "worker_0" / "data_chunk_1.parquet"
        source = open_source(str(file), KINDS[name][1])
        assert len(source.manifest) == 3
        np.testing.assert_array_equal(source.read(1)["latents"], SAMPLES[4].latents)


@pytest.mark.parametrize("name", ["musubi", "parquet", "safetensors", "pairs"])
def test_identity_is_that_of_the_content(name, folders, tmp_path):
    expected = opened(folders, name).manifest.identity()
    last = SAMPLES[-1]
    others = (last._replace(latents=-last.latents), last._replace(text=-last.text))
    cases = [SAMPLES, [SAMPLES[1], SAMPLES[0], *SAMPLES[2:]]]
    for number, samples in enumerate([*cases, *([*SAMPLES[:-1], each] for each in others)]):
        write, config = KINDS[name]
        write(tmp_path / str(number), samples)
        found = open_source(str(tmp_path / str(number)), config).manifest.identity()
        assert (found == expected) == (samples is SAMPLES)


def test_identity_says_how_latents_are_normalised_and_is_given_of_grain_sources(folders):
    place = str(folders / "parquet")
    sources = (open_source(place, Parquet(normalize=each)) for each in ("none", "wan2.1"))
    none, wan = (source.manifest.identity() for source in sources)
    assert none != wan
    one, same, other = (grain_samples(identity=each).manifest.identity() for each in "aab")
    assert one == same != other


@pytest.mark.parametrize(
    ("vae", "channels", "means", "deviations"),
    [("wan2.1", 16, -0.2126, 286.1255), ("wan2.2", 48, -7.6248, 790.8891)],
)
def test_statistics_of_the_vaes_are_the_published_ones(vae, channels, means, deviations):
    """Summed up, each times its number."""
    at_zero, at_one = normalized(np.array([[0.0] * channels, [1.0] * channels]), vae)
    deviation, number = 1 / (at_one - at_zero), np.arange(1, channels + 1)
    assert number @ (-at_zero * deviation) == pytest.approx(means, abs=1e-4)
    assert number @ deviation == pytest.approx(deviations, abs=1e-3)


def test_raw_latents_are_normalised_by_the_named_vae_which_training_must_know(folders, tmp_path):
    at_zero, at_one = normalized(np.array([[0.0] * 16, [1.0] * 16]), "wan2.1")
    deviation = 1 / (at_one - at_zero)
    mean = -at_zero * deviation
    write_fastvideo(tmp_path / "raw", SAMPLES, raw=lambda latents: latents * deviation + mean)
    source = open_source(str(tmp_path / "raw"), Parquet(normalize="wan2.1"))
    for number, sample in enumerate(SAMPLES):
        latents = source.read(number)["latents"]
        np.testing.assert_allclose(latents, sample.latents.astype(np.float32), atol=1e-5)
    for name in ("parquet", "safetensors"):
        with says(folders / name, "data.source.normalize", "wan2.1"):
            open_source(str(folders / name)).require_settings()
    with says(folders / "parquet", 16, 48, "data.source.normalize"):
        open_source(str(folders / "parquet"), Parquet(normalize="wan2.2"))


def test_a_stride_that_is_not_recorded_is_the_usual_one_or_given(tmp_path):
    write_tensor_files(tmp_path / "usual", make_samples(2, channels=48))
    assert open_source(str(tmp_path / "usual")).manifest.vae_stride == (4, 16, 16)
    write_tensor_files(tmp_path / "other", make_samples(2, channels=5))
    with says(tmp_path / "other", "5 channels", "data.source.vae_stride"):
        open_source(str(tmp_path / "other"))
    given = open_source(str(tmp_path / "other"), SafetensorsFolder(vae_stride=(2, 4, 4)))
    assert given.manifest.vae_stride == (2, 4, 4)
    assert given.manifest.shape.tolist() == [[1, 16, 24], [5, 16, 16]]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_recorded_size_gives_the_stride_where_it_fits(tmp_path, swapped):
    rows = []
    for number, sample in enumerate(make_samples(6, channels=12)):
        t, h, w = sample.latents.shape[:3]
        size = {"num_frames": 6 * t - 5, "height": 8 * h, "width": 8 * w}
        if swapped:
            size |= {"height": 8 * w, "width": 8 * h}
        rows.append(fastvideo_row(number, sample) | size)
    write_rows(tmp_path / "a.parquet", rows)
    if swapped:
        with pytest.raises(InputError, match=r"12 channels .*data\.source\.vae_stride"):
            open_source(str(tmp_path))
    else:
        assert open_source(str(tmp_path)).manifest.vae_stride == (6, 8, 8)


@settings(max_examples=50)
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
    assert latent_shape(stored.shape, layout) == axes
    if axes[0] == 1:
        picture = np.squeeze(stored[0] if batched else stored, layout.index("T"))
        np.testing.assert_array_equal(channels_last(picture, layout), latents)
    assert latent_shape((10**6, 1, 1, 1), "CTHW") == (1, 1, 1, 10**6)
    for shape in ((), (2, 3), (2, 1, 2, 3, 4), (1, 0, 2, 2), (10**6 + 1, 1, 1)):
        with pytest.raises(ValueError, match="latents have shape"):
            latent_shape(shape, "CTHW")


def test_names_masks_and_classes_of_rows_are_those_of_the_config(tmp_path):
    sample = SAMPLES[1]
    padded = np.concatenate([sample.text.astype(np.float16), np.ones((3, 6), np.float16)])
    mask = np.array([1] * len(sample.text) + [0] * 3, bool)
    row = (
        triplet("x", sample.latents.astype(np.float16))
        | triplet("c", padded)
        | triplet("text_attention_mask", mask)
        | {"label": [2, 3]}
    )
    label = pa.field("label", pa.list_(pa.int64()))
    schema = fastvideo_schema("x", "c", "text_attention_mask").append(label)
    write_rows(tmp_path / "a.parquet", [row], schema)
    texts = Parquet(latents="x", text="c", layout="THWC", normalize="none")
    arrays = open_source(str(tmp_path), texts).read(0)
    np.testing.assert_array_equal(arrays["latents"], sample.latents.astype(np.float16))
    np.testing.assert_array_equal(arrays["text"], sample.text.astype(np.float16))
    classes = Parquet(latents="x", labels="label", layout="THWC", normalize="none")
    source = open_source(str(tmp_path), classes)
    np.testing.assert_array_equal(source.read(0)["labels"], [2, 3])
    assert (source.manifest.form.text_dim, source.manifest.longest_text()) == (None, 2)


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


def test_bad_records_of_a_grain_source_are_named():
    source = GrainSamples(Broken(), size_of, STRIDE, arrays_of)
    said = {2: "disk gone", 3: "latents of shape", 4: "NaN", 5: "at most 1"}
    for sample, words in said.items():
        with says("Broken", f"sample {sample}", words, kind=BadRecordError):
            source.read(sample)


def test_a_grain_source_that_cannot_be_used_is_refused():
    for records, geometry, words in (
        ([], size_of, "holds no samples"),
        ([{"video": 1}], size_of, "latents, and text or labels"),
        ([{"latents": 1, "labels": [1]}], size_of, "4 axes"),
        ([arrays_of(SAMPLES[0])], lambda index: (1, 0, 8), "geometry"),
        ([arrays_of(SAMPLES[0])], lambda index: 7, "geometry"),
    ):
        with says("list", words):
            GrainSamples(records, geometry, STRIDE)


def test_what_a_cache_has_for_image_to_video_is_named(tmp_path, capfd):
    open_source(str(write_musubi(tmp_path / "text", SAMPLES)))
    assert capfd.readouterr().err == ""
    source = open_source(str(write_musubi(tmp_path / "image", SAMPLES, image_to_video=True)))
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"not read are clip_ in {len(SAMPLES)} files, latents_image_ in {len(SAMPLES)}" in said
    assert source.read(0)["latents"].shape == SAMPLES[0].latents.shape
