import dataclasses
import itertools

import jax
import numpy as np
from data_helpers import NULL_LABEL, PATCH, SpyReader, cases, classes, manifest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.data.batch import PackedBatch, signature
from alload_jax.data.collate import Collator, collation_for
from alload_jax.models.common.parts import patchify
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig

MODEL = WanConfig(dim=16, num_heads=2, num_layers=1, patch_size=PATCH)


def collator(reader, ranks, plan, text_length=None):
    length = reader.manifest.longest_text() if text_length is None else text_length
    collation = collation_for(plan, reader.manifest, MODEL, classes(length, images=True))
    return Collator(reader, frozenset(ranks), collation)


def planned_rows(step, ranks):
    """Per micro-batch, the sample of every row of the ranks; −1 for padding."""
    for index in sorted({part.index for part in step.micro_batches}):
        parts = {p.rank: p for p in step.micro_batches if p.index == index}
        held = (
            ((*parts[rank].samples, *[-1] * parts[rank].rows), parts[rank].rows)
            for rank in sorted(ranks)
        )
        yield [sample for samples, rows in held for sample in samples[:rows]]


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
            for name in ("latents", "given", "image"):
                array = getattr(batch, name)[row]
                expected = 0 * array if latents is None else getattr(reader, name)(sample)
                np.testing.assert_array_equal(array, expected)
        held = (row, slice(text_length))
        if padded:
            assert sample < 0 or batch.metadata.condition.length[row] == text_length
            held = (row, slice(batch.metadata.condition.length[row, 0]))
        if sample >= 0 or not padded:
            assert batch.condition[held].tolist() == labels + padding
        assert batch.weight[row] == (sample >= 0)


def assert_documented_dtypes_and_shapes(host, step, text_length):
    assert (host.number, host.epoch) == (step.index, step.epoch)
    for index, batch in enumerate(host.batches):
        parts = [part for part in step.micro_batches if part.index == index]
        rows = sum(part.rows for part in parts)
        assert samples_of(batch).shape == (rows,)
        assert batch.weight.shape == batch.epoch.shape == batch.sample.shape
        assert (batch.epoch[batch.sample >= 0] == step.epoch).all()
        if isinstance(batch, PackedBatch):
            assert batch.tokens.shape == (rows, parts[0].seq_len, 4)
            continue
        assert batch.condition.shape == (rows, text_length)
        assert batch.latents.shape == (rows, *parts[0].shape, 1)
        assert batch.epoch.tolist() == [step.epoch] * rows
        dtypes = [part.dtype.name for part in jax.tree.leaves(batch)]
        assert dtypes == ["float32", *["int32"] * 3, *["float32"] * 3]


@settings(max_examples=25)
@given(cases(), st.integers(0, 3), st.integers(0, 2), st.data())
def test_every_row_holds_its_sample_or_padding_where_it_is_damaged(case, longer, epoch, data):
    samples = set(range(len(case.manifest)))
    damaged = data.draw(st.just(set()) | st.sets(st.sampled_from(sorted(samples))))
    reader = SpyReader(case.manifest, damaged)
    text_length, ranks = case.manifest.longest_text() + longer, range(case.plan.topology.ranks)
    collate = collator(reader, ranks, case.plan, text_length)
    problems, shown, weight = [], [], 0
    shapes = collate.collation.shapes(case.plan)
    compiled = [signature(shape) for shape in shapes]
    # The largest come first; a token has four values.
    tokens = [each.tokens if isinstance(each, PackedBatch) else each.latents for each in shapes]
    assert sorted(sizes := [each.size for each in tokens], reverse=True) == sizes
    for step in case.epoch_steps(epoch):
        host = collate(step)
        planned = planned_rows(step, ranks)
        rows = [[-1 if sample in damaged else sample for sample in row] for row in planned]
        assert [samples_of(batch).tolist() for batch in host.batches] == rows
        assert_documented_dtypes_and_shapes(host, step, text_length)
        assert {signature(batch) for batch in host.batches} <= set(compiled)
        for batch in host.batches:
            assert_rows_hold_their_samples(batch, reader, text_length)
            shown += batch.sample[batch.weight > 0].tolist()
            weight += batch.weight.sum()
        problems += host.problems
    assert sorted(problems) == sorted(f"shard: record {n} is damaged" for n in damaged)
    assert sorted(shown) == sorted(samples - damaged)
    assert weight == len(shown)


@settings(max_examples=20)
@given(cases(), st.data())
def test_some_ranks_read_their_rows_alone_and_none_that_are_left_out(case, data):
    ranks = data.draw(st.sets(st.sampled_from(range(case.plan.topology.ranks)), min_size=1))
    excluded = data.draw(st.frozensets(st.sampled_from(range(len(case.manifest)))))
    others = {
        sample
        for step in case.epoch_steps()
        for part in step.micro_batches
        if part.rank not in ranks
        for sample in part.samples
    }
    spy = SpyReader(case.manifest, others)  # whose damage is ignored
    whole = collator(SpyReader(case.manifest), ranks, case.plan)
    part = dataclasses.replace(collator(spy, ranks, case.plan), excluded=excluded)
    for step in case.epoch_steps():
        spy.reads.clear()
        found, expected = part(step), whole(step)
        rows = list(planned_rows(step, ranks))
        assert [samples_of(batch).tolist() for batch in expected.batches] == rows
        held = {sample for sample in itertools.chain(*rows) if sample >= 0}
        assert sorted(spy.reads) == sorted(held - excluded)
        assert found.problems == ()
        for ours, theirs in zip(found.batches, expected.batches, strict=True):
            out = np.isin(samples_of(theirs), list(excluded))
            assert not ours.weight[out].any()
            for mine, all_of_it in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_array_equal(mine[~out], all_of_it[~out])


def test_each_shape_group_gets_a_batch_of_its_own_shape():
    sizes = [(1, 4, 4)] * 9 + [(5, 4, 4)] * 4
    manifest = manifest_of(sizes, [1] * len(sizes))
    config = PlanningConfig("fixed", "independent", rows=1, ranks=6, ranks_per_group=2)
    plan = make_plan(config, manifest.samples(PATCH), 1, seed=0)
    spy, shapes = SpyReader(manifest), set()
    collation = collation_for(plan, manifest, MODEL, classes(1))
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
