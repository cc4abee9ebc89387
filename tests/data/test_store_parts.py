"""Stores whose samples hold further kinds of condition tokens."""

import numpy as np
import pytest
from data_helpers import assert_says, change_manifest

from alload_jax.data.manifest import PART_LENGTHS, read_manifest
from alload_jax.data.record import with_text_of_epoch
from alload_jax.data.store import BadRecordError, StoreReader, StoreWriter, merge_stores
from alload_jax.errors import InputError

WIDTHS = {"glyphs": 5, "audio": 3}


def samples(count=5, widths=WIDTHS, seed=0):
    rng = np.random.default_rng(seed)
    for n in range(count):
        parts = {
            name: rng.normal(size=((n + w) % 4, w)).astype(np.float32) for name, w in widths.items()
        }
        text = rng.normal(size=(n % 3, 6)).astype(np.float32)
        yield rng.normal(size=(1, 2, 2, 4)).astype(np.float32), text, (1, 2, 2), parts


def write(folder, found, **options):
    with StoreWriter(folder, vae_stride=(1, 1, 1), **options) as writer:
        for latents, text, size, parts in found:
            writer.add(latents, text, size, parts=parts)
    return folder


def test_parts_are_read_as_they_were_written(tmp_path):
    found = list(samples())
    manifest = read_manifest(write(tmp_path / "s", found))
    assert manifest.form.parts == (("audio", 3), ("glyphs", 5))
    reader = StoreReader(manifest)
    for number, (*_, parts) in enumerate(found):
        arrays = reader.read(number)
        assert set(arrays) == {"latents", "text", *parts}
        for name, values in parts.items():
            np.testing.assert_array_equal(arrays[name], values)
        lengths = [len(parts[name]) for name in ("audio", "glyphs")]
        assert manifest.part_lengths[number].tolist() == lengths
    some = manifest.subset(np.array([3, 1]))
    np.testing.assert_array_equal(some.part_lengths, manifest.part_lengths[[3, 1]])


def test_a_store_goes_on_after_an_interruption_with_the_same_bytes(tmp_path):
    def interrupted():
        yield from list(samples())[:3]
        raise RuntimeError

    whole = write(tmp_path / "whole", samples())
    with pytest.raises(RuntimeError):
        write(tmp_path / "s", interrupted())
    resumed = write(tmp_path / "s", list(samples())[3:], mode="resume")
    found, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (resumed, whole)
    )
    assert found == expected


def test_stores_of_equal_parts_are_merged_and_others_are_not(tmp_path):
    one, two = (write(tmp_path / str(n), samples(seed=n)) for n in range(2))
    merge_stores([one, two], tmp_path / "both")
    merged = read_manifest(tmp_path / "both")
    parts = [read_manifest(folder).part_lengths for folder in (one, two)]
    np.testing.assert_array_equal(merged.part_lengths, np.concatenate(parts))
    other = write(tmp_path / "other", samples(widths={"glyphs": 4, "audio": 3}))
    with pytest.raises(InputError, match="glyphs of width 4") as error:
        merge_stores([one, other], tmp_path / "refused")
    assert_says(error, "parts is")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"glyphs": np.ones((2, 4), np.float32), "audio": np.ones((1, 3))}, "parts is"),
        ({"glyphs": np.ones((2, 5), np.float32)}, "parts is"),
        ({"glyphs": np.ones(5), "audio": np.ones((1, 3))}, "glyphs has shape (5,)"),
        ({"glyphs": np.ones((2, 5), int), "audio": np.ones((1, 3))}, "of floats"),
        ({"glyphs": np.full((1, 5), np.nan), "audio": np.ones((1, 3))}, "NaN"),
        ({"latents": np.ones((1, 3))}, "'latents' cannot name condition tokens"),
        ({"a.1": np.ones((1, 3))}, "'a.1' cannot name"),
    ],
)
def test_wrong_parts_are_refused_and_the_sample_is_named(parts, words, tmp_path):
    with StoreWriter(tmp_path / "s", vae_stride=(1, 1, 1)) as writer:
        latents, text, size, first = next(samples())
        writer.add(latents, text, size, parts=first)
        with pytest.raises(ValueError, match="sample 1") as error:
            writer.add(latents, text, size, parts=parts)
        assert_says(error, words)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"glyphs": np.ones((2, 4), np.float32)}, "width of 4, the first has a width of 5"),
        ({"other": np.ones((2, 4), np.float32)}, "the first has none"),
        ({"glyphs": np.full((2, 5), np.inf)}, "glyphs.1 hold inf"),
    ],
)
def test_an_alternative_has_kinds_like_those_of_the_first_text_or_its_own(kinds, words, tmp_path):
    latents, text, size, first = next(samples())
    others = [(text, "b"), (text, "c", {"glyphs": np.ones((7, 5), np.float32)})]
    with StoreWriter(tmp_path / "s", vae_stride=(1, 1, 1)) as writer:
        with pytest.raises(ValueError, match="sample 0") as error:
            writer.add(latents, text, size, parts=first, alternatives=[(text, "b", kinds)])
        assert_says(error, words)
        writer.add(latents, text, size, parts=first, alternatives=others)
    manifest = read_manifest(tmp_path / "s")
    assert manifest.part_lengths.tolist() == [[len(first["audio"]), 7]]
    arrays = StoreReader(manifest).read(0)
    drawn = (with_text_of_epoch(arrays, seed=0, epoch=epoch, sample=0) for epoch in range(30))
    assert {len(each["glyphs"]) for each in drawn} == {len(first["glyphs"]), 7}


def with_lengths(*lengths):
    """Changes the lengths of each row; drops them where there are none."""

    def change(table):
        if not lengths:
            return table.drop_columns(PART_LENGTHS)
        place = table.column_names.index(PART_LENGTHS)
        return table.set_column(place, PART_LENGTHS, [[list(lengths)] * len(table)])

    return change


@pytest.mark.parametrize("lengths", [(), (1,), (1, -1)])
def test_a_manifest_without_lengths_of_its_parts_is_refused(lengths, tmp_path):
    folder = write(tmp_path / "s", samples())
    change_manifest(folder, with_lengths(*lengths))
    with pytest.raises(InputError, match="part_lengths does not hold 2 lengths in each row") as e:
        read_manifest(folder)
    assert_says(e, "prepare the data again")


def test_a_record_of_other_lengths_than_the_manifest_s_is_damaged(tmp_path):
    folder = write(tmp_path / "s", samples())
    change_manifest(folder, with_lengths(4, 4))
    with pytest.raises(BadRecordError, match=r"holds audio of shape .*the manifest says \(4, 3\)"):
        StoreReader(read_manifest(folder)).read(0)
