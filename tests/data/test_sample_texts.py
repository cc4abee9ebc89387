"""Samples with several texts: stored, merged, and one of them taken in each epoch."""

import itertools
from collections import Counter

import numpy as np
import pytest
from data_helpers import change_manifest, classes, plan_over
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.collate import BucketedCollation, Collator
from alload_jax.data.manifest import (
    ROW_SCHEMA,
    caption_counts,
    read_captions,
    read_manifest,
    read_paths,
    read_rows,
)
from alload_jax.data.packed import PackedCollation
from alload_jax.data.record import texts_of, with_alternatives, with_text_of_epoch
from alload_jax.data.store import (
    BadRecordError,
    StoreReader,
    StoreWriter,
    damaged_records,
    merge_stores,
)
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.samples import Samples

SIZE = (1, 4, 4)
LATENTS = np.zeros((*SIZE, 1), np.float32)


def text(*values):
    """An embedding of a token for each value."""
    return np.array([[value, 0.5] for value in values], np.float16)


def labels(*values):
    return np.array(values, np.int32)


def write(folder, samples, kind=text, paths=None, end=None, **options):
    """Samples, each a list of texts as tuples of values; then the error `end`."""
    with StoreWriter(folder, vae_stride=(1, 1, 1), **options) as writer:
        for number, texts in enumerate(samples):
            first, *others = texts
            more = [(kind(*other), f"caption {other}") for other in others]
            path = None if paths is None else paths[number]
            words = f"caption {first}"
            writer.add(LATENTS, kind(*first), SIZE, words, alternatives=more, path=path)
        if end is not None:
            raise end
    return folder


MANY = [[(1,)], [(2, 2), (3,), (4, 4, 4)], [(5,), (6, 6)]]


@pytest.mark.parametrize("kind", [text, labels])
def test_all_texts_come_back(tmp_path, kind):
    store = write(tmp_path / "store", MANY, kind, paths=["a/1", "a/2", None])
    manifest = read_manifest(store)
    assert manifest.text_length.tolist() == [1, 3, 2]
    assert caption_counts(manifest).tolist() == [1, 3, 2]
    assert read_paths(manifest).tolist() == ["a/1", "a/2", ""]
    some = manifest.subset(np.array([1, 2]))
    assert read_paths(some).tolist() == ["a/2", ""]
    reader = StoreReader(manifest)
    for number, texts in enumerate(MANY):
        found = texts_of(reader.read(number))
        for array, values in zip(found, texts, strict=True):
            np.testing.assert_array_equal(array, kind(*values))
    assert read_captions(store) == [f"caption {texts[0]}" for texts in MANY]
    assert read_rows(store)["captions"].to_pylist() == [
        None,
        *[[f"caption {values}" for values in texts] for texts in MANY[1:]],
    ]
    assert list(damaged_records(reader)) == []


def test_a_store_without_them_has_the_columns_that_it_always_had(tmp_path):
    one = write(tmp_path / "one", [[(1,)], [(2, 2)]])
    assert read_rows(one).schema.names == ROW_SCHEMA.names
    assert set(StoreReader(read_manifest(one)).read(0)) == {"latents", "text"}
    assert caption_counts(read_manifest(one)).tolist() == [1, 1]
    assert read_paths(read_manifest(one)) is None


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_interrupted_appended_and_merged_stores_are_what_one_writer_writes(tmp_path):
    samples, paths = [*MANY, *MANY[:2]], ["a", "b", None, "c", "d"]

    def write_part(name, begin, stop, mode="new", **options):
        given = {"paths": paths[begin:stop], "samples_per_shard": 2, "mode": mode}
        return write(tmp_path / name, samples[begin:stop], **given | options)

    whole = content(write_part("whole", 0, 5))
    for begin, mode in ((0, "new"), (2, "append"), (4, "append")):
        grown = write_part("grown", begin, begin + 2, mode)
    assert content(grown) == whole
    with pytest.raises(KeyboardInterrupt):
        write_part("stopped", 0, 3, end=KeyboardInterrupt())
    assert content(write_part("stopped", 3, 5, "resume")) == whole
    merge_stores([write_part("x", 0, 2), write_part("y", 2, 5)], tmp_path / "all")
    assert content(tmp_path / "all") == whole


def test_merging_can_add_the_names_of_the_folders(tmp_path):
    x, y, z = (tmp_path / name for name in ("x/data", "y/data", "z"))
    write(x, MANY[:1], paths=["cats/1.png"])
    write(y, MANY[:2])
    write(z, MANY[:1])
    for parts, expected in (
        ([x, y], ["x/data/cats/1.png", "y/data", "y/data"]),
        ([x, z], ["data/cats/1.png", "z"]),
    ):
        merged = tmp_path / f"all {len(expected)}"
        merge_stores(parts, merged, add_names=True)
        assert read_paths(read_manifest(merged)).tolist() == expected


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([(np.zeros((1, 3), np.float16), None)], "one of its texts has shape"),
        ([(labels(1), None)], "one of its texts has shape"),
        ([(text(np.nan), None)], "NaN"),
        ([(text(1), 7)], "caption is 7"),
    ],
)
def test_texts_that_do_not_fit_are_refused(tmp_path, others, message):
    with StoreWriter(tmp_path / "store", vae_stride=(1, 1, 1)) as writer:
        with pytest.raises(ValueError, match=message):
            writer.add(LATENTS, text(1), SIZE, alternatives=others)
        with pytest.raises(ValueError, match="path is 3"):
            writer.add(LATENTS, text(1), SIZE, path=3)
        writer.add(LATENTS, text(1), SIZE)
    assert len(read_manifest(tmp_path / "store")) == 1


def test_a_record_whose_longest_text_is_not_the_manifest_s_is_damaged(tmp_path):
    store = write(tmp_path / "store", MANY)

    def longer(table):
        place = table.column_names.index("text_length")
        return table.set_column(place, "text_length", [[1, 4, 2]])

    change_manifest(store, longer)
    reader = StoreReader(read_manifest(store))
    reader.read(2)
    with pytest.raises(BadRecordError, match="text"):
        reader.read(1)


# ---------------------------------------------------------------- one for each epoch


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**40), st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.integers(1, 9))
def test_the_text_of_an_epoch_is_a_function_of_seed_epoch_and_sample(seed, epoch, sample, count):
    arrays = with_alternatives({"text": text(0)}, [text(n) for n in range(1, count)])
    first = with_text_of_epoch(arrays, seed, epoch, sample)
    again = with_text_of_epoch(dict(arrays), seed, epoch, sample)
    assert first["text"] is again["text"]
    assert first["text"][0, 0] in range(count)
    if count == 1:
        assert first is arrays


def test_all_texts_are_taken_about_equally_often_and_independently():
    arrays = with_alternatives({"labels": labels(0)}, [labels(1), labels(2)])

    def taken(epoch, sample):
        return int(with_text_of_epoch(arrays, 3, epoch, sample)["labels"][0])

    places = itertools.product(range(29), range(60))
    pairs = Counter((taken(epoch, sample), taken(epoch + 1, sample)) for epoch, sample in places)
    assert len(pairs) == 9
    # Each of 9 pairs is expected 193 times, with a standard deviation of 13.
    assert all(130 < count < 260 for count in pairs.values())


def taken_in(store, policy, epochs=3, ranks=2, weight=None):
    """(sample, epoch of noise) → first label of the condition that the batches hold."""
    manifest = read_manifest(store)
    plan = plan_over(manifest, ranks, policy=policy, m_mem=40)
    if weight is not None:
        samples = Samples(plan.samples.shape, plan.samples.seq_len, np.full(len(manifest), weight))
        plan = type(plan)(samples, plan.policy, plan.topology, plan.seed)
    conditions = classes(manifest.longest_text())
    if plan.policy.packed:
        model = WanConfig(dim=16, num_heads=2, num_layers=1, patch_size=(1, 2, 2))
        collation = PackedCollation.of(plan, manifest, model, conditions)
    else:
        collation = BucketedCollation(manifest, conditions)
    found, number = {}, 0
    while plan.locate(number)[0] < epochs:
        for rank in range(ranks):
            only = Collator(StoreReader(manifest), frozenset({rank}), collation, seed=5)
            for batch in only(plan.step(number)).batches:
                for place in zip(*np.nonzero(batch.weight), strict=True):
                    key = int(batch.sample[place]), int(batch.epoch[place])
                    at = place
                    if plan.policy.packed:
                        at = place[0], batch.metadata.condition.offset[place]
                    found[key] = int(batch.condition[at].ravel()[0])
        number += 1
    return found


@pytest.mark.parametrize("weight", [None, 2.5])
def test_layouts_ranks_and_policies_take_the_same_texts(tmp_path, weight):
    samples = [[(n % 5,), (5 + n % 3, 1), (8,)] for n in range(30)]
    store = write(tmp_path / "store", samples, labels)
    expected = taken_in(store, "equal_tokens", weight=weight)
    assert len({expected[0, epoch] for epoch in range(3)}) > 1 or len(set(expected.values())) > 5
    for policy, ranks in (("dual_constraint", 3), ("first_fit", 1), ("balanced", 2)):
        found = taken_in(store, policy, ranks=ranks, weight=weight)
        both = found.keys() & expected.keys()
        assert len(both) > 0.6 * len(expected)
        assert {key: found[key] for key in both} == {key: expected[key] for key in both}
    if weight is not None:
        assert max(epoch for _, epoch in expected) >= 2**20
