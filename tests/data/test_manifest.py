import contextlib
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_helpers import (
    assert_says,
    change_manifest,
    manifest_of,
    random_sample,
    random_samples,
    write_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.datasets import prepare_dataset
from alload_jax.data.datasets.digits import Digits
from alload_jax.data.manifest import (
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
from alload_jax.planning.samples import Geometry


def edit_notes(folder, edit):
    notes = manifest_metadata(folder / MANIFEST_NAME)
    edit(notes)
    change_manifest(folder, metadata={METADATA_KEY: json.dumps(notes).encode()})


def set_column(name, values):
    def change(table):
        return table.set_column(table.column_names.index(name), name, pa.array(values))

    return change


def refused(folder, *parts):
    with pytest.raises(InputError) as error:
        read_manifest(folder)
    assert_says(error, folder, *parts)


# ---------------------------------------------------------------- what it says


def test_columns_and_notes_are_what_was_written(tmp_path, samples):
    origin = {"camera": [1, 2.5, None], "site": {"name": "Orsay"}}
    store = write_store(tmp_path / "store", samples, samples_per_shard=4, origin=origin)
    manifest = read_manifest(store)
    assert len(manifest) == len(samples)
    assert manifest.path == store / MANIFEST_NAME
    assert manifest.shape.tolist() == [list(sample.size) for sample in samples]
    assert manifest.shape.dtype == np.int64
    assert manifest.text_length.tolist() == [len(sample.labels) for sample in samples]
    assert set(manifest.channels.tolist()) == {1}
    assert manifest.longest_text() == 2
    on_disk = {path.name: path.stat().st_size for path in store.glob("*.arrayrecord")}
    assert manifest.shard_bytes == on_disk
    assert set(manifest.shard) == set(on_disk)
    assert manifest.origin == manifest_metadata(store / MANIFEST_NAME)["origin"] == origin
    assert read_manifest(write_store(tmp_path / "other", samples[:1])).origin == {}


@pytest.mark.parametrize(
    ("value", "fps"),
    [
        (16, 16),
        (12.5, 12.5),
        ("30000/1001", 30000 / 1001),
        *((value, None) for value in (None, "fast", 0, "1/0", "nan", [16])),
    ],
)
def test_fps_is_what_the_origin_says(tmp_path, value, fps):
    store = write_store(tmp_path / "store", random_samples(1), origin={"fps": value})
    assert read_manifest(store).fps == (fps and pytest.approx(fps))


@pytest.mark.parametrize(
    ("stride", "grids", "patch"),
    [
        ((1, 1, 1), [(1, 16, 32), (9, 32, 32)], (2, 2, 2)),
        ((4, 8, 8), [(1, 2, 4), (3, 4, 4)], (1, 2, 2)),
    ],
)
def test_samples_count_the_tokens_of_their_latents(tmp_path, stride, grids, patch):
    rng, sizes = np.random.default_rng(0), [(1, 16, 32), (9, 32, 32)]
    written = [random_sample(rng, size, grid) for size, grid in zip(sizes, grids, strict=True)]
    manifest = read_manifest(write_store(tmp_path / "store", written, stride))
    samples = manifest.samples(patch)
    tokens = [np.prod([-(-g // p) for g, p in zip(grid, patch, strict=True)]) for grid in grids]
    assert samples.seq_len.tolist() == tokens
    assert samples.shape.tolist() == [list(size) for size in sizes]
    assert manifest.geometry(patch) == Geometry(stride, patch)
    assert [manifest.latent_shape(size) for size in sizes] == [(*grid, 1) for grid in grids]


# ---------------------------------------------------------------- what a model requires


@pytest.mark.parametrize(
    ("patch", "sample"), [((1, 4, 8), 1), ((1, 2, 4), 2), ((5, 1, 1), 0), ((2, 4, 4), 0)]
)
def test_a_model_of_other_channels_or_whose_patch_divides_no_sample_is_refused(patch, sample):
    sizes = [(1, 4, 8), (5, 4, 4), (1, 5, 4)]
    manifest = manifest_of(sizes, [1, 1, 1])
    manifest.require(channels=1, patch_size=(1, 1, 4))
    with pytest.raises(InputError) as error:
        manifest.require(channels=1, patch_size=patch)
    assert_says(error, manifest.path, f"sample {sample}", sizes[sample], "model.patch_size", patch)
    with pytest.raises(InputError) as error:
        manifest.require(channels=16, patch_size=(1, 1, 4))
    assert_says(error, manifest.path, "sample 0", "1 channels", "model.in_channels", 16)


# ---------------------------------------------------------------- what is refused


def test_a_folder_without_manifest_or_rows_is_refused(tmp_path):
    refused(tmp_path, MANIFEST_NAME, "data.folder")
    refused(tmp_path / "nowhere", MANIFEST_NAME, "data.folder")
    refused(write_store(tmp_path / "store", []), "no rows", "at least one sample")


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: b"frames\n1\n", lambda data: data[:-20]]
)
def test_a_file_that_is_not_parquet_is_refused(store, change):
    path = store / MANIFEST_NAME
    path.write_bytes(change(path.read_bytes()))
    refused(store, MANIFEST_NAME, "not a Parquet file", "prepare the data again")


def test_other_tables_and_notes_are_refused(store):
    path = store / MANIFEST_NAME
    content = path.read_bytes()
    for table, metadata, said in (
        (lambda table: table.drop_columns(["frames", "checksum"]), "keep", ["frames, checksum"]),
        (lambda table: pa.table({"url": ["a"], "caption": ["b"]}), "keep", ["shard", "frames"]),
        (None, None, ["vae_stride"]),
        (None, {METADATA_KEY: b"{half"}, []),
    ):
        path.write_bytes(content)
        change_manifest(store, table, metadata)
        refused(store, "StoreWriter", *said) if said else refused(store)
    for name in ("vae_stride", "shard_bytes", "origin"):
        path.write_bytes(content)
        edit_notes(store, lambda notes, name=name: notes.pop(name))
        refused(store)


def test_a_name_that_is_no_text_is_refused(store):
    path = store / MANIFEST_NAME
    content = path.read_bytes()
    places = [n for n in range(len(content)) if content.startswith(b"shard-", n)]
    refusals = 0
    for place in places:
        path.write_bytes(content[:place] + b"\xe3" + content[place + 1 :])
        try:
            read_manifest(store)
        except InputError:
            refusals += 1
    assert refusals


@pytest.mark.parametrize("name", ["shard", "index", "frames", "text_length", "checksum"])
def test_rows_without_a_value_or_of_words_are_refused(store, samples, name):
    def without(table):
        values = table[name].to_pylist()
        place = table.column_names.index(name)
        field = table.schema.field(name)
        return table.set_column(place, field, pa.array([None, *values[1:]], field.type))

    change_manifest(store, without)
    refused(store, name, "without a value")
    change_manifest(store, set_column(name, ["many"] * len(samples)))
    refused(store)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text_length", 10**6),
        ("text_length", -1),
        ("frames", 0),
        ("height", -8),
        ("width", 2**31 - 1),
        ("channels", 0),
        ("index", -1),
    ],
)
def test_sizes_that_no_sample_has_are_refused_before_memory_is_taken(store, samples, name, value):
    change_manifest(store, set_column(name, [value] * len(samples)))
    refused(store, f"row 0 has {name} {value}", "prepare the data again")


@pytest.mark.parametrize("name", ["../outside.arrayrecord", "/etc/passwd", "", "a/b", "..", "a\0"])
def test_shards_outside_the_folder_or_the_notes_are_refused(store, samples, name):
    (store.parent / "outside.arrayrecord").write_bytes(b"x")
    change_manifest(store, set_column("shard", [name] * len(samples)))
    refused(store, "not the name of a file beside the manifest")
    edit_notes(store, lambda notes: notes["shard_bytes"].update({name: 1}))
    refused(store, "not the name of a file beside the manifest")
    change_manifest(store, set_column("shard", ["other.arrayrecord"] * len(samples)))
    edit_notes(store, lambda notes: notes["shard_bytes"].pop(name))
    refused(store, "lacks the shard 'other.arrayrecord'")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vae_stride", [1, 1]),
        ("vae_stride", [1, 0, 1]),
        ("vae_stride", "111"),
        ("shard_bytes", ["a"]),
        ("shard_bytes", {"a": "b"}),
        ("origin", 3),
        ("text_dim", 10**9),
        ("text_dim", "wide"),
        ("given_channels", -2),
        ("image_shape", [257]),
    ],
)
def test_notes_of_other_types_are_refused(store, name, value):
    edit_notes(store, lambda notes: notes.update({name: value}))
    refused(store, f"note {name}", "prepare the data again")


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: b"", lambda d: d + b"x"])
def test_a_missing_shard_or_one_of_another_size_is_named(store, change):
    shard = sorted(store.glob("*.arrayrecord"))[1]
    size = shard.stat().st_size
    shard.write_bytes(change(shard.read_bytes()))
    refused(store, shard, shard.stat().st_size, size, "restore it")
    shard.unlink()
    refused(store, shard, "missing", "restore it")


def test_metadata_of_a_foreign_file_is_empty(tmp_path):
    (tmp_path / "text").write_text("no parquet")
    pyarrow.parquet.write_table(pa.table({"a": [1]}), tmp_path / "table")
    assert manifest_metadata(tmp_path / "text") == {}
    assert manifest_metadata(tmp_path / "table") == {}
    assert manifest_metadata(tmp_path / "nothing") == {}


@settings(max_examples=60, deadline=None)
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


@pytest.mark.parametrize("change", ["note", "row", "column"])
def test_notes_rows_and_columns_must_be_those_of_the_digest(healthy_store, tmp_path, change):
    shutil.copytree(healthy_store, tmp_path / "store")
    path = tmp_path / "store" / MANIFEST_NAME
    table = pyarrow.parquet.read_table(path)
    metadata = table.schema.metadata
    changed = {
        "note": table.replace_schema_metadata(
            metadata | {METADATA_KEY: metadata[METADATA_KEY].replace(b'"16"', b'"17"')}
        ),
        "row": table.slice(1),
        "column": table.drop_columns(["captions"]),
    }
    pyarrow.parquet.write_table(changed[change], path)
    refused(tmp_path / "store", "its notes are damaged: they differ from their SHA-256; restore")


def content_of(folder):
    manifest = read_manifest(folder)
    parts = {**vars(manifest), "captions": read_captions(folder), "rows": read_rows(folder)}
    return repr([parts[name] for name in sorted(parts)])


@pytest.fixture(scope="module")
def healthy_store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy") / "store"
    origin = {"fps": "16", "vae": "wan2.1"}
    with StoreWriter(folder, vae_stride=(1, 1, 1), origin=origin) as writer:
        for number, sample in enumerate(random_samples(12)):
            other = (sample.labels, f"another text {number}")
            writer.add(*sample, caption=f"a cat, number {number}", alternatives=[other])
    return folder


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("nothing"), "link to nothing"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "shard-00001.arrayrecord"])
def test_what_is_no_regular_file_is_refused_and_not_read(store, name, make, what):
    """Reading a FIFO would wait for ever."""
    (store / name).unlink()
    make(store / name)
    refused(store, store / name, what)
    with pytest.raises(InputError, match=what):
        open_source(str(store))
    if name == MANIFEST_NAME:
        with pytest.raises(InputError, match=what):
            prepare_dataset(store, Digits())


@pytest.mark.parametrize("change", [bytes, os.urandom])
def test_a_destroyed_shard_is_named_before_it_is_read(store, change):
    shard = sorted(store.glob("*.arrayrecord"))[1]
    source = open_source(str(store))
    source.require_shards()
    shard.write_bytes(change(shard.stat().st_size))
    with pytest.raises(InputError) as error:
        open_source(str(store)).require_shards()
    assert_says(error, shard, "destroyed", "restore it")
    source.require_shards(spared=len(source.manifest))


def test_records_that_a_shard_does_not_have_are_named_before_it_is_read(store):
    source = open_source(str(store))
    index, last = source.manifest.index.tolist(), len(source.manifest) - 1
    change_manifest(store, set_column("index", [2**63 - 1] * len(index)))
    words = r"holds \d+ records, and .* names record 9223372036854775807"
    with pytest.raises(InputError, match=words):
        open_source(str(store)).require_shards()
    open_source(str(store)).require_shards(spared=len(index))
    change_manifest(store, set_column("index", [*index[:-2], 10**6, 10**6]))
    changed = open_source(str(store))
    with pytest.raises(InputError, match="names record 1000000"):
        changed.require_shards(excluded={last})
    changed.require_shards(excluded={last - 1, last})
