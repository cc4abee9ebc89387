"""The share of samples that is held out, chosen by content."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import assert_holds, assert_says, manifest_of, random_samples, write_store
from hypothesis import given
from hypothesis import strategies as st

from alload_jax.data.manifest import read_manifest
from alload_jax.data.selection import content_order, is_held_out, positions
from alload_jax.data.sources import Subset
from alload_jax.data.sources.grain_samples import GrainSamples
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.errors import InputError

SUMS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)
SHARES = st.floats(0.01, 0.99)
_MASK = 2**64 - 1


def manifest_with(sums):
    found = manifest_of([(1, 4, 4)] * len(sums), [1] * len(sums))
    object.__setattr__(found, "checksum", np.array(sums, np.uint32))
    return found


def held_out(sums, share):
    """The checksums that are held out; None where none or all would be."""
    try:
        return {sums[n] for n in np.flatnonzero(is_held_out(manifest_with(sums), share))}
    except InputError:
        return None


def splitmix(value):
    """The finalizer of SplitMix64 in integers of any size."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@given(SUMS, st.integers(0, 2**32 - 1))
def test_positions_are_those_of_splitmix(sums, salt):
    found = positions(np.array(sums, np.uint32), salt)
    expected = [(splitmix((each + (salt << 32)) & _MASK) >> 11) / 2**53 for each in sums]
    assert found.tolist() == expected


@given(SUMS, SUMS, SHARES, st.randoms())
def test_a_sample_stays_on_its_side_when_others_come_and_places_change(
    sums, others, share, shuffle
):
    before = held_out(sums, share)
    more = [*sums, *others]
    shuffle.shuffle(more)
    after = held_out(more, share)
    if before is not None and after is not None:
        assert {each for each in after if each in sums} == before


@given(SUMS, SHARES)
def test_copies_are_on_one_side(sums, share):
    manifest = manifest_with([*sums, *sums])
    try:
        found = is_held_out(manifest, share)
    except InputError:
        return
    np.testing.assert_array_equal(found[: len(sums)], found[len(sums) :])


@given(SUMS, SHARES, SHARES)
def test_a_larger_share_holds_out_more_of_the_same(sums, one, other):
    small, large = (held_out(sums, share) for share in sorted((one, other)))
    if small is not None and large is not None:
        assert small <= large


def test_the_share_is_near_what_was_asked_for_even_of_neighbouring_checksums():
    sums = np.arange(200_000)
    for share in (0.001, 0.05, 0.5):
        found = is_held_out(manifest_with(sums), share).mean()
        assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / len(sums))


@given(SUMS)
def test_where_none_would_be_held_out_the_named_share_holds_out_some(sums):
    with pytest.raises(InputError) as error:
        is_held_out(manifest_with(sums), 1e-12)
    assert_says(error, "validation.share is 1e-12", f"none of the {len(sums):,}", "give at least")
    least = float(str(error.value).split("give at least ")[1].split(",")[0])
    expected = positions(np.array(sums, np.uint32)).min()
    assert expected < least < max(expected * 1.2, 1e-11)


def test_something_must_be_left_to_train_on():
    with pytest.raises(InputError) as error:
        is_held_out(manifest_with([7]), 0.9999)
    assert_says(error, "holds out all 1 samples", "none to train on", "lower it")


def test_data_of_unknown_content_are_refused():
    record = {"latents": np.zeros((1, 4, 4, 1), np.float32), "labels": np.zeros(1, np.int32)}
    source = GrainSamples([record] * 9, lambda sample: (1, 4, 4), (1, 1, 1))
    with pytest.raises(InputError) as error:
        is_held_out(source.manifest, 0.5)
    assert_says(error, "does not record the content", "give validation.folder")


@given(SUMS, st.randoms())
def test_the_order_follows_content_alone(sums, shuffle):
    other = list(sums)
    shuffle.shuffle(other)
    orders = [np.array(each)[content_order(np.array(each, np.uint32))] for each in (sums, other)]
    np.testing.assert_array_equal(*orders)


def test_a_subset_reads_its_samples_and_names_them_as_the_folder_does(tmp_path):
    samples = random_samples(9)
    source = StoreReader(read_manifest(write_store(tmp_path / "store", samples)))
    numbers = np.array([7, 2, 5])
    subset = pickle.loads(pickle.dumps(Subset(source, numbers)))
    assert len(subset.manifest) == 3
    for place, number in enumerate(numbers.tolist()):
        assert_holds(subset.read(place), samples[number])
        assert subset.manifest.number(place) == number
        assert tuple(subset.manifest.shape[place]) == samples[number].size
    again = Subset(subset, np.array([2, 0]))
    assert [again.manifest.number(place) for place in range(2)] == [5, 7]
    assert_holds(again.read(1), samples[7])
    wrong = source.manifest.checksum + np.arange(9, dtype=np.uint32)
    damaged = StoreReader(replace(source.manifest, checksum=wrong))
    with pytest.raises(BadRecordError, match=r"\(sample 2\)"):
        Subset(damaged, numbers).read(1)
