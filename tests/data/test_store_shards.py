"""Stores that are interrupted, continued, appended to, written in parallel and merged."""

import itertools
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from array_record.python import array_record_module
from data_helpers import (
    assert_holds,
    change_manifest,
    contents,
    random_samples,
    says,
    write_and_fail,
    write_store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.manifest import MANIFEST_NAME, read_captions, read_manifest, read_rows
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
OF_TEXT = (np.zeros((1, 2, 2, 1), "f2"), np.zeros((1, 8), "f2"), (1, 2, 2))


def assert_store_holds(folder, samples):
    manifest = read_manifest(folder)
    reader = StoreReader(manifest)
    assert len(manifest) == len(samples)
    for number, sample in enumerate(samples):
        assert_holds(reader.read(number), sample)
    assert list(damaged_records(reader)) == []
    assert not folder.with_name(folder.name + ".partial").exists()
    assert {path.name for path in folder.iterdir()} == {*manifest.shard_bytes, MANIFEST_NAME}


def go_on(folder, samples, mode="resume", **options):
    """Writes the samples that are missing; returns how many were there."""
    with StoreWriter(folder, mode=mode, **PIXELS, **options) as writer:
        before = writer.written
        for sample in samples[before:]:
            writer.add(*sample)
    return before


@pytest.mark.parametrize(
    ("before", "name"),
    [
        *((None, "rename"), (None, "replace"), (None, "unlink")),
        *((0, "replace"), (0, "unlink")),  # into an empty folder
        *((2, "replace"), (2, "rmdir"), (2, "unlink")),
    ],
)
def test_a_killed_finish_or_append_goes_on_and_breaks_no_store(tmp_path, monkeypatch, before, name):
    samples, real, stopped = random_samples(5), getattr(Path, name), True
    for call in itertools.count():
        store, calls = tmp_path / str(call), []
        old = read_manifest(write_store(store, samples[:before])) if before else None
        if before == 0:
            store.mkdir()
        inode = before is not None and store.stat().st_ino
        write_and_fail(store, samples, "append" if before else "new", samples_per_shard=2)

        def stop_later(*arguments, calls=calls, call=call, **named):
            calls.append(arguments)
            if len(calls) > call:
                raise SystemExit
            return real(*arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(Path, name, stop_later)
            try:
                finish_store(store)
                stopped = False
            except SystemExit:
                assert not before or len(read_manifest(store)) in (2, 5)
        assert old is None or list(damaged_records(StoreReader(old))) == []
        if call % 2 and not (store / MANIFEST_NAME).exists():
            go_on(store, samples, samples_per_shard=2)
        finish_store(store)
        assert_store_holds(store, samples)
        assert inode in (False, store.stat().st_ino)
        if not stopped:  # it has not so many calls
            break
    assert call > 0


@pytest.fixture
def interrupted(tmp_path):
    """A store of which five samples in shards of two are kept, and the note of the error."""
    store, options = tmp_path / "store", {"samples_per_shard": 2, "origin": {"made": "here"}}
    (note,) = write_and_fail(store, random_samples(5), **options).__notes__
    return store, note


def test_a_failure_says_how_to_go_on_which_is_not_by_beginning_or_as_another_kind(interrupted):
    store, note = interrupted
    for part in (store, "5 samples are kept", "store.partial", "mode='resume'"):
        assert str(part) in note
    assert [path.name for path in store.parent.iterdir()] == ["store.partial"]
    kept = contents(store.parent)
    for options, named in (
        ({}, [store.parent / "store.partial", "5 samples", 'mode="resume"', "remove"]),
        ({"mode": "resume", "vae_stride": (4, 8, 8)}, ["vae_stride", "another folder", (4, 8, 8)]),
        ({"mode": "resume", "origin": {"made": "elsewhere"}}, ["origin", "elsewhere"]),
    ):
        with says(*named):
            StoreWriter(store, **PIXELS | options)
    assert contents(store.parent) == kept


def test_a_missing_shard_or_a_damaged_record_is_named_where_a_writer_goes_on(interrupted, tmp_path):
    store, _ = interrupted
    shard = tmp_path / "store.partial" / "shard-00002.arrayrecord"
    other = write_store(tmp_path / "other", random_samples(5, seed=1), samples_per_shard=2)
    assert shard.stat().st_size == (other / shard.name).stat().st_size
    shutil.copy(other / shard.name, shard)
    with pytest.raises(InputError, match="record 0 is damaged"):
        StoreWriter(store, mode="resume", **PIXELS).__enter__()
    (tmp_path / "store.partial" / "shard-00001.arrayrecord").unlink()
    with says("shard 1 is not finished", "remove"):
        StoreWriter(store, mode="resume", **PIXELS)


def test_appended_samples_follow_in_new_shards_also_after_a_failure(tmp_path):
    samples, options = random_samples(9), {"samples_per_shard": 2}
    a, b = (
        write_store(tmp_path / name, samples[:5], origin={"fps": 16}, **options) for name in "ab"
    )
    old, before = read_manifest(a), contents(a)
    error = write_and_fail(b, samples[:6], mode="append", **options)
    assert "mode='append'" in error.__notes__[0]
    assert contents(b) == before
    assert go_on(a, samples, "append", **options) == 5
    assert go_on(b, samples, "append", **options) == 6
    assert_store_holds(a, samples)
    assert contents(a) == contents(b)
    assert read_manifest(a).origin == {"fps": 16}
    before.pop(MANIFEST_NAME)
    assert contents(a).items() >= before.items()
    assert list(damaged_records(StoreReader(old))) == []
    assert go_on(a, [], "append") == 9  # nothing appended changes nothing
    assert contents(a) == contents(b)
    (a / MANIFEST_NAME).unlink()
    for mode in ("resume", "append"):  # what is no store
        with pytest.raises(InputError, match="exists already"):
            StoreWriter(a, mode=mode, **PIXELS)


def write_shard(folder, number, part, **options):
    with ShardWriter(folder, number, **PIXELS, **options) as shard:
        for sample in part:
            shard.add(*sample)
    return shard


@settings(max_examples=3)
@given(st.permutations(range(4)))
def test_shards_of_any_order_make_the_same_store(order):
    samples = random_samples(7)
    with tempfile.TemporaryDirectory() as folder:
        whole = write_store(Path(folder) / "whole", samples, samples_per_shard=2)
        store = Path(folder) / "store"
        for number in order:
            part = samples[2 * number : 2 * number + 2]
            assert not is_finished(store, number)
            assert write_shard(store, number, part).written == len(part)
            assert is_finished(store, number)
        for _ in range(2):
            assert finish_store(store, shards=4) == store / MANIFEST_NAME
            assert contents(store) == contents(whole)
            assert all(is_finished(store, number) for number in range(4))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_shard_that_is_written_again_is_replaced_where_it_differs(tmp_path, seed):
    store, first, late = tmp_path / "store", random_samples(3), random_samples(3, seed=seed)
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
    assert (shard.stat().st_ino == before) == (seed == 0)
    assert len(list(shard.parent.iterdir())) == 2
    written = shard.read_bytes()
    shard.write_bytes(written[:-1])
    assert not is_finished(store, 0)
    shard.write_bytes(written)
    finish_store(store)
    assert_store_holds(store, late)


def test_a_failed_shard_or_one_on_a_full_disk_leaves_nothing_and_an_empty_one_counts(tmp_path):
    store, samples = tmp_path / "store", random_samples(4)
    with pytest.raises(ValueError, match="latents have shape"):
        write_shard(store, 3, [samples[0], random_samples(1, channels=3)[0]])
    full = ShardWriter(store, 3, **PIXELS)
    (tmp_path / "full").symlink_to("/dev/full")
    path = str(tmp_path / "full")
    full._writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    full.add(*samples[0])
    with pytest.raises(OSError, match="No space left on device"):
        full.finish()
    assert list((tmp_path / "store.partial").iterdir()) == []
    assert not is_finished(store, 3)
    with pytest.raises(InputError, match="no finished shard"):
        finish_store(store)
    with pytest.raises(InputError, match="number of a shard is -1"):
        ShardWriter(store, -1, **PIXELS)
    for number, part in enumerate(([], samples, [])):
        write_shard(store, number, part)
    finish_store(store, shards=3)
    assert_store_holds(store, samples)


@pytest.mark.parametrize(
    ("numbers", "shards", "sample", "options", "named"),
    [
        ((0, 2), 3, None, {}, ["shard 1 is not finished (1 of 3"]),
        ((0, 2), 4, None, {}, ["shard 1 is not finished (2 of 4"]),
        ((0, 2), 1, None, {}, ["holds shard 2, but 1"]),
        ((0, 1), None, random_samples(1, channels=3)[0], {}, ["channels is 3, but 1"]),
        ((0, 1), None, OF_TEXT, {}, ["text of width 8", "shard-00000", "shard-00001"]),
        ((0, 1), None, None, {"origin": {"vae": "wan"}}, ["origin is {'vae': 'wan'}"]),
    ],
)
def test_shards_with_gaps_or_that_disagree_are_refused(
    tmp_path, numbers, shards, sample, options, named
):
    store, (usual,) = tmp_path / "store", random_samples(1)
    write_shard(store, numbers[0], [usual])
    write_shard(store, numbers[1], [sample or usual], **options)
    with says(*named, store):
        finish_store(store, shards=shards)
    assert not store.exists()


def test_shards_are_added_to_a_store(store, samples):
    write_shard(store, 3, random_samples(2, seed=1))
    assert len(read_manifest(store)) == 11
    finish_store(store, shards=4)
    assert_store_holds(store, [*samples, *random_samples(2, seed=1)])


@pytest.mark.parametrize("link", [True, False])
def test_merged_stores_hold_all_samples_in_order(tmp_path, monkeypatch, link):
    def no_link(*_):
        raise OSError("another file system")

    if not link:
        monkeypatch.setattr(merging.os, "link", no_link)
    samples = random_samples(11)
    parts = [samples[:4], samples[4:6], samples[6:]]
    sources = [
        write_store(tmp_path / f"part{n}", part, samples_per_shard=2, origin={"part": n, "fps": 8})
        for n, part in enumerate(parts)
    ]
    before = [contents(source) for source in sources]
    assert merge_stores(sources, tmp_path / "all") == tmp_path / "all" / MANIFEST_NAME
    assert_store_holds(tmp_path / "all", samples)
    shards = contents(write_store(tmp_path / "whole", samples, samples_per_shard=2))
    del shards[MANIFEST_NAME]
    assert contents(tmp_path / "all").items() >= shards.items()
    origin = read_manifest(tmp_path / "all").origin
    assert origin == {"fps": 8, "merged": [{"part": n, "fps": 8} for n in range(3)]}
    shutil.rmtree(sources[0])
    go_on(tmp_path / "all", [*samples, samples[0]], "append")
    assert_store_holds(tmp_path / "all", [*samples, samples[0]])
    assert [contents(source) for source in sources[1:]] == before[1:]


def one_sample(folder, channels=1, text=None, stride=(1, 1, 1), **options):
    condition = np.zeros(1, np.int32) if text is None else np.zeros((1, text), np.float16)
    with StoreWriter(folder, vae_stride=stride, **options) as writer:
        writer.add(np.zeros((1, 1, 1, channels), np.float16), condition, (1, *stride[1:]))
    return folder


def test_a_merged_store_has_the_rate_of_its_videos_where_they_share_one(tmp_path):
    def store(name, frames, fps):
        with StoreWriter(tmp_path / name, vae_stride=(1, 1, 1), origin={"of": name} | fps) as one:
            latents, condition = np.zeros((frames, 1, 1, 1), np.float16), np.zeros(1, np.int32)
            one.add(latents, condition, (frames, 1, 1))
        return tmp_path / name

    clips, others = store("clips", 5, {"fps": 8}), store("others", 5, {})
    stills, more = store("stills", 1, {}), store("more", 1, {})
    for number, (parts, fps) in enumerate(
        (((clips, stills), 8), ((clips, others), None), ((stills, more), None))
    ):
        merge_stores(parts, tmp_path / str(number))
        assert read_manifest(tmp_path / str(number)).fps == fps


def test_stores_that_differ_or_are_none_are_not_merged(tmp_path):
    a, b = (one_sample(tmp_path / name) for name in "ab")
    cases = [
        ([a], "all", "at least two"),
        ([a, tmp_path / "." / "a"], "all", "given twice"),
        ([a, b], "a", "exists already"),
        ([a, tmp_path / "none"], "all", "no such manifest"),
    ]
    for options, named in (
        ({"channels": 16}, "channels is 16, but 1"),
        ({"text": 8}, "condition is text of width 8, but classes"),
        ({"stride": (4, 8, 8)}, "vae_stride is (4, 8, 8), but (1, 1, 1)"),
        ({"origin": {"vae": "wan"}}, "origin's vae is wan, but None"),
    ):
        cases.append(([a, one_sample(tmp_path / named[:7], **options)], "all", named))
    before = contents(tmp_path)
    for sources, out, named in cases:
        with says(named):
            merge_stores(sources, tmp_path / out)
    assert contents(tmp_path) == before


def test_captions_are_kept_and_manifests_without_them_are_read(tmp_path):
    store, samples = tmp_path / "store", random_samples(3)
    captions = ["a cat", None, "ein Hund, 猫\nund mehr"]
    with StoreWriter(store, samples_per_shard=2, **PIXELS) as writer:
        for sample, caption in zip(samples, captions, strict=True):
            writer.add(*sample, caption=caption)
    assert read_captions(store) == captions
    merge_stores([store, write_store(tmp_path / "more", samples[:1])], tmp_path / "all")
    assert read_captions(tmp_path / "all") == [*captions, None]
    change_manifest(store, lambda table: table.drop_columns(["caption"]))
    assert read_captions(store) == [None] * 3
    assert read_rows(store)["caption"].null_count == 3
    with StoreWriter(store, mode="append", **PIXELS) as writer:
        writer.add(*samples[0], caption="again")
    assert read_captions(store) == [None] * 3 + ["again"]
    assert_store_holds(store, [*samples, samples[0]])
