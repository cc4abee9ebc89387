"""Samples that are held out by content, left out by a file, or weighed by their paths."""

import fnmatch
import pickle
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import assert_holds, manifest_of, random_samples, says, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.manifest import read_manifest
from alload_jax.data.selection import (
    SourceWeight,
    content_order,
    exclusion_identity,
    is_held_out,
    left_out,
    positions,
    read_excluded,
    source_shares,
    weights_identity,
    with_weights,
)
from alload_jax.data.sources import Subset
from alload_jax.data.sources.grain_samples import GrainSamples
from alload_jax.data.store import BadRecordError, StoreReader
from alload_jax.errors import InputError
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.bucketed import EqualTokens
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.samples import Samples

SUMS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=60)
SHARES = st.floats(0.01, 0.99)
_MASK = 2**64 - 1


def manifest_with(sums):
    found = manifest_of([(1, 4, 4)] * len(sums), [1] * len(sums))
    return replace(found, checksum=np.array(sums, np.uint32))


def held_out(sums, share):
    """The checksums that are held out; None where none or all would be."""
    try:
        return {sums[n] for n in np.flatnonzero(is_held_out(manifest_with(sums), share))}
    except InputError:
        assert len({each < share for each in positions(np.array(sums, np.uint32))}) == 1
        return None


def splitmix(value):
    """The finalizer of SplitMix64 in integers of any size."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@settings(max_examples=30)
@given(SUMS, st.integers(0, 2**32 - 1))
def test_positions_are_those_of_splitmix(sums, salt):
    found = positions(np.array(sums, np.uint32), salt)
    expected = [(splitmix((each + (salt << 32)) & _MASK) >> 11) / 2**53 for each in sums]
    assert found.tolist() == expected


@settings(max_examples=30)
@given(SUMS, SUMS, SHARES, SHARES, st.randoms())
def test_a_sample_stays_on_its_side_when_others_come_places_change_or_the_share_grows(
    sums, others, one, other, shuffle
):
    small, large = (held_out(sums, share) for share in sorted((one, other)))
    if small is not None and large is not None:
        assert small <= large
    more = [*sums, *sums, *others]  # with copies, which are on one side
    shuffle.shuffle(more)
    after = held_out(more, max(one, other))
    if large is not None and after is not None:
        assert {each for each in after if each in sums} == large
        found = is_held_out(manifest_with(more), max(one, other))
        assert not after & {each for each, out in zip(more, found, strict=True) if not out}
    orders = [np.array(each, np.uint32) for each in (more, sorted(more))]
    np.testing.assert_array_equal(*(each[content_order(each)] for each in orders))


@settings(max_examples=30)
@given(SUMS.filter(lambda sums: len(set(sums)) > 1))
def test_where_none_would_be_held_out_the_named_share_holds_out_some(sums):
    with says("validation.share is 1e-12", f"none of the {len(sums):,}", "at least") as error:
        is_held_out(manifest_with(sums), 1e-12)
    least = float(str(error.value).split("give at least ")[1].split(",")[0])
    expected = positions(np.array(sums, np.uint32)).min()
    assert expected < least < max(expected * 1.2, 1e-11)


def test_data_of_unknown_content_or_of_nothing_else_are_refused():
    record = {"latents": np.zeros((1, 4, 4, 1), np.float32), "labels": np.zeros(1, np.int32)}
    source = GrainSamples([record] * 9, lambda sample: (1, 4, 4), (1, 1, 1))
    for manifest, share, *said in (
        (source.manifest, 0.5, "does not record the content", "give validation.folder"),
        (manifest_with([7, 8]), 0.9999, "holds out all 2 samples", "none to train on", "lower it"),
        (manifest_with([7]), 0.9999, "holds a single sample", "give validation.folder, or leave"),
        (manifest_with([7, 7]), 1e-9, "a single sample, or copies of it, which cannot be split"),
    ):
        with says(*said):
            is_held_out(manifest, share)


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


WRONG = ["8", "-1", "3.0", "three", "3,4", "٣", "9" * 5000]


def test_a_file_names_samples_to_leave_out_but_not_all_and_no_others(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("# found by eye\n3\n\n  7  # dark\n3\n0")
    assert read_excluded(path, np.arange(8)) == {0, 3, 7}
    assert read_excluded(None, np.arange(8)) == frozenset()
    cases = [(f"1\n{line}\n".encode(), "line 2", line[:40], "from 0 to 7") for line in WRONG]
    cases += [("\n".join("01234567").encode(), "names all 8 samples"), (b"\xff", "it is no text")]
    for content, *said in cases:
        path.write_bytes(content)
        with says("data.exclude", path, *said):
            read_excluded(path, np.arange(8))
    for place in (tmp_path, tmp_path / "none.txt"):
        with pytest.raises(InputError, match=r"data\.exclude: .* cannot be read"):
            read_excluded(place, np.arange(8))


def test_each_time_of_an_excluded_sample_counts_and_others_have_another_identity():
    samples = Samples(np.zeros((9, 3), np.int64), np.full(9, 4), weight=np.full(9, 3.0))
    plan = Plan(samples, EqualTokens(40), RankTopology(2), 0)
    steps = map(plan.step, range(plan.steps_per_epoch))
    each = [sample for step in steps for sample in left_out(step, frozenset({1, 5}))]
    assert sorted(each) == [1, 1, 1, 5, 5, 5]
    plain = Plan(Samples(samples.shape, samples.seq_len), EqualTokens(40), RankTopology(2), 0)
    assert sorted(left_out(plain.step(0), frozenset({1, 5}))) == [1, 5]
    found = [exclusion_identity(frozenset(one)) for one in ((), (1,), (1, 2), (2,))]
    assert len({str(one) for one in found}) == 4
    assert exclusion_identity(frozenset((2, 1))) == exclusion_identity(frozenset((1, 2)))


PATHS = ["portraits/a.mp4", "portraits/old/b.mp4", "landscapes/c.png", "portraits2/d.mp4", "", "e+"]
PATHS = np.array(PATHS, object)
SAMPLES = Samples(np.zeros((6, 3), np.int64), np.array([4, 8, 16, 4, 4, 4]))


def refusal(*weights, paths=PATHS):
    with pytest.raises(InputError) as caught:
        with_weights(SAMPLES, weights, paths)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@settings(max_examples=50)
@given(
    st.text("ab*?/.", min_size=1, max_size=6).filter(
        lambda path: path.strip("/") and not path.startswith(("./", "/"))
    ),
    st.lists(st.text("ab/.", max_size=6), min_size=1, max_size=6),
)
def test_patterns_match_as_those_of_a_shell_do_on_a_path_or_a_folder_of_it(path, paths):
    name = path.rstrip("/")

    def matches(one):
        ends = [end for end in range(len(one)) if one[end] == "/"] + [len(one)]
        return any(fnmatch.fnmatchcase(one[:end], name) for end in ends)

    samples = Samples(np.zeros((len(paths), 3), np.int64), np.ones(len(paths), np.int64))
    expected = [matches(one) for one in paths]
    if not any(expected):
        with pytest.raises(InputError, match="matches no sample"):
            with_weights(samples, [SourceWeight(path, 2)], np.array(paths, object))
        return
    found = with_weights(samples, [SourceWeight(path, 2)], np.array(paths, object)).weight
    assert (found == 2).tolist() == expected


def test_the_first_pattern_that_matches_counts_and_weights_of_1_change_nothing():
    for path, matched in (("./portraits/", [0, 1]), ("portraits*", [0, 1, 3]), ("e+", [5])):
        found = with_weights(SAMPLES, [SourceWeight(path, 3)], PATHS).weight
        assert np.flatnonzero(found == 3).tolist() == matched
    weights = [SourceWeight("portraits/old", 0.5), SourceWeight("portraits", 2)]
    assert with_weights(SAMPLES, weights, PATHS).weight.tolist() == [2, 0.5, 1, 1, 1, 1]
    assert "'portraits/old' belong to earlier entries" in refusal(*reversed(weights))
    assert with_weights(SAMPLES, [], None) is SAMPLES
    assert with_weights(SAMPLES, [SourceWeight("portraits", 1)], PATHS) is SAMPLES
    assert weights_identity([SourceWeight("portraits", 1)]) == {}
    assert weights_identity([SourceWeight("portraits", 1), SourceWeight("landscapes", 2)])
    weights = [SourceWeight("portraits", 2), SourceWeight("landscapes", 0.5)]
    shares = source_shares(SAMPLES, weights, PATHS)
    assert [(s.path, s.samples, s.epoch_samples, s.epoch_tokens) for s in shares] == [
        *(("portraits", 2, 4, 24), ("landscapes", 1, 0.5, 8), ("others", 3, 3, 12))
    ]
    assert [s.share for s in shares] == pytest.approx([24 / 44, 8 / 44, 12 / 44])


def test_what_is_wrong_is_said_in_a_line():
    message = refusal(SourceWeight("portrait", 2))
    assert "'portrait' matches no sample" in message
    assert "portraits, portraits/old, landscapes" in message
    six, seven = (np.array([f"{n}/x" for n in range(count)] + [""] * (6 - count), object)
                  for count in (6, 7))  # fmt: skip
    assert refusal(SourceWeight("a", 2), paths=six).endswith("4, 5")
    assert refusal(SourceWeight("a", 2), paths=seven).endswith("4, 5 and 1 more")
    assert "prepare the media again" in refusal(SourceWeight("a", 2), paths=None)
    for weight in (0, -1, 0.000999, 1000.001, float("nan"), float("inf")):
        with pytest.raises(InputError, match="weight of 'a' is"):
            SourceWeight("a", weight)
    for weight in (0.001, 1000):
        SourceWeight("a", weight)
    with pytest.raises(InputError, match="path is empty"):
        SourceWeight("/", 1)
