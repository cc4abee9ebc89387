"""Damaged and hostile files: one line at the start, or one bad record."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_helpers import assert_says
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from source_files import (
    fastvideo_row,
    fastvideo_schema,
    make_samples,
    triplet,
    write_fastvideo,
    write_musubi,
    write_rows,
    write_tensor_files,
)

from alload_jax.data.sources.opening import open_source
from alload_jax.data.sources.parquet import Parquet
from alload_jax.data.sources.safetensors_folder import SafetensorsFolder, read_header, read_tensors
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError

SAMPLES = make_samples(3)
RAW = {
    "musubi": None,
    "parquet": Parquet(normalize="none"),
    "safetensors": SafetensorsFolder(normalize="none", mask="prompt_attention_mask"),
}
WRITERS = {
    "musubi": write_musubi,
    "parquet": write_fastvideo,
    "safetensors": write_tensor_files,
}


def refused(folder, *words, config=None):
    with pytest.raises(InputError) as error:
        open_source(str(folder), config)
    assert_says(error, *words)


def bad(source, sample, *words):
    with pytest.raises(BadRecordError) as error:
        source.read(sample)
    assert_says(error, *words)


@pytest.fixture(params=WRITERS)
def written(request, tmp_path):
    """A folder with samples, its reading, and one of its files."""
    folder = WRITERS[request.param](tmp_path / "data", SAMPLES)
    files = sorted(path for path in folder.rglob("*.*") if path.is_file())
    return folder, RAW[request.param], files[0]


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"not this"])
def test_a_file_that_is_something_else_is_refused(written, content):
    folder, config, file = written
    file.write_bytes(content)
    refused(folder, file, "remove it", config=config)


def test_a_truncated_linked_or_odd_file_is_refused_at_the_start_and_bad_later(written, tmp_path):
    folder, config, file = written
    source = open_source(str(folder), config)
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    refused(folder, file, config=config)
    bad(source, 0, file)
    file.unlink()
    bad(source, 0, file)
    os.mkfifo(file)
    refused(folder, file, "is not a file", config=config)
    file.unlink()
    (tmp_path / file.name).write_bytes(content)
    file.symlink_to(tmp_path / file.name)
    refused(folder, file, "link out of the folder", config=config)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_pickles_are_refused_and_not_read(tmp_path, suffix):
    (tmp_path / f"latents-0-0{suffix}").write_bytes(b"\x80\x04cposix\nsystem\n(S'touch ran'\ntR.")
    refused(tmp_path, tmp_path, suffix, "pickle", "weights_only=True", "docs/other-caches.md")
    refused(tmp_path / f"latents-0-0{suffix}", suffix, "pickle")


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_without_such_files_is_refused(tmp_path, name):
    config = RAW[name]
    if config is not None:
        refused(tmp_path, tmp_path, "data.folder", config=config)
        refused(tmp_path / "none", tmp_path / "none", "data.folder", config=config)
    refused(tmp_path, "manifest.parquet", "no such manifest")


# ---------------------------------------------------------------- safetensors


def write_header(path, content, data=b"\x00" * 64):
    header = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    "content",
    [
        b"[1, 2]",
        b"[" * 5000,
        {"latents": 3},
        {"latents": {"dtype": "F32", "shape": [2]}},
        {"latents": {"dtype": "F32", "shape": [-2, -8], "data_offsets": [0, 64]}},
        {"latents": {"dtype": "F32", "shape": [16], "data_offsets": [-64, 0]}},
        {"latents": {"dtype": "F32", "shape": [16], "data_offsets": [0, 10**18]}},
        {"latents": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"latents": {"dtype": "F32", "shape": [10**9] * 4, "data_offsets": [0, 64]}},
        {"latents": {"dtype": "F8_E4M3", "shape": [64], "data_offsets": [0, 64]}},
        {"latents": {"dtype": "F32", "shape": [15], "data_offsets": [0, 64]}},
    ],
)
def test_a_hostile_header_is_an_error_in_words(tmp_path, content):
    write_header(tmp_path / "a.safetensors", content)
    with pytest.raises(ValueError, match=r"it is|its header|latents"):
        read_tensors(tmp_path / "a.safetensors", ["latents"])
    refused(tmp_path, "a.safetensors", "remove it")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_changed_bytes_never_give_another_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("changed")
    path = folder / "a.safetensors"
    save_file({"latents": np.zeros((2, 1, 2, 2), np.float32)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        header = read_header(path)
        found = read_tensors(path, list(header.tensors))
    except ValueError:
        return
    assert all(found[name].shape == info.shape for name, info in header.tensors.items())


ZEROS = np.zeros((16, 1, 2, 2), np.float32)
INFINITE = np.pad(np.full((1, 1, 1, 1), np.inf, np.float32), ((3, 12), (0, 0), (1, 0), (1, 0)))
TEXT = np.ones((3, 6), np.float32)


@pytest.mark.parametrize(
    ("latents", "text", "mask", "words"),
    [
        (INFINITE, TEXT, [1, 1, 1], "latents with NaN or infinite"),
        (ZEROS.astype(np.int32), TEXT, [1, 1, 1], "int32"),
        (ZEROS, TEXT * np.nan, [1, 1, 1], "text with NaN"),
        (ZEROS, TEXT, [0, 1, 1], "ones before zeros"),
        (ZEROS, TEXT, [1, 1], "ones before zeros"),
    ],
)
def test_a_tensor_or_mask_that_cannot_be_used_is_a_bad_record(tmp_path, latents, text, mask, words):
    for number, tensors in enumerate(((ZEROS, TEXT, [1, 1, 0]), (latents, text, mask))):
        named = dict(zip(("latents", "prompt_embeds", "m"), map(np.array, tensors), strict=True))
        save_file(named, tmp_path / f"{number}.safetensors")
    source = open_source(str(tmp_path), SafetensorsFolder(normalize="none", mask="m"))
    assert len(source.read(0)["text"]) == 2
    bad(source, 1, "1.safetensors", "sample 1", words)


@pytest.mark.parametrize("other", [{"width": 7}, {"channels": 8}])
def test_samples_of_two_kinds_are_refused(tmp_path, other):
    folder = write_tensor_files(tmp_path / "a", make_samples(1))
    extra = write_tensor_files(tmp_path / "b", make_samples(1, **other))
    (extra / "00000.safetensors").rename(folder / "00001.safetensors")
    refused(folder, folder, "sample 1", "one kind")


def test_a_sample_with_the_name_of_a_text_is_refused(tmp_path):
    for name in ("x", "x_te"):
        save_file({"z": np.zeros((16, 1, 2, 2), np.float32)}, tmp_path / f"{name}.safetensors")
        save_file({"t5": np.zeros((1, 4), np.float32)}, tmp_path / f"{name}_te.safetensors")
    config = SafetensorsFolder(
        latents="z", text="t5", text_suffix="_te.safetensors", normalize="none"
    )
    with pytest.raises(InputError) as error:
        open_source(str(tmp_path), config)
    assert_says(error, tmp_path / "x_te.safetensors", "x_te_te.safetensors", "rename the sample")


# ---------------------------------------------------------------- musubi-tuner


def test_clips_of_a_video_share_its_text_which_may_be_of_one_name_alone(tmp_path):
    """A clip of foo.mp4, or the whole of foo_00016-009.mp4."""
    write_musubi(tmp_path, SAMPLES[1:2])
    (clip,) = tmp_path.glob("*_wan.safetensors")
    (text,) = tmp_path.glob("*_wan_te.safetensors")
    other = clip.with_name(clip.name.replace("_00016-", "_00040-"))
    other.write_bytes(clip.read_bytes())
    source = open_source(str(tmp_path))
    assert len(source.manifest) == 2
    for number in range(2):
        np.testing.assert_array_equal(source.read(number)["text"], SAMPLES[1].text)
    own = clip.name.replace("_1920x1080_wan", "_wan_te")
    (tmp_path / own).write_bytes(text.read_bytes())
    refused(tmp_path, clip, text.name, own, "rename")
    text.unlink()
    other.unlink()
    assert len(open_source(str(tmp_path)).manifest) == 1


def test_dots_and_capitals_in_names_of_musubi_keep_texts_apart(tmp_path):
    write_musubi(tmp_path, SAMPLES)
    keys = {0: "a.v1.0", 1: "a.v1.1", 2: "A.v1.0"}
    for path in sorted(tmp_path.iterdir()):
        number = int(path.name.removeprefix("my file_")[:3])
        path.rename(path.with_name(path.name.replace(f"my file_{number:03d}", keys[number])))
    source = open_source(str(tmp_path))
    order = sorted(range(3), key=lambda number: keys[number].encode())
    for sample, number in enumerate(order):
        np.testing.assert_array_equal(source.read(sample)["text"], SAMPLES[number].text)
    assert source.captions(range(3)) == [SAMPLES[number].caption for number in order]


def test_musubi_caches_that_cannot_be_used_are_refused(tmp_path):
    write_musubi(tmp_path, SAMPLES)
    first, *_ = sorted(tmp_path.glob("*_wan.safetensors"))
    text = tmp_path / "my file_000_wan_te.safetensors"
    kept = text.read_bytes()
    text.unlink()
    refused(tmp_path, first, text.name, "wan_cache_text_encoder_outputs.py")
    text.write_bytes(kept)
    save_file({"llm_bfloat16": np.zeros(3)}, text)
    refused(tmp_path, text, "varlen_t5", "llm_bfloat16")
    text.write_bytes(kept)
    latents = np.zeros((16, 1, 2, 2), np.float32)
    one_frame = {"latents_1x2x2_float32": latents, "f_indices_int32": np.zeros(2, np.int32)}
    save_file(one_frame, first)
    refused(tmp_path, first, "one-frame")
    first.rename(tmp_path / "odd_wan.safetensors")
    refused(tmp_path, "odd_wan.safetensors", "its name is not")


# ---------------------------------------------------------------- Parquet


def changed_row(**changes):
    return fastvideo_row(0, SAMPLES[0]) | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vae_latent_shape": [10**9] * 4}, "latents have shape"),
        ({"vae_latent_shape": [-16, 1, -4, 6]}, "latents have shape"),
        ({"vae_latent_shape": []}, "latents have shape"),
        ({"vae_latent_shape": None}, "cannot be used"),
        ({"text_embedding_shape": [0]}, "text embeddings have shape"),
        ({"text_embedding_shape": [None, 6]}, "cannot be used"),
    ],
)
def test_an_absurd_shape_is_refused(tmp_path, changes, words):
    write_rows(tmp_path / "a.parquet", [fastvideo_row(0, SAMPLES[0]), changed_row(**changes)])
    refused(tmp_path, tmp_path / "a.parquet", "row 1", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vae_latent_bytes": b""}, "0 bytes"),
        ({"vae_latent_bytes": None}, "null"),
        ({"vae_latent_dtype": "float64"}, "bytes, not those of float64"),
        ({"vae_latent_dtype": "object"}, "'object'"),
        ({"vae_latent_dtype": None}, "None"),
        ({"vae_latent_shape": [16, 2, 4, 6]}, "bytes, not those of float32"),
        ({"text_embedding_shape": [1, 6], "text_embedding_bytes": b"\0\0\xc0\x7f" * 6}, "NaN"),
    ],
)
def test_bytes_that_do_not_fit_are_a_bad_record(tmp_path, changes, words):
    write_rows(tmp_path / "a.parquet", [fastvideo_row(0, SAMPLES[0]), changed_row(**changes)])
    source = open_source(str(tmp_path), Parquet(normalize="none"))
    source.read(0)
    bad(source, 1, tmp_path / "a.parquet", "row 1", "sample 1", words)


def test_a_damaged_page_is_a_bad_record_and_others_are_read(tmp_path):
    rows = [fastvideo_row(number, SAMPLES[0]) for number in range(2)]
    path = write_rows(tmp_path / "a.parquet", rows, row_group_size=1, write_page_checksum=True)
    source = open_source(str(tmp_path), Parquet(normalize="none"))
    metadata = pyarrow.parquet.read_metadata(path)
    columns = [metadata.row_group(1).column(n) for n in range(metadata.num_columns)]
    (chunk,) = [one for one in columns if one.path_in_schema == "vae_latent_bytes"]
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset - 20] ^= 0xFF  # the values are in the dictionary before it
    path.write_bytes(content)
    source.read(0)
    bad(source, 1, path, "row 1")


def test_a_file_without_the_columns_is_refused(tmp_path):
    path = write_rows(tmp_path / "a.parquet", [{"x": 1}], pa.schema({"x": pa.int64()}))
    refused(tmp_path, path, "lacks column vae_latent_bytes", "x", "data.source")
    schema = fastvideo_schema("vae_latent", "text_embedding")
    wrong = schema.set(1, pa.field("vae_latent_bytes", pa.string()))
    write_rows(path, [changed_row(vae_latent_bytes="")], wrong)
    refused(tmp_path, path, "vae_latent_bytes holds string")


def test_names_masks_and_classes_are_those_of_the_config(tmp_path):
    sample = SAMPLES[1]
    padded = np.concatenate([sample.text.astype(np.float16), np.ones((3, 6), np.float16)])
    mask = np.array([1] * len(sample.text) + [0] * 3, bool)
    row = (
        triplet("x", sample.latents.astype(np.float16))
        | triplet("c", padded)
        | triplet("text_attention_mask", mask)
        | {"label": [2, 3]}
    )
    schema = fastvideo_schema("x", "c", "text_attention_mask").append(
        pa.field("label", pa.list_(pa.int64()))
    )
    write_rows(tmp_path / "a.parquet", [row], schema)
    texts = Parquet(latents="x", text="c", layout="THWC", normalize="none")
    arrays = open_source(str(tmp_path), texts).read(0)
    np.testing.assert_array_equal(arrays["latents"], sample.latents.astype(np.float16))
    np.testing.assert_array_equal(arrays["text"], sample.text.astype(np.float16))
    classes = Parquet(latents="x", labels="label", layout="THWC", normalize="none")
    source = open_source(str(tmp_path), classes)
    np.testing.assert_array_equal(source.read(0)["labels"], [2, 3])
    assert (source.manifest.form.text_dim, source.manifest.longest_text()) == (None, 2)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (pa.float32(), 2.5, "holds float"),
        (pa.string(), "cat", "holds string"),
        (pa.int64(), None, "label is null"),
        (pa.list_(pa.int64()), [1, None], "label is null"),
    ],
)
def test_classes_that_are_no_integers_are_refused(tmp_path, kind, value, words):
    schema = fastvideo_schema("vae_latent").append(pa.field("label", kind))
    write_rows(tmp_path / "a.parquet", [changed_row(label=value)], schema)
    refused(tmp_path, tmp_path / "a.parquet", words, config=Parquet(labels="label"))


def test_a_class_that_is_lost_later_is_a_bad_record(tmp_path):
    schema = fastvideo_schema("vae_latent").append(pa.field("label", pa.int64()))
    write_rows(tmp_path / "a.parquet", [changed_row(label=3)], schema)
    source = open_source(str(tmp_path), Parquet(labels="label", normalize="none"))
    np.testing.assert_array_equal(source.read(0)["labels"], [3])
    write_rows(tmp_path / "a.parquet", [changed_row(label=None)], schema)
    bad(source, 0, "a.parquet", "classes of dtype object")


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
        refused(tmp_path, "12 channels", "data.source.vae_stride")
    else:
        assert open_source(str(tmp_path)).manifest.vae_stride == (6, 8, 8)
