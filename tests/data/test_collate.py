import dataclasses
import itertools

import jax
import numpy as np
from data_helpers import NULL_LABEL, PATCH, SpyReader, cases, classes, manifest_of, plan_over
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.batch import PackedBatch
from alload_jax.data.collate import BucketedCollation, Collator
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader
from alload_jax.models.common.parts import patchify
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig

MODEL = WanConfig(dim=16, num_heads=2, num_layers=1, patch_size=PATCH)


def collator(reader, ranks, plan, text_length=None):
    length = reader.manifest.longest_text() if text_length is None else text_length
    collation = BucketedCollation.of(plan, reader.manifest, MODEL, classes(length))
    return Collator(reader, frozenset(ranks), collation)


def all_ranks(case):
    return range(case.plan.topology.ranks)


def planned_rows(step, ranks):
    """Per micro-batch, the sample of every row of the ranks; −1 for padding."""
    for index in sorted({part.index for part in step.micro_batches}):
        parts = {p.rank: p for p in step.micro_batches if p.index == index}
        yield [
            sample
            for rank in sorted(ranks)
            for sample in (*parts[rank].samples, *[-1] * parts[rank].rows)[: parts[rank].rows]
        ]


def samples_of(batch):
    """[B] the sample of each row, of one shape or padded to one length."""
    return batch.sample.reshape(-1)


def assert_rows_hold_their_samples(batch, reader, text_length):
    """Rows of one shape hold latents; rows of one length hold patches and their positions."""
    padded = isinstance(batch, PackedBatch)
    for row, sample in enumerate(samples_of(batch).tolist()):
        labels = reader.labels(sample).tolist() if sample >= 0 else []
        padding = [NULL_LABEL] * (text_length - len(labels))
        latents = reader.latents(sample) if sample >= 0 else None
        if padded:
            patches = np.zeros((0, 4)) if latents is None else patchify(latents[None], PATCH)[0]
            expected = np.pad(patches, ((0, batch.tokens.shape[1] - len(patches)), (0, 0)))
            np.testing.assert_array_equal(batch.tokens[row], expected)
            grid = np.asarray(latents.shape[:3]) // PATCH if len(patches) else (0, 0, 0)
            position = batch.position[row, : len(patches)]
            assert (position == np.indices(grid).reshape(3, -1).T).all()
            assert sample < 0 or batch.metadata.tokens.length[row].tolist() == [len(patches)]
        else:
            expected = np.zeros(batch.latents.shape[1:]) if latents is None else latents
            np.testing.assert_array_equal(batch.latents[row], expected)
        held = (row, slice(text_length))
        if padded:
            assert sample < 0 or batch.metadata.condition.length[row] == text_length
            held = (row, slice(batch.metadata.condition.length[row, 0]))
        if sample >= 0 or not padded:
            assert batch.condition[held].tolist() == labels + padding
        assert batch.weight[row] == (sample >= 0)


def assert_equal_batches(found, expected):
    for found_part, expected_part in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert found_part.dtype == expected_part.dtype
        np.testing.assert_array_equal(found_part, expected_part)


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_rows_are_those_that_the_plan_gives_the_ranks_and_no_others_are_read(case, data):
    ranks = data.draw(st.sets(st.sampled_from(all_ranks(case)), min_size=1))
    spy = SpyReader(case.manifest)
    collate = collator(spy, ranks, case.plan)
    for step in case.epoch_steps():
        spy.reads.clear()
        host = collate(step)
        rows = list(planned_rows(step, ranks))
        assert [samples_of(batch).tolist() for batch in host.batches] == rows
        assert sorted(spy.reads) == sorted(s for s in itertools.chain(*rows) if s >= 0)
        assert host.problems == ()


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 3))
def test_every_row_holds_its_sample_or_padding(case, longer):
    reader = SpyReader(case.manifest)
    text_length = case.manifest.longest_text() + longer
    collate = collator(reader, all_ranks(case), case.plan, text_length)
    for step in case.epoch_steps():
        for batch in collate(step).batches:
            assert_rows_hold_their_samples(batch, reader, text_length)


@settings(max_examples=30, deadline=None)
@given(cases(), st.integers(0, 2))
def test_an_epoch_weighs_as_much_as_it_has_samples_and_holds_each_once(case, epoch):
    collate = collator(SpyReader(case.manifest), all_ranks(case), case.plan)
    batches = [b for step in case.epoch_steps(epoch) for b in collate(step).batches]
    assert sum(batch.weight.sum() for batch in batches) == len(case.manifest)
    shown = np.concatenate([batch.sample[batch.weight > 0] for batch in batches])
    assert sorted(shown.tolist()) == list(range(len(case.manifest)))


@settings(max_examples=20, deadline=None)
@given(cases(ranks=(4,)))
def test_two_processes_halves_stacked_are_the_whole(case):
    whole, first, second = (
        collator(SpyReader(case.manifest), ranks, case.plan)
        for ranks in ({0, 1, 2, 3}, {0, 1}, {2, 3})
    )
    for step in case.epoch_steps():
        halves = zip(first(step).batches, second(step).batches, strict=True)
        for batch, (upper, lower) in zip(whole(step).batches, halves, strict=True):
            stacked = jax.tree.map(lambda *parts: np.concatenate(parts), upper, lower)
            assert_equal_batches(stacked, batch)


@settings(max_examples=20, deadline=None)
@given(cases(), st.integers(0, 2))
def test_batches_have_the_documented_dtypes_and_shapes(case, epoch):
    collate = collator(SpyReader(case.manifest), all_ranks(case), case.plan, text_length=4)
    for step in case.epoch_steps(epoch):
        host = collate(step)
        assert (host.number, host.epoch) == (step.index, epoch)
        for index, batch in enumerate(host.batches):
            parts = [part for part in step.micro_batches if part.index == index]
            rows = sum(part.rows for part in parts)
            assert samples_of(batch).shape == (rows,)
            assert batch.weight.shape == batch.epoch.shape == batch.sample.shape
            assert (batch.epoch[batch.sample >= 0] == epoch).all()
            if isinstance(batch, PackedBatch):
                assert batch.tokens.shape == (rows, parts[0].seq_len, 4)
                continue
            assert batch.condition.shape == (rows, 4)
            assert batch.latents.shape == (rows, *parts[0].shape, 1)
            assert batch.epoch.tolist() == [epoch] * rows
            dtypes = [part.dtype.name for part in jax.tree.leaves(batch)]
            assert dtypes == ["float32", "int32", "int32", "int32", "float32"]


@settings(max_examples=40, deadline=None)
@given(cases(), st.data())
def test_damaged_records_become_padding_and_are_reported(case, data):
    damaged = data.draw(st.sets(st.integers(0, len(case.manifest) - 1), min_size=1))
    reader = SpyReader(case.manifest, damaged)
    text_length = case.manifest.longest_text()
    collate = collator(reader, all_ranks(case), case.plan)
    problems, shown = [], []
    for step in case.epoch_steps():
        host = collate(step)
        planned = planned_rows(step, all_ranks(case))
        rows = [[-1 if sample in damaged else sample for sample in row] for row in planned]
        assert [samples_of(batch).tolist() for batch in host.batches] == rows
        for batch in host.batches:
            assert_rows_hold_their_samples(batch, reader, text_length)
            shown += batch.sample[batch.weight > 0].tolist()
        problems += host.problems
    assert sorted(problems) == sorted(f"shard: record {n} is damaged" for n in damaged)
    assert sorted(shown) == sorted(set(range(len(case.manifest))) - damaged)


def test_each_shape_group_gets_a_batch_of_its_own_shape():
    sizes = [(1, 4, 4)] * 9 + [(5, 4, 4)] * 4
    manifest = manifest_of(sizes, [1] * len(sizes))
    config = PlanningConfig("fixed", "independent", rows=1, ranks=6, ranks_per_group=2)
    plan = make_plan(config, manifest.samples(PATCH), 1, seed=0)
    spy, shapes = SpyReader(manifest), set()
    collation = BucketedCollation.of(plan, manifest, MODEL, classes(1))
    collate = Collator(spy, frozenset({2, 3, 4, 5}), collation, plan.group_ranks)
    for number in range(plan.steps_per_epoch):
        step = plan.step(number)
        spy.reads.clear()
        host = collate(step)
        local = [part for part in step.micro_batches if part.rank >= 2]
        assert sorted(spy.reads) == sorted(s for part in local for s in part.samples)
        assert host.groups == tuple(sorted({part.rank // 2 for part in local}))
        for group, batch in zip(host.groups, host.batches, strict=True):
            parts = [part for part in local if part.rank // 2 == group]
            rows = [(*part.samples, -1)[0] for part in parts]
            assert batch.sample.tolist() == rows
            assert batch.latents.shape[:4] == (2, *parts[0].shape)
        shapes.add(len({batch.latents.shape for batch in host.batches}))
    assert 2 in shapes
    assert collate(step).groups == ()  # of seven micro-batches one is left for the first group


def test_a_damaged_record_of_another_rank_is_ignored(store):
    manifest = read_manifest(store)
    plan = plan_over(manifest, ranks=2)
    step = plan.step(0)
    theirs = next(part for part in step.micro_batches if part.rank == 1 and part.samples)
    collate = collator(SpyReader(manifest, damaged=theirs.samples), {0}, plan)
    assert collate(step).problems == ()


def epoch_of(manifest, reader):
    plan = plan_over(manifest, policy="fixed")
    collate = collator(reader, {0, 1}, plan)
    return [collate(plan.step(number)) for number in range(plan.steps_per_epoch)]


def test_a_real_store_is_collated(store, samples):
    manifest = read_manifest(store)
    steps = epoch_of(manifest, StoreReader(manifest))
    rows = {
        int(sample): (batch.latents[row], batch.condition[row])
        for step in steps
        for batch in step.batches
        for row, sample in enumerate(batch.sample)
    }
    for number, sample in enumerate(samples):
        latents, labels = rows[number]
        np.testing.assert_array_equal(latents, sample.latents.astype(np.float32))
        assert labels[: len(sample.labels)].tolist() == sample.labels.tolist()


def test_a_real_damaged_record_is_skipped_and_named(store):
    manifest = read_manifest(store)
    checksum = manifest.checksum.copy()
    checksum[5] += 1
    reader = StoreReader(dataclasses.replace(manifest, checksum=checksum))
    steps = epoch_of(manifest, reader)
    (problem,) = itertools.chain(*(step.problems for step in steps))
    assert manifest.shard[5] in problem
    assert "sample 5" in problem
    weights = [batch.weight.sum() for step in steps for batch in step.batches]
    assert sum(weights) == len(manifest) - 1


@settings(max_examples=25, deadline=None)
@given(cases(), st.data())
def test_a_sample_that_is_left_out_changes_its_own_rows_alone(case, data):
    ranks = all_ranks(case)
    samples = range(len(case.manifest))
    excluded = data.draw(st.frozensets(st.sampled_from(samples), min_size=1))
    spy = SpyReader(case.manifest)
    whole = collator(SpyReader(case.manifest), ranks, case.plan)
    part = dataclasses.replace(collator(spy, ranks, case.plan), excluded=excluded)
    for step in case.epoch_steps():
        found, expected = part(step), whole(step)
        assert found.problems == ()
        for ours, theirs in zip(found.batches, expected.batches, strict=True):
            out = np.isin(samples_of(theirs), list(excluded))
            assert not ours.weight[out].any()
            for mine, all_of_it in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_array_equal(mine[~out], all_of_it[~out])
    assert not excluded & set(spy.reads)
