"""The manifest of a store: what it says, what a model requires of it, and what is refused."""

import contextlib
import json
import os
import shutil
from functools import partial
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_helpers import change_manifest, manifest_of, random_samples, says, set_column, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.manifest import (
    _LARGEST_SIZE,
    MANIFEST_NAME,
    METADATA_KEY,
    manifest_metadata,
    read_captions,
    read_manifest,
    read_rows,
)
from alload_jax.data.sources.opening import open_source
from alload_jax.data.store import StoreWriter
from alload_jax.errors import InputError


def edit_notes(folder, edit):
    notes = manifest_metadata(folder / MANIFEST_NAME)
    edit(notes)
    change_manifest(folder, metadata={METADATA_KEY: json.dumps(notes).encode()})


def refused(folder, *parts):
    with says(folder, *parts):
        read_manifest(folder)


def test_fps_is_what_the_origin_says(tmp_path):
    known = {16: 16, 12.5: 12.5, "30000/1001": 30000 / 1001}
    unknown = dict.fromkeys((None, "fast", 0, "1/0", "nan", -1))
    for number, (value, fps) in enumerate((known | unknown).items()):
        store = write_store(tmp_path / str(number), random_samples(1), origin={"fps": value})
        assert read_manifest(store).fps == (fps and pytest.approx(fps))


@pytest.mark.parametrize(
    ("patch", "sample"), [((1, 4, 8), 1), ((1, 2, 4), 2), ((5, 1, 1), 0), ((2, 4, 4), 0)]
)
def test_a_model_of_other_channels_or_whose_patch_divides_no_sample_is_refused(patch, sample):
    sizes = [(1, 4, 8), (5, 4, 4), (1, 5, 4)]
    manifest = manifest_of(sizes, [1, 1, 1])
    manifest.require(channels=1, patch_size=(1, 1, 4))
    with says(manifest.path, f"sample {sample}", sizes[sample], "model.patch_size", patch):
        manifest.require(channels=1, patch_size=patch)
    with says(manifest.path, "sample 0", "1 channels", "model.in_channels", 16):
        manifest.require(channels=16, patch_size=(1, 1, 4))


def test_a_manifest_is_not_blamed_where_no_thread_can_start(store, monkeypatch):
    error = pa.ArrowException("Failed to launch worker thread: Resource temporarily unavailable")
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", Mock(side_effect=error))
    with pytest.raises(pa.ArrowException, match="launch worker"):
        read_manifest(store)


def test_folders_and_files_that_are_no_manifest_are_refused(tmp_path, store):
    refused(tmp_path, MANIFEST_NAME, "data.folder")
    refused(tmp_path / "nowhere", MANIFEST_NAME, "data.folder")
    refused(write_store(tmp_path / "empty", []), "no rows", "at least one sample")
    path = store / MANIFEST_NAME
    for content in (b"", b"frames\n1\n", path.read_bytes()[:-20]):
        path.write_bytes(content)
        refused(store, MANIFEST_NAME, "not a Parquet file", "prepare the data again")
    (tmp_path / "text").write_text("no parquet")
    pyarrow.parquet.write_table(pa.table({"a": [1]}), tmp_path / "table")
    for name in ("text", "table", "nothing"):
        assert manifest_metadata(tmp_path / name) == {}


def without_first(name):
    def change(table):
        place, field = table.column_names.index(name), table.schema.field(name)
        values = [None, *table[name].to_pylist()[1:]]
        return table.set_column(place, field, pa.array(values, field.type))

    return change


def appended(name, value, table):
    return table.append_column(name, pa.array([value] * len(table)))


NAMES = ("shard", "index", "frames", "text_length", "checksum")
TABLES = [
    (lambda table: table.drop_columns(["frames", "checksum"]), "StoreWriter", "frames, checksum"),
    (lambda table: pa.table({"url": ["a"], "caption": ["b"]}), "StoreWriter", "shard", "frames"),
    *((without_first(name), name, "without a value") for name in NAMES),
    *((set_column(name, 3 if name == "shard" else "many"), name, "holds") for name in NAMES),
    *(
        (set_column(name, value), f"row 0 has {name} {value}", "prepare the data again")
        for name, value in (
            *(("text_length", _LARGEST_SIZE + 1), ("text_length", -1), ("frames", 0)),
            *(("height", -8), ("width", 2**31 - 1), ("channels", 0), ("index", -1)),
        )
    ),
    *(
        (partial(appended, name, value), f"row 0 has {name} {value}", "prepare the data again")
        for name, value in (
            *(("weight", 0.0), ("weight", float("nan")), ("caption_dropout", 1.5)),
            *(("joined", -1), ("joined", 2**32), ("number", -1), ("number", np.uint64(2**63))),
        )
    ),
    *(
        (partial(appended, name, "many"), f"column {name} holds string", "prepare the data again")
        for name in ("weight", "caption_dropout", "joined", "number")
    ),
    (partial(appended, "number", 3), "not a number of its own"),
]
"""Changes of the rows, and what is said about them."""


@pytest.mark.parametrize("case", TABLES)
def test_rows_that_no_writer_writes_are_refused_before_memory_is_taken(store, case):
    change, *said = case
    change_manifest(store, change)
    refused(store, *said)


def test_notes_that_are_missing_or_no_json_or_of_other_types_are_refused(store):
    path = store / MANIFEST_NAME
    content = path.read_bytes()
    for name, value in (
        *(("vae_stride", [1, 1]), ("vae_stride", [1, 0, 1]), ("vae_stride", "111")),
        *(("shard_bytes", ["a"]), ("shard_bytes", {"a": "b"}), ("origin", 3)),
        *(("text_dim", 2**16 + 1), ("text_dim", "wide"), ("given_channels", -2)),
        *(("image_shape", [257]), ("parts", {"a": 0}), ("parts", [1]), ("text_dim", True)),
    ):
        edit_notes(store, lambda notes, name=name, value=value: notes.update({name: value}))
        refused(store, f"note {name}", "prepare the data again")
        path.write_bytes(content)
    edit_notes(store, lambda notes: notes.update({"given_channels": 2**16}))
    assert read_manifest(store).form.given_channels == 2**16
    path.write_bytes(content)
    for name in ("vae_stride", "shard_bytes", "origin"):
        edit_notes(store, lambda notes, name=name: notes.pop(name))
        refused(store, f"the note {name}")
        path.write_bytes(content)
    for metadata, said in ((None, ["StoreWriter", "vae_stride"]), ({METADATA_KEY: b"{half"}, [])):
        change_manifest(store, metadata=metadata)
        refused(store, *said)
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["../outside.arrayrecord", "/etc/passwd", "", "a/b", "..", "a\0"])
def test_shards_outside_the_folder_or_the_notes_are_refused(store, name):
    (store.parent / "outside.arrayrecord").write_bytes(b"x")
    change_manifest(store, set_column("shard", name))
    refused(store, "not the name of a file beside the manifest")
    edit_notes(store, lambda notes: notes["shard_bytes"].update({name: 1}))
    refused(store, "not the name of a file beside the manifest")
    change_manifest(store, set_column("shard", "other.arrayrecord"))
    edit_notes(store, lambda notes: notes["shard_bytes"].pop(name))
    refused(store, "lacks the shard 'other.arrayrecord'")


def test_a_missing_shard_or_one_of_another_size_is_named(store):
    shard = sorted(store.glob("*.arrayrecord"))[1]
    content = shard.read_bytes()
    for changed in (content[:-1], b"", content + b"x"):
        shard.write_bytes(changed)
        refused(store, shard, len(changed), len(content), "restore it")
    shard.unlink()
    refused(store, shard, "missing", "restore it")


@pytest.fixture(scope="module")
def healthy_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy") / "store"
    origin = {"fps": "16", "vae": "wan2.1"}
    with StoreWriter(folder, vae_stride=(1, 1, 1), origin=origin) as writer:
        for number, sample in enumerate(random_samples(12)):
            other = (sample.labels, f"another text {number}")
            writer.add(*sample, caption=f"a cat, number {number}", alternatives=[other])
    return folder


def content_of(folder):
    manifest = read_manifest(folder)
    parts = {**vars(manifest), "captions": read_captions(folder), "rows": read_rows(folder)}
    return repr([parts[name] for name in sorted(parts)])


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_a_flipped_bit_changes_nothing_that_is_read(healthy_store, place):
    path = healthy_store / MANIFEST_NAME
    good, expected = path.read_bytes(), content_of(healthy_store)
    damaged = bytearray(good)
    damaged[place // 8 % len(good)] ^= 1 << place % 8
    path.write_bytes(damaged)
    with contextlib.suppress(InputError):  # which is what most flips give
        assert content_of(healthy_store) == expected
    path.write_bytes(good)


def test_notes_rows_and_columns_must_be_those_of_the_digest(healthy_store, tmp_path):
    shutil.copytree(healthy_store, tmp_path / "store")
    path = tmp_path / "store" / MANIFEST_NAME
    table = pyarrow.parquet.read_table(path)
    metadata = table.schema.metadata
    other = metadata | {METADATA_KEY: metadata[METADATA_KEY].replace(b'"16"', b'"17"')}
    without = table.drop_columns(["captions"])
    for changed in (table.replace_schema_metadata(other), table.slice(1), without):
        pyarrow.parquet.write_table(changed, path)
        refused(tmp_path / "store", "its notes are damaged: they differ from their SHA-256; rest")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "not a regular file"),  # reading it would wait for ever
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("nothing"), "link to nothing"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "shard-00001.arrayrecord"])
def test_what_is_no_regular_file_is_refused_and_not_read(store, name, make, what):
    (store / name).unlink()
    make(store / name)
    refused(store, store / name, what)
    with pytest.raises(InputError, match=what):
        open_source(str(store))


def test_destroyed_shards_and_records_that_a_shard_has_not_are_named_before_it_is_read(store):
    source = open_source(str(store))
    source.require_shards()
    count, index = len(source.manifest), source.manifest.index.tolist()
    shard = sorted(store.glob("*.arrayrecord"))[1]
    content = shard.read_bytes()
    for change in (bytes, os.urandom):
        shard.write_bytes(change(len(content)))
        with says(shard, "destroyed", "restore it"):
            open_source(str(store)).require_shards()
        source.require_shards(spared=count)
    shard.write_bytes(content)
    change_manifest(store, set_column("index", 2**63 - 1))
    words = r"holds \d+ records, and .* names record 9223372036854775807"
    with pytest.raises(InputError, match=words):
        open_source(str(store)).require_shards()
    open_source(str(store)).require_shards(spared=count)
    change_manifest(store, set_column("index", [*index[:-1], 3]))
    with pytest.raises(InputError, match=r"holds 3 records, .* names record 3"):  # of 0, 1 and 2
        open_source(str(store)).require_shards()
    change_manifest(store, set_column("index", [*index[:-2], 10**6, 10**6]))
    changed = open_source(str(store))
    with pytest.raises(InputError, match="names record 1000000"):
        changed.require_shards(excluded={count - 1})
    with pytest.raises(InputError, match="names record 1000000"):
        changed.require_shards(spared=1)
    changed.require_shards(spared=2)
    changed.require_shards(excluded={count - 2, count - 1})
