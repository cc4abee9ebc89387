"""Damaged and hostile files of others: one line at the start, or one bad record."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_helpers import CACHES, says
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from source_files import (
    fastvideo_row,
    fastvideo_schema,
    make_samples,
    write_musubi,
    write_rows,
    write_tensor_files,
)

from alload_jax.data.sources.opening import (
    SafetensorsFolder,
    open_source,
    opened,
    read_tensors,
)
from alload_jax.data.sources.parquet import Parquet
from alload_jax.data.store import BadRecordError
from alload_jax.errors import InputError

SAMPLES = make_samples(3)


def refused(folder, *words, config=None):
    with says(*words):
        open_source(str(folder), config)


def bad(source, sample, *words):
    with says(*words, kind=BadRecordError):
        source.read(sample)


@pytest.mark.parametrize("kind", CACHES)
def test_a_file_that_is_no_such_file_is_refused_at_the_start_and_bad_later(tmp_path, kind):
    write, config = CACHES[kind]
    folder = write(tmp_path / "data", SAMPLES)
    file = min(path for path in folder.rglob("*.*") if path.is_file())
    source = open_source(str(folder), config)
    content = file.read_bytes()
    for other in (b"", b"\x00" * 7, b"not this"):
        file.write_bytes(other)
        refused(folder, file, "remove it", config=config)
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
    if config is not None:
        for place in (tmp_path / "none", tmp_path / "empty"):
            refused(place, place, "data.folder", config=config)
            place.mkdir(exist_ok=True)
            refused(place, "manifest.parquet", "no such manifest")


def test_of_a_sample_in_two_files_the_damaged_one_is_named(tmp_path):
    folder = write_musubi(tmp_path / "data", SAMPLES)
    source = open_source(str(folder))
    for file in sorted(folder.glob("my file_000_*")):
        content = file.read_bytes()
        file.write_bytes(content[:-100])
        bad(source, 0, f"(sample 0) cannot be read: {file.name}: ")
        file.write_bytes(content)
    source.read(0)


def test_links_to_folders_are_passed_over(tmp_path):
    folder = write_musubi(tmp_path / "data", SAMPLES)
    (tmp_path / "other").mkdir()
    for name, target in (("old.safetensors", "../other"), ("old.pt", ".")):
        (folder / name).symlink_to(target)
    assert len(open_source(str(folder)).manifest) == len(SAMPLES)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_pickles_are_refused_and_not_read(tmp_path, suffix):
    (tmp_path / f"latents-0-0{suffix}").write_bytes(b"\x80\x04cposix\nsystem\n(S'touch ran'\ntR.")
    refused(tmp_path, tmp_path, suffix, "pickle", "weights_only=True", "docs/other-caches.md")
    refused(tmp_path / f"latents-0-0{suffix}", suffix, "pickle")


def test_the_folder_of_a_run_is_no_data(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for name in ("environment.json", "x.safetensors"):  # which may be a sample of it
        (tmp_path / name).touch()
    for config in (None, SafetensorsFolder(normalize="none")):
        refused(tmp_path, tmp_path, "is the folder of a run", "name a data folder", config=config)


TENSOR = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}


def test_a_hostile_header_is_an_error_in_words(tmp_path):
    for content in (
        b"[1, 2]",
        b"[" * 5000,
        {"latents": 3},
        {"latents": {"dtype": "F32", "shape": [2]}},
        {"latents": TENSOR | {"dtype": "F8_E4M3", "shape": [64]}},
        *({"latents": TENSOR | {"shape": each}} for each in ([-2, -8], [10**9] * 4, [15])),
        *({"latents": TENSOR | {"data_offsets": each}} for each in ([-64, 0], [0, 10**18])),
        {"latents": TENSOR | {"shape": [True], "data_offsets": [0, 4]}},
    ):
        header = content if isinstance(content, bytes) else json.dumps(content).encode()
        path = tmp_path / "a.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        with pytest.raises(ValueError, match=r"it is damaged|latents"):
            read_tensors(path, ["latents"])
        refused(tmp_path, path.name, "remove it")


@settings(max_examples=30)
@given(data=st.data())
def test_changed_bytes_never_give_another_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("changed") / "a.safetensors"
    save_file({"latents": np.zeros((2, 1, 2, 2), np.float32)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        with opened(path) as file:
            names = file.keys()  # a handle is not iterable
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        found = read_tensors(path, list(shapes))
    except ValueError:
        return
    assert {name: array.shape for name, array in found.items()} == shapes


ZEROS = np.zeros((16, 1, 2, 2), np.float32)
INFINITE = np.pad(np.full((1, 1, 1, 1), np.inf, np.float32), ((3, 12), (0, 0), (1, 0), (1, 0)))
TEXT = np.ones((3, 6), np.float32)


def test_a_tensor_or_mask_that_cannot_be_used_is_a_bad_record(tmp_path):
    cases = [
        (ZEROS, TEXT, [1, 1, 0], None),
        (INFINITE, TEXT, [1, 1, 1], "latents with NaN or infinite"),
        (ZEROS.astype(np.int32), TEXT, [1, 1, 1], "int32"),
        (ZEROS, TEXT * np.nan, [1, 1, 1], "text with NaN"),
        (ZEROS, TEXT, [0, 1, 1], "ones before zeros"),
        (ZEROS, TEXT, [1, 1], "ones before zeros"),
    ]
    for number, (latents, text, mask, _) in enumerate(cases):
        tensors = {"latents": latents, "prompt_embeds": text, "m": np.array(mask)}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    source = open_source(str(tmp_path), SafetensorsFolder(normalize="none", mask="m"))
    assert len(source.read(0)["text"]) == 2
    for number, (*_, words) in list(enumerate(cases))[1:]:
        bad(source, number, f"{number}.safetensors", f"sample {number}", words)


def test_samples_of_two_kinds_or_with_the_name_of_a_text_are_refused(tmp_path):
    folder = write_tensor_files(tmp_path / "a", make_samples(1))
    for name, other in (("width", {"width": 7}), ("channels", {"channels": 8})):
        extra = write_tensor_files(tmp_path / name, make_samples(1, **other))
        (extra / "00000.safetensors").rename(folder / "00001.safetensors")
        refused(folder, folder, "sample 1", "one kind")
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("x", "x_te"):
        save_file({"z": np.zeros((16, 1, 2, 2), np.float32)}, folder / f"{name}.safetensors")
        save_file({"t5": np.zeros((1, 4), np.float32)}, folder / f"{name}_te.safetensors")
    config = SafetensorsFolder(latents="z", text="t5", text_suffix="_te.safetensors")
    refused(folder, folder / "x_te.safetensors", "x_te_te.safetensors", "rename", config=config)
    (folder / "x_te_te.safetensors").unlink()
    (folder / "x_te.safetensors").unlink()
    refused(folder, "x_te.safetensors is missing", config=config)
    with pytest.raises(InputError, match=r"text_suffix is '_te'; it must end in \.safetensors"):
        SafetensorsFolder(text_suffix="_te")


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


def test_musubi_caches_that_cannot_be_used_are_refused(tmp_path):
    write_musubi(tmp_path, SAMPLES)
    first, *_ = sorted(tmp_path.glob("*_wan.safetensors"))
    text = tmp_path / "my file_000_wan_te.safetensors"
    kept = text.read_bytes()
    text.unlink()
    refused(tmp_path, first, text.name, "wan_cache_text_encoder_outputs.py")
    save_file({"llm_bfloat16": np.zeros(3)}, text)
    refused(tmp_path, text, "varlen_t5", "llm_bfloat16")
    text.write_bytes(kept)
    latents = np.zeros((16, 1, 2, 2), np.float32)
    one_frame = {"latents_1x2x2_float32": latents, "f_indices_int32": np.zeros(2, np.int32)}
    save_file(one_frame, first)
    refused(tmp_path, first, "one-frame")
    first.rename(tmp_path / "odd_wan.safetensors")
    refused(tmp_path, "odd_wan.safetensors", "its name is not")


GOOD = fastvideo_row(0, SAMPLES[0])


def test_an_absurd_shape_is_refused(tmp_path):
    for changes, words in (
        ({"vae_latent_shape": [10**9] * 4}, "latents have shape"),
        ({"vae_latent_shape": [-16, 1, -4, 6]}, "latents have shape"),
        ({"vae_latent_shape": []}, "latents have shape"),
        ({"vae_latent_shape": None}, "cannot be used"),
        ({"text_embedding_shape": [0]}, "text embeddings have shape"),
        ({"text_embedding_shape": [None, 6]}, "cannot be used"),
    ):
        path = write_rows(tmp_path / "a.parquet", [GOOD, GOOD | changes])
        refused(tmp_path, path, "row 1", words)


def test_bytes_that_do_not_fit_are_a_bad_record(tmp_path):
    nan = {"text_embedding_shape": [1, 6], "text_embedding_bytes": b"\0\0\xc0\x7f" * 6}
    cases = [
        ({"vae_latent_bytes": b""}, "0 bytes"),
        ({"vae_latent_bytes": None}, "null"),
        ({"vae_latent_dtype": "float64"}, "bytes, not those of float64"),
        ({"vae_latent_dtype": "object"}, "'object'"),
        ({"vae_latent_dtype": None}, "None"),
        ({"vae_latent_shape": [16, 2, 4, 6]}, "bytes, not those of float32"),
        (nan, "NaN"),
    ]
    path = write_rows(tmp_path / "a.parquet", [GOOD, *(GOOD | changes for changes, _ in cases)])
    source = open_source(str(tmp_path), Parquet(normalize="none"))
    source.read(0)
    for number, (_, words) in enumerate(cases, 1):
        bad(source, number, path, f"row {number}", f"sample {number}", words)


def test_a_damaged_page_is_a_bad_record_and_others_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    write_rows(path, [GOOD, GOOD | {"id": "b"}], row_group_size=1, write_page_checksum=True)
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
    write_rows(path, [GOOD | {"vae_latent_bytes": ""}], wrong)
    refused(tmp_path, path, "vae_latent_bytes holds string")


def test_classes_that_are_no_integers_are_refused_or_a_bad_record_if_they_are_lost(tmp_path):
    def write(kind, value):
        schema = fastvideo_schema("vae_latent").append(pa.field("label", kind))
        return write_rows(tmp_path / "a.parquet", [GOOD | {"label": value}], schema)

    config = Parquet(labels="label", normalize="none")
    for kind, value, words in (
        (pa.float32(), 2.5, "holds float"),
        (pa.string(), "cat", "holds string"),
        (pa.int64(), None, "label is null"),
        (pa.list_(pa.int64()), [1, None], "label is null"),
    ):
        refused(tmp_path, write(kind, value), words, config=config)
    write(pa.int64(), 3)
    source = open_source(str(tmp_path), config)
    np.testing.assert_array_equal(source.read(0)["labels"], [3])
    bad(source, 0, write(pa.int64(), None), "classes of dtype object")
