"""Stores that are interrupted, continued, appended to, written in parallel and merged."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from array_record.python import array_record_module
from data_helpers import (
    assert_holds,
    assert_says,
    change_manifest,
    flip_byte,
    random_samples,
    write_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.datasets.digits import Digits
from alload_jax.data.manifest import (
    MANIFEST_NAME,
    manifest_metadata,
    read_captions,
    read_manifest,
    read_rows,
)
from alload_jax.data.store import (
    ShardWriter,
    StoreReader,
    StoreWriter,
    damaged_records,
    finish_store,
    is_finished,
    merge_stores,
)
from alload_jax.data.store import writer as merging
from alload_jax.errors import InputError

PIXELS = {"vae_stride": (1, 1, 1)}


def content(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def assert_store_holds(folder, samples):
    manifest = read_manifest(folder)
    reader = StoreReader(manifest)
    assert len(manifest) == len(samples)
    for number, sample in enumerate(samples):
        assert_holds(reader.read(number), sample)
    reader.close()
    assert list(damaged_records(StoreReader(manifest))) == []
    assert not folder.with_name(folder.name + ".partial").exists()
    assert {path.name for path in folder.iterdir()} == {*manifest.shard_bytes, MANIFEST_NAME}


def go_on(folder, samples, mode="resume", **options):
    """Writes the samples that are missing; returns how many were there."""
    with StoreWriter(folder, mode=mode, **PIXELS, **options) as writer:
        before = writer.written
        for sample in samples[before:]:
            writer.add(*sample)
    return before


def fail_after(folder, samples, mode="new", **options):
    def write_and_fail():
        with StoreWriter(folder, mode=mode, **PIXELS, **options) as writer:
            for sample in samples[writer.written :]:
                writer.add(*sample)
            raise RuntimeError("the next clip")

    with pytest.raises(RuntimeError, match="the next clip") as error:
        write_and_fail()
    return error.value


# ---------------------------------------------------------------- interrupted


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 4))
def test_a_writer_that_failed_goes_on_to_the_same_bytes(stops, samples_per_shard):
    samples = random_samples(9)
    with tempfile.TemporaryDirectory() as folder:
        options = {"samples_per_shard": samples_per_shard, "origin": {"made": (1, 2)}}
        whole = write_store(Path(folder) / "whole", samples, **options)
        store = Path(folder) / "store"
        for stop in sorted(stops):
            fail_after(store, samples[:stop], mode="resume", **options)
        assert go_on(store, samples, **options) == max([0, *stops])
        assert content(store) == content(whole)
        assert_store_holds(store, samples)


KILLED = """
import os, signal, sys
import numpy as np
from alload_jax.data.store import StoreWriter
with StoreWriter(sys.argv[1], vae_stride=(1, 1, 1), samples_per_shard=2, mode="resume") as writer:
    for n in range(writer.written, int(sys.argv[2])):
        writer.add(np.full((1, 2, 2, 1), n, np.float16), np.array([n]), (1, 2, 2))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def numbered_samples(numbers):
    for n in numbers:
        yield np.full((1, 2, 2, 1), n, np.float16), np.array([n]), (1, 2, 2)


def test_a_writer_that_was_killed_goes_on_to_the_same_bytes(tmp_path):
    whole = write_store(tmp_path / "whole", numbered_samples(range(9)), samples_per_shard=2)
    store = tmp_path / "store"
    for stop in (5, 8):
        command = [sys.executable, "-c", KILLED, str(store), str(stop)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert not store.exists()
    assert go_on(store, list(numbered_samples(range(9))), samples_per_shard=2) == 8
    assert content(store) == content(whole)


def test_a_killed_finish_goes_on(tmp_path, monkeypatch):
    samples = random_samples(5)
    whole = write_store(tmp_path / "whole", samples, samples_per_shard=2)
    for name in ("rename", "replace", "unlink"):
        store = tmp_path / name
        fail_after(store, samples, samples_per_shard=2)
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, stop_here)
            with pytest.raises(SystemExit):
                finish_store(store)
        finish_store(store)
        assert content(store) == content(whole)
        assert_store_holds(store, samples)


def stop_here(*_, **__):
    raise SystemExit


@pytest.mark.parametrize("name", ["replace", "rmdir", "unlink"])
@pytest.mark.parametrize("call", range(4))
def test_a_killed_append_never_breaks_the_store(tmp_path, monkeypatch, name, call):
    samples = random_samples(5)
    store = write_store(tmp_path / "store", samples[:2])
    old = read_manifest(store)
    fail_after(store, samples, mode="append", samples_per_shard=2)
    calls, real = [], getattr(Path, name)

    def stop_later(*arguments, **options):
        calls.append(arguments)
        return real(*arguments, **options) if len(calls) <= call else stop_here()

    with monkeypatch.context() as patch:
        patch.setattr(Path, name, stop_later)
        try:
            finish_store(store)
        except SystemExit:
            assert len(read_manifest(store)) in (2, 5)
    assert list(damaged_records(StoreReader(old))) == []
    finish_store(store)
    assert_store_holds(store, samples)


def test_full_shards_are_closed_by_their_bytes(tmp_path):
    store = write_store(tmp_path / "store", random_samples(6), bytes_per_shard=1)
    assert len(read_manifest(store).shard_bytes) == 6


@pytest.fixture
def interrupted(tmp_path):
    """A store of which five samples in shards of two are kept, and the note of the error."""
    store, options = tmp_path / "store", {"samples_per_shard": 2, "origin": {"made": "here"}}
    (note,) = fail_after(store, random_samples(5), **options).__notes__
    return store, note


def test_a_failure_says_what_is_kept_and_how_to_go_on_which_is_not_by_beginning(interrupted):
    store, note = interrupted
    for part in (store, "5 samples are kept", "store.partial", "mode='resume'"):
        assert str(part) in note
    assert [path.name for path in store.parent.iterdir()] == ["store.partial"]
    kept = content(store.parent / "store.partial")
    with pytest.raises(InputError) as error:
        StoreWriter(store, **PIXELS)
    assert_says(error, store.parent / "store.partial", "5 samples", 'mode="resume"', "remove")
    assert content(store.parent / "store.partial") == kept


@pytest.mark.parametrize(
    ("change", "named"),
    [({"vae_stride": (4, 8, 8)}, "vae_stride"), ({"origin": {"made": "elsewhere"}}, "origin")],
)
def test_a_writer_of_another_kind_cannot_go_on(interrupted, change, named):
    with pytest.raises(InputError) as error:
        StoreWriter(interrupted[0], mode="resume", **PIXELS | change)
    assert_says(error, named, "another folder", *change.values())


def test_a_writer_goes_on_with_samples_like_those_kept_and_with_files_of_the_users(interrupted):
    store, _ = interrupted
    (store.parent / "store.partial" / "report.parquet").write_bytes(b"mine")
    with StoreWriter(store, mode="resume", **PIXELS) as writer:
        with pytest.raises(ValueError, match="sample 5: latents have shape"):
            writer.add(*random_samples(1, channels=3)[0])
        with pytest.raises(ValueError, match="sample 5: condition is text of width 8"):
            writer.add(np.zeros((1, 2, 2, 1), np.float16), np.zeros((1, 8), np.float16), (1, 2, 2))
        writer.add(*random_samples(6)[5])
    assert (store / "report.parquet").read_bytes() == b"mine"
    assert len(read_manifest(store)) == 6


def test_a_missing_shard_or_a_damaged_record_is_named_where_a_writer_goes_on(interrupted, tmp_path):
    store, _ = interrupted
    shard = tmp_path / "store.partial" / "shard-00002.arrayrecord"
    other = write_store(tmp_path / "other", random_samples(5, seed=1), samples_per_shard=2)
    assert shard.stat().st_size == (other / shard.name).stat().st_size
    shutil.copy(other / shard.name, shard)
    with (
        pytest.raises(InputError, match="record 0 is damaged"),
        StoreWriter(store, mode="resume", **PIXELS),
    ):
        pass
    (tmp_path / "store.partial" / "shard-00001.arrayrecord").unlink()
    with pytest.raises(InputError) as error:
        StoreWriter(store, mode="resume", **PIXELS)
    assert_says(error, "shard 1 is not finished", "remove")


def test_interrupted_digits_go_on(tmp_path, monkeypatch):
    digits = Digits(mix=((1, 8, 8, 5), (5, 8, 16, 2)))
    digits.write(tmp_path / "whole")
    add, added = StoreWriter.add, []

    def add_four(*arguments):
        if len(added) == 4:
            raise KeyboardInterrupt
        added.append(add(*arguments))

    monkeypatch.setattr(StoreWriter, "add", add_four)
    with pytest.raises(KeyboardInterrupt):
        digits.write(tmp_path / "store")
    monkeypatch.setattr(StoreWriter, "add", add)
    digits.write(tmp_path / "store")
    assert content(tmp_path / "store") == content(tmp_path / "whole")


# ---------------------------------------------------------------- appended


def test_appended_samples_follow_in_new_shards(tmp_path):
    samples = random_samples(9)
    store = write_store(tmp_path / "store", samples[:5], samples_per_shard=2, origin={"fps": 16})
    old, before = read_manifest(store), content(store)
    assert go_on(store, samples, "append", samples_per_shard=2) == 5
    assert_store_holds(store, samples)
    assert read_manifest(store).origin == {"fps": 16}
    before.pop(MANIFEST_NAME)
    assert content(store).items() >= before.items()
    assert list(damaged_records(StoreReader(old))) == []


def test_an_append_that_failed_goes_on_and_nothing_appended_changes_nothing(tmp_path):
    samples = random_samples(9)
    stores = [write_store(tmp_path / name, samples[:3]) for name in "ab"]
    assert "mode='append'" in fail_after(stores[0], samples[:6], mode="append").__notes__[0]
    assert len(read_manifest(stores[0])) == 3
    for store in stores:
        go_on(store, samples, "append")
    before = content(stores[0])
    assert before == content(stores[1])
    assert_store_holds(stores[0], samples)
    assert go_on(stores[0], [], "append") == 9
    assert content(stores[0]) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    stores[0].joinpath(MANIFEST_NAME).unlink()
    for mode in ("resume", "append"):  # what is no store
        with pytest.raises(InputError, match="exists already"):
            StoreWriter(stores[0], mode=mode, **PIXELS)


# ---------------------------------------------------------------- in parallel


def parts_of(samples, size):
    return [samples[begin : begin + size] for begin in range(0, len(samples), size)]


def write_shard(folder, number, part, **options):
    with ShardWriter(folder, number, **PIXELS, **options) as shard:
        for sample in part:
            shard.add(*sample)
    return shard


@settings(max_examples=3, deadline=None)
@given(st.permutations(range(5)))
def test_shards_of_any_order_make_the_same_store(order):
    samples = random_samples(9)
    with tempfile.TemporaryDirectory() as folder:
        whole = write_store(Path(folder) / "whole", samples, samples_per_shard=2)
        store = Path(folder) / "store"
        parts = parts_of(samples, 2)
        for number in order:
            assert not is_finished(store, number)
            assert write_shard(store, number, parts[number]).written == len(parts[number])
            assert is_finished(store, number)
        assert finish_store(store, shards=5) == store / MANIFEST_NAME
        assert all(is_finished(store, number) for number in range(5))
        assert content(store) == content(whole)
        assert finish_store(store, shards=5) == store / MANIFEST_NAME


@pytest.mark.parametrize("late", [random_samples(3), random_samples(3, seed=1)])
def test_a_shard_that_is_written_again_is_replaced_where_it_differs(tmp_path, late):
    store, first = tmp_path / "store", random_samples(3)
    one, two = (ShardWriter(store, 0, **PIXELS) for _ in range(2))  # which do not disturb
    for sample in first:
        one.add(*sample)
        two.add(*sample)
    for writer in (one, two):
        writer.finish()
        assert is_finished(store, 0)
    shard = tmp_path / "store.partial" / "shard-00000.arrayrecord"
    before = shard.stat().st_ino
    write_shard(store, 0, late)
    assert (shard.stat().st_ino == before) == np.array_equal(late[0].latents, first[0].latents)
    assert len(list(shard.parent.iterdir())) == 2
    written = shard.read_bytes()
    shard.write_bytes(written[:-1])
    assert not is_finished(store, 0)
    shard.write_bytes(written)
    finish_store(store)
    assert_store_holds(store, late)


def test_a_failed_shard_leaves_nothing(tmp_path):
    def write_and_fail():
        with ShardWriter(tmp_path / "store", 3, **PIXELS) as shard:
            shard.add(*random_samples(1)[0])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert list((tmp_path / "store.partial").iterdir()) == []
    assert not is_finished(tmp_path / "store", 3)
    with pytest.raises(InputError, match="no finished shard"):
        finish_store(tmp_path / "store")


def test_a_shard_without_samples_counts(tmp_path):
    store, samples = tmp_path / "store", random_samples(4)
    for number, part in enumerate(([], samples, [])):
        write_shard(store, number, part)
    finish_store(store, shards=3)
    assert_store_holds(store, samples)


@pytest.mark.parametrize(
    ("shards", "named"),
    [(3, "shard 1 is not finished (1 of 3"), (4, "shard 1 is not"), (1, "holds shard 2, but 1")],
)
def test_gaps_are_refused(tmp_path, shards, named):
    for number in (0, 2):
        write_shard(tmp_path / "store", number, random_samples(1))
    with pytest.raises(InputError) as error:
        finish_store(tmp_path / "store", shards=shards)
    assert_says(error, named, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("sample", "options", "named"),
    [
        (random_samples(1, channels=3)[0], {}, "channels is 3, but 1"),
        ((np.zeros((1, 2, 2, 1), "f2"), np.zeros((1, 8), "f2"), (1, 2, 2)), {}, "text of width 8"),
        (random_samples(1)[0], {"origin": {"vae": "wan"}}, "origin is {'vae': 'wan'}"),
    ],
)
def test_shards_that_disagree_are_refused(tmp_path, sample, options, named):
    write_shard(tmp_path / "store", 0, random_samples(1))
    write_shard(tmp_path / "store", 1, [sample], **options)
    with pytest.raises(InputError) as error:
        finish_store(tmp_path / "store")
    assert_says(error, named, "shard-00000", "shard-00001")


def test_shards_are_added_to_a_store(store, samples):
    write_shard(store, 3, random_samples(2, seed=1))
    assert len(read_manifest(store)) == 11
    finish_store(store, shards=4)
    assert_store_holds(store, [*samples, *random_samples(2, seed=1)])


def test_a_full_disk_is_an_os_error(tmp_path):
    shard = ShardWriter(tmp_path / "store", 0, **PIXELS)
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    shard._writer = record_writer(full)
    shard.add(*random_samples(1)[0])
    with pytest.raises(OSError, match="No space left on device"):
        shard.finish()
    assert not is_finished(tmp_path / "store", 0)


def record_writer(path):
    return array_record_module.ArrayRecordWriter(str(path), "group_size:1")


# ---------------------------------------------------------------- merged


@pytest.fixture(params=["link", "copy"])
def copies(request, monkeypatch):
    def no_link(*_):
        raise OSError("another file system")

    if request.param == "copy":
        monkeypatch.setattr(merging.os, "link", no_link)


@pytest.mark.usefixtures("copies")
def test_merged_stores_hold_all_samples_in_order(tmp_path):
    samples = random_samples(11)
    parts = [samples[:4], samples[4:6], samples[6:]]
    sources = [
        write_store(tmp_path / f"part{n}", part, samples_per_shard=2, origin={"part": n, "fps": 8})
        for n, part in enumerate(parts)
    ]
    before = [content(source) for source in sources]
    assert merge_stores(sources, tmp_path / "all") == tmp_path / "all" / MANIFEST_NAME
    assert_store_holds(tmp_path / "all", samples)
    whole = write_store(tmp_path / "whole", samples, samples_per_shard=2)
    shards = content(whole)
    del shards[MANIFEST_NAME]
    assert content(tmp_path / "all").items() >= shards.items()
    origin = read_manifest(tmp_path / "all").origin
    assert origin == {"fps": 8, "merged": [{"part": n, "fps": 8} for n in range(3)]}
    assert [content(source) for source in sources] == before
    shutil.rmtree(sources[0])
    go_on(tmp_path / "all", [*samples, samples[0]], "append")
    assert_store_holds(tmp_path / "all", [*samples, samples[0]])
    assert [content(source) for source in sources[1:]] == before[1:]


def one_sample(folder, channels=1, text=None, stride=(1, 1, 1), **options):
    size = tuple(stride)
    condition = np.zeros(1, np.int32) if text is None else np.zeros((1, text), np.float16)
    with StoreWriter(folder, vae_stride=stride, **options) as writer:
        writer.add(np.zeros((1, 1, 1, channels), np.float16), condition, (1, *size[1:]))
    return folder


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"channels": 16}, "channels is 16, but 1"),
        ({"text": 8}, "condition is text of width 8, but classes"),
        ({"stride": (4, 8, 8)}, "vae_stride is (4, 8, 8), but (1, 1, 1)"),
        ({"origin": {"vae": "wan"}}, "origin's vae is wan, but None"),
    ],
)
def test_stores_that_differ_are_not_merged(tmp_path, options, named):
    sources = [one_sample(tmp_path / "a"), one_sample(tmp_path / "b", **options)]
    with pytest.raises(InputError) as error:
        merge_stores(sources, tmp_path / "all")
    assert_says(error, named, *sources)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_what_cannot_be_merged_is_refused(tmp_path):
    a, b = (one_sample(tmp_path / name) for name in "ab")
    for sources, named in (([a], "at least two"), ([a, tmp_path / "." / "a"], "given twice")):
        with pytest.raises(InputError, match=named):
            merge_stores(sources, tmp_path / "all")
    with pytest.raises(InputError, match="exists already"):
        merge_stores([a, b], a)
    with pytest.raises(InputError, match="no such manifest"):
        merge_stores([a, tmp_path / "none"], tmp_path / "all")


# ---------------------------------------------------------------- refused samples


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.float16, np.nan), (np.float32, np.inf), (ml_dtypes.bfloat16, -np.inf)],
)
def test_values_that_are_not_finite_are_refused(tmp_path, dtype, value):
    good, bad = np.zeros((1, 2, 2, 1), dtype), np.zeros((1, 2, 2, 1), dtype)
    text, bad_text = np.zeros((2, 3), dtype), np.zeros((2, 3), dtype)
    bad[0, 1, 0, 0] = bad_text[1, 2] = value
    with StoreWriter(tmp_path / "store", **PIXELS) as writer:
        writer.add(good, text, (1, 2, 2))
        for given, words in (
            ((bad, text), r"sample 1: latents hold .* at \[0, 1, 0, 0\]"),
            ((good, bad_text), r"sample 1: text hold .* at \[1, 2\]"),
            ((np.float32(1), text), "sample 1: latents have shape"),
            ((good.astype(np.uint8), text), r"latents are uint8.*x / 127.5 - 1"),
            ((good.astype(np.bool_), text), r"latents are bool.*x / 127.5 - 1"),
        ):
            with pytest.raises(ValueError, match=words):
                writer.add(*given, (1, 2, 2))
    assert len(read_manifest(tmp_path / "store")) == 1


@pytest.mark.parametrize(
    ("channels", "axis", "order", "after"),
    [(3, 0, "[channels, frames", 0), (16, 1, "[frames, channels", 1), (48, 0, "[channels", 1)],
)
def test_channels_that_do_not_stand_last_are_recognised(tmp_path, channels, axis, order, after):
    latents = np.zeros((5, 8, 9, channels), np.float16)
    labels, size = np.zeros(1, np.int32), (5, 8, 9)
    with StoreWriter(tmp_path / "store", **PIXELS) as writer:
        for _ in range(after):
            writer.add(latents, labels, size)
        with pytest.raises(ValueError, match="channels last") as error:
            writer.add(np.moveaxis(latents, -1, axis), labels, size)
        assert_says(error, order, f"np.moveaxis(latents, {axis}, -1)")
        with pytest.raises(ValueError, match="latents have shape") as error:
            writer.add(np.zeros((70, 5, 8, 9), np.float16), labels, size)
        assert "channels last" not in str(error.value)


# ---------------------------------------------------------------- captions


def test_captions_are_kept(tmp_path):
    store = tmp_path / "store"
    captions = ["a cat", None, "ein Hund, 猫\nund mehr"]
    with StoreWriter(store, samples_per_shard=2, **PIXELS) as writer:
        for sample, caption in zip(random_samples(3), captions, strict=True):
            writer.add(*sample, caption=caption)
    assert read_captions(store) == captions
    merge_stores([store, write_store(tmp_path / "more", random_samples(1))], tmp_path / "all")
    assert read_captions(tmp_path / "all") == [*captions, None]


def test_manifests_without_captions_are_read(store, samples):
    path = store / MANIFEST_NAME
    change_manifest(store, lambda table: table.drop_columns(["caption"]))
    assert read_captions(store) == [None] * len(samples)
    assert read_rows(store)["caption"].null_count == len(samples)
    with StoreWriter(store, mode="append", **PIXELS) as writer:
        writer.add(*samples[0], caption="again")
    assert read_captions(store) == [None] * len(samples) + ["again"]
    assert manifest_metadata(path)["vae_stride"] == [1, 1, 1]
    assert_store_holds(store, [*samples, samples[0]])


def test_damaged_records_are_named(store):
    manifest = read_manifest(store)
    shard = store / manifest.shard[5]
    written = np.flatnonzero(np.frombuffer(shard.read_bytes(), np.uint8))
    flip_byte(shard, written[len(written) // 2])
    lines = list(damaged_records(StoreReader(manifest)))
    assert lines
    assert all(str(shard) in line and "(sample " in line for line in lines)
