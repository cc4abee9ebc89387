import dataclasses
import math
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from array_record.python import array_record_module
from data_helpers import (
    assert_holds,
    assert_says,
    change_manifest,
    flip_byte,
    random_sample,
    random_samples,
    write_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data import record
from alload_jax.data.manifest import MANIFEST_NAME, read_manifest, read_rows
from alload_jax.data.store import BadRecordError, StoreReader, StoreWriter
from alload_jax.errors import InputError


def latent_grid(size, stride):
    frames, height, width = size
    return (
        1 + math.ceil((frames - 1) / stride[0]),
        math.ceil(height / stride[1]),
        math.ceil(width / stride[2]),
    )


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


# ---------------------------------------------------------------- writing


@settings(max_examples=20, deadline=None)
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
        for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            assert_holds(reader.read(number), sample)
            assert (row["frames"], row["height"], row["width"]) == sample.size
            assert row["channels"] == sample.latents.shape[-1]
            assert row["text_length"] == len(sample.labels)
            data = record_bytes(store, row)
            assert row["checksum"] == zlib.crc32(data)
            assert_holds(record.decode(data), sample)


@pytest.mark.parametrize(("count", "samples_per_shard"), [(4, 4), (5, 4), (3, 1)])
def test_shards_are_filled_one_after_the_other(tmp_path, count, samples_per_shard):
    store = write_store(
        tmp_path / "store", random_samples(count), samples_per_shard=samples_per_shard
    )
    rows = read_rows(store).to_pylist()
    shards = sorted({row["shard"] for row in rows})
    assert len(shards) == math.ceil(count / samples_per_shard)
    assert {path.name for path in store.iterdir()} == {*shards, MANIFEST_NAME}
    places = [(shards.index(row["shard"]), row["index"]) for row in rows]
    assert places == [divmod(number, samples_per_shard) for number in range(count)]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_before_the_first_sample_leaves_nothing(tmp_path, error):
    with pytest.raises(error), StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)):
        raise error
    with pytest.raises(TypeError):  # a manifest that cannot be written
        write_store(tmp_path / "store", random_samples(3), origin={"made_by": object()})
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_at_the_end_and_what_a_killed_writer_left_is_replaced(tmp_path):
    (tmp_path / "store.partial").mkdir()
    (tmp_path / "store.partial" / "shard-99999.arrayrecord").write_bytes(b"half")
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)) as writer:
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
    with pytest.raises(InputError) as error:
        StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1))
    assert_says(error, tmp_path / name, *said)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    if make is make_used_folder:
        assert (tmp_path / name / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [
        ((1, 8, 8, 1), (1, 8, 4), (1, 1, 1)),
        ((1, 8, 8), (1, 8, 8), (1, 1, 1)),
        ((1, 1, 8, 8, 1), (1, 8, 8), (1, 1, 1)),
        ((5, 8, 8, 16), (5, 64, 64), (4, 8, 8)),
        ((1, 8, 8, 16), (5, 64, 64), (4, 8, 8)),
        ((2, 8, 9, 16), (5, 64, 64), (4, 8, 8)),
    ],
)
def test_latents_of_a_wrong_shape_are_refused(tmp_path, shape, size, stride):
    with (
        StoreWriter(tmp_path / "store", vae_stride=stride) as writer,
        pytest.raises(ValueError, match="latents have shape") as error,
    ):
        writer.add(np.zeros(shape, np.float16), np.zeros(1, np.int32), size)
    assert_says(error, shape, size, stride)


def test_a_refused_sample_does_not_spoil_the_others(tmp_path):
    samples = random_samples(4)
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1), samples_per_shard=2) as writer:
        for sample in samples:
            with pytest.raises(ValueError, match="latents have shape"):
                writer.add(sample.latents[0], sample.labels, sample.size)
            writer.add(*sample)
    reader = StoreReader(read_manifest(tmp_path / "store"))
    for number, sample in enumerate(samples):
        assert_holds(reader.read(number), sample)


# ---------------------------------------------------------------- reading


def test_many_threads_share_a_reader_that_is_closed_meanwhile(store, samples):
    reader = StoreReader(read_manifest(store))

    def read(number):
        if number % 10 == 0:
            reader.close()
            reader.close()
        return reader.read(number % len(samples))

    with ThreadPoolExecutor(8) as pool:
        for number, arrays in enumerate(pool.map(read, range(300))):
            assert_holds(arrays, samples[number % len(samples)])


# ---------------------------------------------------------------- damage


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


def flipped_positions(shard, count):
    written = np.flatnonzero(np.frombuffer(shard.read_bytes(), np.uint8))
    return np.random.default_rng(0).choice(written, count, replace=False).tolist()


def test_a_flipped_byte_is_never_read_as_data(store, samples):
    manifest = read_manifest(store)
    shard = store / manifest.shard[0]
    elsewhere = {n for n in range(len(samples)) if manifest.shard[n] != shard.name}
    lost = set()
    for position in flipped_positions(shard, 40):
        flip_byte(shard, position)
        reader = StoreReader(manifest)
        whole = read_or_name_the_record(reader, samples)
        assert elsewhere <= set(whole)
        assert read_or_name_the_record(reader, samples) == whole
        lost |= set(range(len(samples))) - set(whole)
        reader.close()
        flip_byte(shard, position)
    assert lost == set(range(len(samples))) - elsewhere


@pytest.mark.parametrize("length", [None, 0, 1, 70_000])
def test_a_shard_removed_or_truncated_under_the_reader_is_a_bad_record(store, samples, length):
    manifest = read_manifest(store)
    shard = store / manifest.shard[0]
    content = shard.read_bytes()
    shard.unlink()
    if length is not None:
        shard.write_bytes(content[:length])
    whole = read_or_name_the_record(StoreReader(manifest), samples)
    assert whole == [n for n in range(len(samples)) if manifest.shard[n] != shard.name]


def replace_first(table, name, value):
    column = table.column_names.index(name)
    values = [value, *table[name].to_pylist()[1:]]
    return table.set_column(column, name, pa.array(values, table.schema.field(name).type))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("height", 8),
        ("frames", 2),
        ("text_length", 5),
        ("checksum", 1),
        ("index", 2),
        ("index", 2**40),
        ("shard", "shard-00001.arrayrecord"),
    ],
)
def test_a_row_that_disagrees_with_its_record_is_a_bad_record(store, samples, name, value):
    change_manifest(store, lambda table: replace_first(table, name, value))
    manifest = read_manifest(store)
    reader = StoreReader(manifest)
    with pytest.raises(BadRecordError) as error:
        reader.read(0)
    assert_says(error, *place_of(manifest, 0))
    assert_holds(reader.read(1), samples[1])


def test_a_record_in_another_format_is_a_bad_record(store):
    data = b"no safetensors"
    manifest = read_manifest(store)
    manifest = dataclasses.replace(manifest, checksum=np.full(len(manifest), zlib.crc32(data)))
    path = str(store / manifest.shard[0])
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    writer.write(data)
    writer.close()
    with pytest.raises(BadRecordError) as error:
        StoreReader(manifest).read(0)
    assert_says(error, *place_of(manifest, 0))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_damage(tmp_path, monkeypatch, value):
    monkeypatch.setattr("alload_jax.data.store.shard._require_finite", lambda *_: None)
    latents = np.zeros((1, 4, 4, 3), np.float32)
    with StoreWriter(tmp_path, vae_stride=(1, 1, 1)) as writer:
        writer.add(latents, np.zeros(1, np.int32), (1, 4, 4))
        latents[0, 2, 1, 0] = value
        writer.add(latents, np.zeros(1, np.int32), (1, 4, 4))
    reader = StoreReader(read_manifest(tmp_path))
    reader.read(0)
    with pytest.raises(BadRecordError, match="holds latents with NaN or infinite values"):
        reader.read(1)


@pytest.mark.parametrize(
    ("condition", "caption", "words"),
    [
        ([3, 2**40], None, f"a label is {2**40}"),
        ([2**31], None, f"a label is {2**31}"),
        ([0, -1], None, "a label is -1"),
        ([0], float("nan"), "caption is nan; give text"),
        ([0], 3, "caption is 3; give text"),
    ],
)
def test_labels_and_captions_of_other_kinds_are_refused_when_they_are_added(
    tmp_path, condition, caption, words
):
    latents = np.zeros((1, 4, 4, 3), np.float32)
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)) as writer:
        writer.add(latents, np.array([2**31 - 1]), (1, 4, 4), "one")
        with pytest.raises(ValueError, match="sample 1: ") as error:
            writer.add(latents, np.array(condition), (1, 4, 4), caption)
        writer.add(latents, np.array([5], np.uint8), (1, 4, 4))
    assert words in str(error.value)
    reader = StoreReader(read_manifest(tmp_path / "store"))
    labels = [reader.read(n)["labels"] for n in range(2)]
    assert [each.tolist() for each in labels] == [[2**31 - 1], [5]]
    assert {each.dtype for each in labels} == {np.dtype(np.int32)}
