"""Samples written to a store and read again; those that are refused; records that are damaged."""

import dataclasses
import math
import os
import tempfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
from array_record.python import array_record_module
from data_helpers import (
    assert_holds,
    change_manifest,
    flip_byte,
    random_sample,
    random_samples,
    says,
    write_and_fail,
    write_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data import record
from alload_jax.data.manifest import MANIFEST_NAME, read_manifest, read_rows
from alload_jax.data.store import BadRecordError, StoreReader, StoreWriter
from alload_jax.data.store.files import partial_folder

PIXELS = {"vae_stride": (1, 1, 1)}


def latent_grid(size, stride):
    frames, *sides = size
    sides = (math.ceil(side / step) for side, step in zip(sides, stride[1:], strict=True))
    return (1 + math.ceil((frames - 1) / stride[0]), *sides)


@st.composite
def sample_lists(draw):
    stride = draw(st.sampled_from([(1, 1, 1), (4, 8, 8), (2, 4, 2)]))
    channels = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size = st.tuples(st.integers(1, 9), st.integers(1, 17), st.integers(1, 17))
    rows = draw(st.lists(st.tuples(size, st.integers(0, 3)), min_size=1, max_size=9))
    return stride, [
        random_sample(rng, size, latent_grid(size, stride), channels, text_length)
        for size, text_length in rows
    ]


def record_bytes(folder, row):
    reader = array_record_module.ArrayRecordReader(str(folder / row["shard"]))
    (data,) = reader.read([row["index"]])
    reader.close()
    return data


@settings(max_examples=12)
@given(sample_lists(), st.integers(1, 5))
def test_what_is_written_is_read_back_and_rows_say_where_it_is(stride_and_samples, per_shard):
    stride, samples = stride_and_samples
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "parents" / "store"
        write_store(store, samples, stride, samples_per_shard=per_shard)
        manifest, rows = read_manifest(store), read_rows(store).to_pylist()
        reader = StoreReader(manifest)
        assert manifest.vae_stride == stride
        assert len(manifest) == len(rows) == len(samples)
        shards = sorted({row["shard"] for row in rows})
        assert {path.name for path in store.iterdir()} == {*shards, MANIFEST_NAME}
        for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            assert_holds(reader.read(number), sample)
            assert (row["frames"], row["height"], row["width"]) == sample.size
            assert row["channels"] == sample.latents.shape[-1]
            assert row["text_length"] == len(sample.labels)
            data = record_bytes(store, row)
            assert row["checksum"] == zlib.crc32(data)
            assert_holds(record.decode(data), sample)
            assert (shards.index(row["shard"]), row["index"]) == divmod(number, per_shard)


def test_full_shards_are_closed_by_their_bytes(tmp_path):
    samples = random_samples(6)
    store = write_store(tmp_path / "one", samples, bytes_per_shard=1)
    assert len(read_manifest(store).shard_bytes) == 6
    size = len(record_bytes(store, read_rows(store).to_pylist()[0]))
    exact = write_store(tmp_path / "exact", samples[:1] * 4, bytes_per_shard=2 * size)
    assert read_manifest(exact).index.tolist() == [0, 1, 0, 1]


def test_shards_beyond_an_eighth_of_the_files_that_may_be_open_are_closed(tmp_path, monkeypatch):
    samples, limits = random_samples(30), [(16, 80)]
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, both: limits.append(both))
    reader = StoreReader(read_manifest(write_store(tmp_path, samples, samples_per_shard=1)))
    for number in 2 * [*range(30)]:
        assert_holds(reader.read(number), samples[number])
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert sum(path.startswith(str(tmp_path)) for path in opened) == 10
    assert limits[-1] == (80, 80)


def test_the_folder_appears_at_the_end_or_not_and_what_a_killed_writer_left_is_replaced(tmp_path):
    write_and_fail(tmp_path / "store", [])
    for origin in ({"made_by": object()}, [3]):  # a manifest that cannot be written, or read
        with pytest.raises(TypeError):
            write_store(tmp_path / "store", random_samples(3), origin=origin)
    with says("mode is 'w'; choose one of new, resume, append"):
        StoreWriter(tmp_path / "store", mode="w", **PIXELS)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "shard-99999.arrayrecord").write_bytes(b"half")
    with StoreWriter(tmp_path / "store", **PIXELS) as writer:
        writer.add(*random_samples(1)[0])
        assert not (tmp_path / "store").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert not (tmp_path / "store" / "shard-99999.arrayrecord").exists()


def make_used_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("make", "name", "said"),
    [
        (make_used_folder, "store", ["exists", "remove"]),
        (Path.touch, "store", ["exists", "remove"]),
        (make_used_folder, "store.partial", ["notes.txt: would be overwritten"]),
    ],
)
def test_what_is_in_the_way_is_refused_and_left_alone(tmp_path, make, name, said):
    make(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with says(tmp_path / name, *said):
        StoreWriter(tmp_path / "store", **PIXELS)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_current_folder_is_written_if_it_is_empty_and_a_mount_point_refused(
    tmp_path, monkeypatch
):
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path / "store")
    write_store(Path(), random_samples(1))
    assert MANIFEST_NAME in [path.name for path in Path().iterdir()]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    (tmp_path / "root").symlink_to("/")
    for name in ("/", tmp_path / "root"):
        with says("/", "is a mount point; name a folder in it"):
            partial_folder(Path(name))


@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_written_where_it_leads(tmp_path, there):
    """Beside the link, the shards might lie on another file system, from which none is moved."""
    (tmp_path / "large").mkdir()
    if there:
        (tmp_path / "large" / "store").mkdir()
    (tmp_path / "link").symlink_to("large/store")
    assert partial_folder(tmp_path / "link") == tmp_path / "large" / "store.partial"
    manifest = read_manifest(write_store(tmp_path / "link", random_samples(1)))
    assert (len(manifest), (tmp_path / "link").is_symlink()) == (1, True)


def zeros(*shape, dtype=np.float32, at=None, value=np.nan):
    array = np.zeros(shape, dtype)
    if at is not None:
        array[at] = value
    return array


LATENTS = zeros(1, 4, 4, 3)
CLASSES = {"condition": np.array([2**31 - 1])}
TEXT = {"condition": zeros(2, 6)}
IMAGES = {"given": zeros(1, 4, 4, 3) + 1, "image": zeros(5, 7)}
PARTS = {"glyphs": zeros(2, 5), "audio": zeros(1, 3)}


def parts(**changes):
    return TEXT | {"parts": PARTS}, {"parts": PARTS | changes}


def another(*text):
    return TEXT | {"parts": PARTS}, {"alternatives": [text]}


REFUSED = [
    # Latents.
    (TEXT, {"latents": zeros(1, 4, 2, 3)}, "latents have shape (1, 4, 2, 3); size (1, 4, 4)"),
    (TEXT, {"latents": zeros(1, 4, 4)}, "latents have shape"),
    (TEXT, {"latents": LATENTS.astype(np.uint8)}, "latents are uint8; give floats, such as x / 1"),
    *(
        (TEXT, {"latents": zeros(1, 4, 4, 3, dtype=dtype, at=(0, 1, 0, 2), value=value)}, words)
        for dtype, value, words in (
            (np.float16, np.nan, "latents hold nan at [0, 1, 0, 2] and 1 values"),
            (ml_dtypes.bfloat16, -np.inf, "latents hold -inf at"),
        )
    ),
    # Classes, texts, captions, paths.
    (CLASSES, {"condition": np.array([2**31])}, f"a label is {2**31}"),
    (CLASSES, {"condition": np.array([0, -1])}, "a label is -1"),
    (CLASSES, {"condition": zeros(1)}, "labels are float32"),
    (CLASSES, TEXT, "condition is text of width 6; the previous samples have classes"),
    (TEXT, CLASSES, "previous samples have text of width 6"),
    (TEXT, {"condition": zeros(3, 7)}, "previous samples have text of width 6"),
    (TEXT, {"condition": zeros(3, 6, dtype=int)}, "text is int64"),
    (TEXT, {"condition": zeros(1, 3, 6)}, "condition has shape (1, 3, 6)"),
    (TEXT, {"condition": zeros(2, 6, at=(1, 2), value=np.inf)}, "text hold inf at [1, 2]"),
    (TEXT, {"caption": float("nan")}, "caption is nan; give text"),
    (TEXT, {"path": 3}, "path is 3"),
    (TEXT, {"weight": 0}, "weight is 0; it must be from 0.001 to 1000"),
    (TEXT, {"weight": float("nan")}, "weight is nan; it must"),
    (TEXT, {"dropout": 2}, "caption_dropout is 2; it must be from 0 to 1"),
    # Given frames and images.
    (TEXT | IMAGES, {"given": zeros(1, 2, 4, 3)}, "given has shape (1, 2, 4, 3)"),
    (TEXT | IMAGES, {"given": zeros(1, 4, 4, 3, dtype=int)}, "given is int64; give floats"),
    (TEXT | IMAGES, {"given": LATENTS * np.nan}, "given hold nan"),
    (TEXT | IMAGES, {"given": None}, "given is none; the previous samples have 3 channels"),
    (TEXT | IMAGES, {"image": zeros(7)}, "image has shape (7,)"),
    (TEXT | IMAGES, {"image": zeros(4, 7)}, "image is 4 embeddings of width 7; the previous"),
    # Tokens of further kinds, and further texts.
    (*parts(glyphs=zeros(2, 4)), "parts is"),
    (TEXT | {"parts": PARTS}, {"parts": {"glyphs": zeros(2, 5)}}, "parts is"),
    (*parts(glyphs=zeros(5)), "glyphs has shape (5,)"),
    (*parts(glyphs=zeros(2, 5, dtype=int)), "of int64; it must be [tokens, width] of floats"),
    (*parts(glyphs=zeros(1, 5, at=0)), "glyphs hold nan"),
    (*parts(latents=zeros(1, 3)), "'latents' cannot name condition tokens"),
    (*parts(**{"a.1": zeros(1, 3)}), "'a.1' cannot name"),
    (*another(zeros(1, 3), None), "one of its texts has shape (1, 3), the first has (2, 6)"),
    (*another(zeros(2, 6, at=0), None), "text.1 hold nan"),
    (*another(zeros(2, 6), 7), "caption is 7"),
    (*another(zeros(1, 6), "b", {"glyphs": zeros(2, 4)}), "a width of 4, the first has a width of"),
    (*another(zeros(1, 6), "b", {"other": zeros(2, 4)}), "the first has none"),
    (*another(zeros(1, 6), "b", {"glyphs": zeros(2, 5, at=0)}), "glyphs.1 hold nan"),
]


@pytest.mark.parametrize(("first", "changes", "words"), REFUSED)
def test_a_sample_that_cannot_be_stored_is_refused_and_spoils_no_others(
    tmp_path, first, changes, words
):
    good = {"latents": LATENTS, "size": (1, 4, 4)} | first
    with StoreWriter(tmp_path / "store", samples_per_shard=2, **PIXELS) as writer:
        writer.add(**good)
        with pytest.raises(ValueError, match=r"path is|sample 1: ") as error:
            writer.add(**good | changes)
        writer.add(**good)
    assert words in str(error.value)
    reader = StoreReader(read_manifest(tmp_path / "store"))
    assert len(reader.manifest) == 2
    for number in range(2):
        arrays = reader.read(number)
        np.testing.assert_array_equal(arrays["latents"], LATENTS)
        if first is CLASSES:
            assert arrays["labels"].dtype == np.int32
            assert arrays["labels"].tolist() == [2**31 - 1]


def test_channels_that_do_not_stand_last_are_recognised(tmp_path):
    for channels, axis, order, after in (
        (3, 0, "[channels, frames", 0),
        (16, 1, "[frames, channels", 1),
        (48, 0, "[channels", 0),
        (49, 0, "[channels", 1),
        (49, 0, None, 0),
    ):
        latents = zeros(5, 8, 9, channels)
        labels, size = np.zeros(1, np.int32), (5, 8, 9)
        with StoreWriter(tmp_path / f"{channels} {after}", **PIXELS) as writer:
            for _ in range(after):
                writer.add(latents, labels, size)
            hint = [order, f"np.moveaxis(latents, {axis}, -1)"] if order else []
            with says("latents have shape", *hint, kind=ValueError) as error:
                writer.add(np.moveaxis(latents, -1, axis), labels, size)
        assert ("channels last" in str(error.value)) == bool(order)


def place_of(manifest, sample):
    return manifest.shard[sample], f"record {manifest.index[sample]}", f"sample {sample}"


def read_or_name_the_record(reader, samples):
    """Which samples are whole; the others must be refused by name."""
    whole = []
    for number, sample in enumerate(samples):
        try:
            assert_holds(reader.read(number), sample)
            whole.append(number)
        except BadRecordError as error:
            assert "\n" not in str(error)  # noqa: PT017  both outcomes are right
            assert all(part in str(error) for part in place_of(reader.manifest, number))  # noqa: PT017
    return whole


def test_a_flipped_byte_is_never_read_as_data(store, samples):
    manifest = read_manifest(store)
    shard = store / manifest.shard[0]
    elsewhere = {n for n in range(len(samples)) if manifest.shard[n] != shard.name}
    written = np.flatnonzero(np.frombuffer(shard.read_bytes(), np.uint8))
    lost = set()
    for position in np.random.default_rng(0).choice(written, 30, replace=False).tolist():
        flip_byte(shard, position)
        reader = StoreReader(manifest)
        whole = read_or_name_the_record(reader, samples)
        assert elsewhere <= set(whole)
        assert read_or_name_the_record(reader, samples) == whole
        lost |= set(range(len(samples))) - set(whole)
        reader.close()
        flip_byte(shard, position)
    assert lost == set(range(len(samples))) - elsewhere


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("height", 8), ("frames", 2), ("text_length", 5), ("checksum", 1)),
        *(("index", 2), ("index", 2**40), ("shard", "shard-00001.arrayrecord")),
    ],
)
def test_a_row_that_disagrees_with_its_record_is_a_bad_record(store, samples, name, value):
    def replace_first(table):
        column = table.column_names.index(name)
        values = [value, *table[name].to_pylist()[1:]]
        return table.set_column(column, name, pa.array(values, table.schema.field(name).type))

    change_manifest(store, replace_first)
    reader = StoreReader(read_manifest(store))
    with says(*place_of(reader.manifest, 0), kind=BadRecordError):
        reader.read(0)
    assert_holds(reader.read(1), samples[1])


def test_a_record_in_another_format_is_a_bad_record(store):
    data = b"no safetensors"
    manifest = read_manifest(store)
    manifest = dataclasses.replace(manifest, checksum=np.full(len(manifest), zlib.crc32(data)))
    path = str(store / manifest.shard[0])
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    writer.write(data)
    writer.close()
    with says(*place_of(manifest, 0), kind=BadRecordError):
        StoreReader(manifest).read(0)


def test_values_that_are_not_finite_are_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("alload_jax.data.store.shard._require_finite", lambda *_: None)
    with StoreWriter(tmp_path, **PIXELS) as writer:
        for value in (0, np.nan, -np.inf):
            latents = zeros(1, 4, 4, 3, at=(0, 2, 1, 0), value=value)
            writer.add(latents, np.zeros(1, np.int32), (1, 4, 4))
    reader = StoreReader(read_manifest(tmp_path))
    reader.read(0)
    for number in (1, 2):
        with pytest.raises(BadRecordError, match="holds latents with NaN or infinite values"):
            reader.read(number)
