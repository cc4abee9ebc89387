"""Samples with several texts or further kinds of tokens: stored, merged, one taken an epoch."""

import itertools
from collections import Counter

import numpy as np
import pytest
from data_helpers import (
    NULL_LABEL,
    change_manifest,
    classes,
    contents,
    plan_over,
    says,
    set_column,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.collate import BucketedCollation, Collator, collation_for
from alload_jax.data.manifest import (
    PART_LENGTHS,
    ROW_SCHEMA,
    caption_counts,
    read_captions,
    read_manifest,
    read_paths,
    read_rows,
)
from alload_jax.data.record import texts_of, with_alternatives, with_text_of_epoch
from alload_jax.data.sources import Subset
from alload_jax.data.store import (
    BadRecordError,
    StoreReader,
    StoreWriter,
    damaged_records,
    merge_stores,
)
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.samples import Samples

SIZE = (1, 4, 4)
LATENTS = np.zeros((*SIZE, 1), np.float32)
MANY = [[(1,)], [(2, 2), (3,), (4, 4, 4)], [(5,), (6, 6)]]


def text(*values):
    """An embedding of a token for each value."""
    return np.array([[value, 0.5] for value in values], np.float16)


def labels(*values):
    return np.array(values, np.int32)


def glyphs(*values):
    return {"glyphs": np.array([[value] * 5 for value in values], np.float32).reshape(-1, 5)}


def write(folder, samples, kind=text, paths=None, parts=None, end=None, **options):
    """Samples, each a list of texts as tuples of values; then the error `end`."""
    with StoreWriter(folder, vae_stride=(1, 1, 1), **options) as writer:
        for number, texts in enumerate(samples):
            first, *others = texts
            more = [(kind(*other), f"caption {other}") for other in others]
            given = {"path": paths and paths[number], "parts": parts and parts[number]}
            words = f"caption {first}"
            writer.add(LATENTS, kind(*first), SIZE, words, alternatives=more, **given)
        if end is not None:
            raise end
    return folder


@pytest.mark.parametrize("kind", [text, labels])
def test_all_texts_parts_and_paths_come_back(tmp_path, kind):
    parts = [{"audio": np.ones((n, 3), np.float32), **glyphs(*range(2 - n))} for n in range(3)]
    store = write(tmp_path / "store", MANY, kind, ["a/1", "a/2", None], parts)
    manifest = read_manifest(store)
    assert manifest.form.parts == (("audio", 3), ("glyphs", 5))
    assert manifest.text_length.tolist() == [1, 3, 2]
    assert manifest.part_lengths.tolist() == [[0, 2], [1, 1], [2, 0]]
    assert caption_counts(manifest).tolist() == [1, 3, 2]
    assert read_paths(manifest).tolist() == ["a/1", "a/2", ""]
    some = manifest.subset(np.array([2, 1]))
    assert read_paths(some).tolist() == ["", "a/2"]
    assert some.part_lengths.tolist() == [[2, 0], [1, 1]]
    reader = StoreReader(manifest)
    for number, texts in enumerate(MANY):
        arrays = reader.read(number)
        for array, values in zip(texts_of(arrays), texts, strict=True):
            np.testing.assert_array_equal(array, kind(*values))
        for name, values in parts[number].items():
            np.testing.assert_array_equal(arrays[name], values)
    assert read_captions(store) == [f"caption {texts[0]}" for texts in MANY]
    several = [[f"caption {values}" for values in texts] for texts in MANY[1:]]
    assert read_rows(store)["captions"].to_pylist() == [None, *several]
    assert list(damaged_records(reader)) == []
    # A store without them has the columns that it always had.
    one = write(tmp_path / "one", [[(1,)], [(2, 2)]])
    assert read_rows(one).schema.names == ROW_SCHEMA.names
    assert set(StoreReader(read_manifest(one)).read(0)) == {"latents", "text"}
    assert caption_counts(read_manifest(one)).tolist() == [1, 1]
    assert read_paths(read_manifest(one)) is None


def test_interrupted_appended_and_merged_stores_are_what_one_writer_writes(tmp_path):
    samples, paths = [*MANY, *MANY[:2]], ["a", "b", None, "c", "d"]
    parts = [glyphs(*range(n)) for n in range(5)]

    def write_part(name, begin, stop, mode="new", **options):
        here = slice(begin, stop)
        given = {"paths": paths[here], "parts": parts[here], "samples_per_shard": 2, "mode": mode}
        return write(tmp_path / name, samples[here], **given | options)

    whole = contents(write_part("whole", 0, 5))
    for begin, mode in ((0, "new"), (2, "append"), (4, "append")):
        grown = write_part("grown", begin, begin + 2, mode)
    assert contents(grown) == whole
    with pytest.raises(KeyboardInterrupt):
        write_part("stopped", 0, 3, end=KeyboardInterrupt())
    assert contents(write_part("stopped", 3, 5, "resume")) == whole
    stores = [write_part("x", 0, 2), write_part("y", 2, 5)]
    merge_stores(stores, tmp_path / "all")
    assert contents(tmp_path / "all") == whole
    other = write(tmp_path / "other", MANY[:1], parts=[{"glyphs": np.ones((1, 4), np.float32)}])
    with pytest.raises(InputError, match=r"parts is .*glyphs of width 4"):
        merge_stores([stores[0], other], tmp_path / "refused")


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


def test_a_record_of_other_lengths_than_the_manifest_s_is_damaged(tmp_path):
    store = write(tmp_path / "store", MANY, parts=[glyphs(1, 2)] * 3)
    change_manifest(store, set_column("text_length", [1, 4, 2]))
    reader = StoreReader(read_manifest(store))
    reader.read(2)
    with pytest.raises(BadRecordError, match="text"):
        reader.read(1)
    change_manifest(store, set_column(PART_LENGTHS, [[4]] * 3))
    with pytest.raises(BadRecordError, match=r"holds glyphs of shape .*the manifest says \(4, 5\)"):
        StoreReader(read_manifest(store)).read(0)
    for lengths in ([0], [2**16]):
        change_manifest(store, set_column(PART_LENGTHS, [lengths] * 3))
        assert read_manifest(store).part_lengths.tolist() == [lengths] * 3
    for lengths in ([], [1, 2], [-1], [2**16 + 1], None):
        drop = lengths is None
        change = set_column(PART_LENGTHS, [lengths] * 3)
        change_manifest(store, (lambda t: t.drop_columns(PART_LENGTHS)) if drop else change)
        with says("part_lengths does not hold 1 lengths in each row", "prepare the data"):
            read_manifest(store)


@settings(max_examples=50)
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


def test_an_alternative_has_tokens_of_its_own_or_those_of_the_first_text(tmp_path):
    first, own = glyphs(1), glyphs(*range(7))
    with StoreWriter(tmp_path / "s", vae_stride=(1, 1, 1)) as writer:
        others = [(text(1), "b"), (text(2, 2), "c", own)]
        writer.add(LATENTS, text(0), SIZE, parts=first, alternatives=others)
    manifest = read_manifest(tmp_path / "s")
    assert manifest.part_lengths.tolist() == [[7]]
    arrays = StoreReader(manifest).read(0)
    drawn = (with_text_of_epoch(arrays, seed=0, epoch=epoch, sample=0) for epoch in range(30))
    found = {(int(each["text"][0, 0]), len(each["glyphs"])) for each in drawn}
    assert found == {(0, 1), (1, 1), (2, 7)}


def taken_in(store, policy, epochs=3, ranks=2, weight=None):
    """(sample, epoch of noise) of what the batches hold, with the texts of a seed of 5.

    Samples are not in their order in the folder, and have a dropout of 0 to 1.
    """
    reader = StoreReader(read_manifest(store))
    source = Subset(reader, np.arange(len(reader.manifest))[::-1])
    manifest, dropout = source.manifest, np.linspace(0, 1, len(source.manifest))
    plan = plan_over(manifest, ranks, policy=policy, m_mem=40)
    if weight is not None:
        samples = Samples(plan.samples.shape, plan.samples.seq_len, np.full(len(manifest), weight))
        plan = type(plan)(samples, plan.policy, plan.topology, plan.seed)
    conditions = classes(manifest.longest_text())
    if plan.policy.packed:
        model = WanConfig(dim=16, num_heads=2, num_layers=1, patch_size=(1, 2, 2))
        collation = collation_for(plan, manifest, model, conditions)
    else:
        collation = BucketedCollation(manifest, conditions)
    found, steps = set(), itertools.count()
    while plan.locate(step := next(steps))[0] < epochs:
        for rank in range(ranks):
            only = Collator(source, frozenset({rank}), collation, seed=5, dropout=dropout)
            for batch in only(plan.step(step)).batches:
                for place in zip(*np.nonzero(batch.weight), strict=True):
                    number, epoch = int(batch.sample[place]), int(batch.epoch[place])
                    at = place
                    if plan.policy.packed:
                        at = place[0], batch.metadata.condition.offset[place]
                    given = reader.read(number), 5, epoch, number, dropout[-1 - number]
                    taken = with_text_of_epoch(*given)["labels"]
                    held = batch.condition[at].ravel()[0]
                    assert held == (taken[0] if len(taken) else NULL_LABEL)
                    found.add((number, epoch))
    return found


@pytest.mark.parametrize("weight", [None, 2.5])
def test_layouts_ranks_and_policies_take_the_same_texts(tmp_path, weight):
    samples = [[(n % 5,), (5 + n % 3, 1), (8,)] for n in range(30)]
    store = write(tmp_path / "store", samples, labels)
    expected = taken_in(store, "equal_tokens", weight=weight)
    for policy, ranks in (("dual_constraint", 3), ("balanced", 2)):
        found = taken_in(store, policy, ranks=ranks, weight=weight)
        assert len(found & expected) > 0.6 * len(expected)
    if weight is not None:
        assert max(epoch for _, epoch in expected) >= 2**20
