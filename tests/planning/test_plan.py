import time
from collections import Counter, defaultdict
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning_cases import MODES, POLICIES, cases, examples, manifests, of_lengths, of_shapes

from alload_jax.planning.factory import make_plan
from alload_jax.planning.plan import Plan, current_identity
from alload_jax.planning.policies.bucketed import Fixed
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload


def plan_of(case):
    manifest, config, seed = case
    return make_plan(config, manifest.samples(), 1, seed)


def steps_of(plan, epoch):
    first = epoch * plan.steps_per_epoch
    return [plan.step(index) for index in range(first, first + plan.steps_per_epoch)]


def parts_of(plan, epoch=0):
    return [part for step in steps_of(plan, epoch) for part in step.micro_batches]


def placed_by_step(plan, epoch=0):
    return [
        sorted(sample for part in step.micro_batches for sample in part.samples)
        for step in steps_of(plan, epoch)
    ]


def by_place(step):
    """The parts of every micro-batch index of a step."""
    places = defaultdict(list)
    for part in step.micro_batches:
        places[part.index].append(part)
    return places


@given(cases())
@examples(80)
def test_every_sample_is_placed_exactly_once_in_every_epoch(case):
    plan = plan_of(case)
    for epoch in range(3):
        placed = Counter(sample for part in parts_of(plan, epoch) for sample in part.samples)
        assert placed == Counter(range(len(plan.samples)))


@given(cases())
@examples(80)
def test_every_micro_batch_fits_memory_and_holds_samples_of_its_bucket_only(case):
    manifest, config, _ = case
    lengths, shapes = manifest.lengths(), manifest.shapes()
    for part in parts_of(plan_of(case), epoch=1):
        assert len(part.samples) <= part.rows
        assert config.m_mem is None or part.rows * part.seq_len <= config.m_mem
        assert all(lengths[sample] <= part.seq_len for sample in part.samples)
        if any(part.shape):
            assert {shapes[sample] for sample in part.samples} <= {part.shape}
            assert {lengths[sample] for sample in part.samples} <= {part.seq_len}


@given(cases())
@examples(80)
def test_a_bucket_has_no_more_rows_than_its_samples_fill(case):
    plan = plan_of(case)
    shared = plan.topology.ranks_per_bucket
    parts = parts_of(plan)
    held = Counter()
    for part in parts:
        held[part.seq_len, part.shape] += len(part.samples)
    for part in parts:
        assert part.rows <= -(-held[part.seq_len, part.shape] // shared)


@given(cases())
@examples(80)
def test_a_rank_has_at_most_the_configured_micro_batches_per_step(case):
    _, config, _ = case
    steps = steps_of(plan_of(case), epoch=0)
    for step in steps:
        held = defaultdict(list)
        for part in step.micro_batches:
            held[part.rank].append(part.index)
        assert held.keys() <= set(range(config.ranks))
        for indices in held.values():
            assert indices == list(range(len(indices)))
            assert len(indices) <= config.micro_batches_per_step
    full = config.ranks * config.micro_batches_per_step
    assert all(len(step.micro_batches) == full for step in steps[:-1])
    assert 0 < len(steps[-1].micro_batches) <= full


@given(cases())
@examples(40)
def test_micro_batches_of_a_step_are_ordered_by_index_and_rank(case):
    for step in steps_of(plan_of(case), epoch=0):
        places = [(part.index, part.rank) for part in step.micro_batches]
        assert places == sorted(set(places))


@given(cases(modes=["synchronous"]))
@examples(80)
def test_synchronous_ranks_share_rows_and_shape_and_split_padding_evenly(case):
    _, config, _ = case
    for step in steps_of(plan_of(case), epoch=0):
        for parts in by_place(step).values():
            assert [part.rank for part in parts] == list(range(config.ranks))
            assert len({(part.rows, part.seq_len, part.shape) for part in parts}) == 1
            counts = [len(part.samples) for part in parts]
            assert max(counts) - min(counts) <= 1
            assert sum(counts) >= 1


@given(cases(modes=["independent"]))
@examples(80)
def test_an_independent_micro_batch_is_never_padding_alone(case):
    assert all(part.samples for part in parts_of(plan_of(case)))


@pytest.mark.parametrize("ranks_per_group", [1, 2, 3, 6])
def test_ranks_of_a_shape_group_share_rows_and_shape_and_are_idle_together(ranks_per_group):
    samples = of_shapes(*SHAPES * 7)
    config = PlanningConfig(
        "fixed", "independent", rows=2, ranks=6, ranks_per_group=ranks_per_group
    )
    plan = make_plan(config, samples, 1, seed=0)
    assert (plan.group_ranks, plan.shape_groups) == (ranks_per_group, 6 // ranks_per_group)
    taken = []
    for step in steps_of(plan, epoch=0):
        for group in range(plan.shape_groups):
            parts = [p for p in step.micro_batches if p.rank // ranks_per_group == group]
            assert len(parts) in (0, ranks_per_group)
            assert len({(part.rows, part.shape) for part in parts}) <= 1
        taken += [sample for part in step.micro_batches for sample in part.samples]
    assert sorted(taken) == list(range(len(samples)))


def test_ranks_per_group_counts_where_ranks_are_independent_alone():
    samples = of_shapes(*SHAPES)
    for options in ({"policy": "fixed", "rows": 1}, {"policy": "balanced", "m_mem": 10_000}):
        plain = make_plan(PlanningConfig(**options, ranks=4), samples, 1, seed=0)
        given = PlanningConfig(**options, ranks=4, ranks_per_group=2)
        assert make_plan(given, samples, 1, seed=0).identity() == plain.identity()


@given(cases())
@examples(80)
def test_an_epoch_has_as_few_steps_as_its_buckets_and_ranks_allow(case):
    _, config, _ = case
    plan = plan_of(case)
    shared = config.ranks if config.ranks_mode == "synchronous" else 1
    held, rows = Counter(), {}
    for part in parts_of(plan):
        held[part.seq_len, part.shape] += len(part.samples)
        rows[part.seq_len, part.shape] = part.rows
    groups = sum(-(-size // (rows[bucket] * shared)) for bucket, size in held.items())
    turns = groups if shared > 1 else -(-groups // config.ranks)
    assert plan.steps_per_epoch == -(-turns // config.micro_batches_per_step)


@given(cases(), st.lists(st.integers(0, 500), min_size=1, max_size=8))
@examples(60)
def test_step_is_a_pure_function_of_its_index(case, indices):
    used, fresh = plan_of(case), plan_of(case)
    steps = {index: used.step(index) for index in sorted(indices)}
    for index in indices:
        assert fresh.step(index) == steps[index] == plan_of(case).step(index)


@given(cases())
@examples(20)
def test_a_pickled_plan_has_the_same_steps(case):
    plan = plan_of(case)
    copy = deepcopy(plan)  # travels by __reduce__, as to a worker
    assert copy.fingerprint() == plan.fingerprint()
    assert steps_of(copy, 1) == steps_of(plan, 1)


@given(cases())
@examples(40)
def test_steps_go_on_across_epochs(case):
    plan = plan_of(case)
    for index in range(3 * plan.steps_per_epoch + 1):
        step = plan.step(index)
        assert step.index == index
        assert step.epoch == index // plan.steps_per_epoch
        assert step.micro_batches


def test_a_step_far_ahead_needs_no_steps_before_it():
    plan = make_plan(
        PlanningConfig(policy="dual_constraint", m_mem=100), of_lengths(*range(1, 101)), 4, seed=0
    )
    step = plan.step(10**12)
    assert step.epoch == 10**12 // plan.steps_per_epoch
    assert step == plan.step(10**12)


@given(cases(), st.integers(0, 2**32 - 1))
@examples(60)
def test_epochs_and_seeds_differ_in_order(case, other_seed):
    manifest, config, seed = case
    assume(len(manifest.lengths()) >= 20)  # fewer might fall into the same order by chance
    assume(other_seed != seed)
    plan, other = plan_of(case), plan_of((manifest, config, other_seed))
    orders = [plan.epoch(0), plan.epoch(1), plan.epoch(2), other.epoch(0), other.epoch(1)]
    assert len({tuple(order.sample.tolist()) for order in orders}) == len(orders)


def test_the_order_mixes_buckets_and_samples():
    lengths = [1] * 500 + [2] * 500
    plan = make_plan(PlanningConfig(policy="fixed", rows=1), of_lengths(*lengths), 1, seed=3)
    order = plan.epoch(0).sample
    assert 150 < (order[:500] < 500).sum() < 350
    positions = np.argsort(order)
    assert abs(np.corrcoef(positions[:500], np.arange(500))[0, 1]) < 0.2


@given(manifests(), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
@examples(60)
def test_synchronous_steps_hold_the_same_samples_on_few_ranks_as_on_many(
    manifest, ranks, rows, micro_batches, seed
):
    samples = manifest.samples()
    many = RankTopology(ranks, "synchronous", micro_batches)
    one = RankTopology(1, "synchronous", micro_batches)
    spread = Plan(samples, Fixed(rows), many, seed)
    alone = Plan(samples, Fixed(rows * ranks), one, seed)
    for epoch in range(2):
        assert placed_by_step(spread, epoch) == placed_by_step(alone, epoch)


def test_eight_ranks_of_one_row_hold_what_one_rank_of_eight_rows_holds():
    samples = of_shapes(*[(1, 16, 16)] * 37, *[(17, 16, 16)] * 11)
    eight = Plan(samples, Fixed(1), RankTopology(8), seed=5)
    one = Plan(samples, Fixed(8), RankTopology(1), seed=5)
    assert eight.steps_per_epoch == one.steps_per_epoch == 5 + 2
    assert placed_by_step(eight) == placed_by_step(one)


# ------------------------------------------------------------------------------ identity

SHAPES = ((1, 16, 32), (1, 16, 32), (17, 16, 16), (1, 16, 32), (17, 16, 16))


def variants():
    """Plans of which no two take the same steps for the same reasons."""
    base = {"policy": "dual_constraint", "m_mem": 100, "ranks": 2}
    changes = {
        "base": {},
        "m_mem": {"m_mem": 101},
        "m_comp": {"m_comp": 1000.0},
        "p": {"p": 1.5},
        "equal_tokens": {"policy": "equal_tokens"},
        "fixed": {"policy": "fixed", "rows": 1},
        "rows": {"policy": "fixed", "rows": 2},
        "rows by name": {"policy": "fixed", "rows": {"1x16x32": 2, "17x16x16": 1}},
        "other rows by name": {"policy": "fixed", "rows": {"1x16x32": 1, "17x16x16": 2}},
        "ranks": {"ranks": 3},
        "ranks_mode": {"ranks_mode": "independent"},
        "ranks_per_group": {"ranks_mode": "independent", "ranks_per_group": 2},
        "micro_batches_per_step": {"micro_batches_per_step": 2},
    }
    samples = of_shapes(*SHAPES)
    plans = {
        name: make_plan(PlanningConfig(**base | change), samples, 1, seed=0)
        for name, change in changes.items()
    }
    others = {
        "seed": (samples, 1),
        "one sample more": (of_shapes(*SHAPES, SHAPES[0]), 0),
        "another order": (of_shapes(*reversed(SHAPES)), 0),
        "another shape of equal length": (of_shapes((1, 32, 16), *SHAPES[1:]), 0),
        "another length": (of_shapes((1, 16, 64), *SHAPES[1:]), 0),
        "no shapes": (of_lengths(*samples.seq_len.tolist()), 0),
    }
    for name, (manifest, seed) in others.items():
        plans[name] = make_plan(PlanningConfig(**base), manifest, 1, seed)
    return plans


def test_identity_and_fingerprint_depend_on_everything_that_determines_the_steps():
    plans = variants()
    by_fingerprint = defaultdict(list)
    for name, plan in plans.items():
        by_fingerprint[plan.fingerprint()].append(name)
    assert all(len(names) == 1 for names in by_fingerprint.values()), by_fingerprint
    identities = [plan.identity() for plan in plans.values()]
    assert all(identities.count(identity) == 1 for identity in identities)


def test_seeds_with_equal_first_epochs_have_different_identities():
    plans = [
        make_plan(PlanningConfig(policy="dual_constraint", m_mem=10), of_lengths(5, 5), 1, seed)
        for seed in range(9)
    ]
    assert len({tuple(plan.epoch(0).sample.tolist()) for plan in plans}) <= 2
    assert len({plan.fingerprint() for plan in plans}) == 9


@given(cases(), cases())
@examples(40)
def test_equal_fingerprints_mean_equal_steps_and_unequal_steps_unequal_fingerprints(case, other):
    plan, twin, stranger = plan_of(case), plan_of(case), plan_of(other)
    twin.step(twin.steps_per_epoch * 3)  # where a plan was looked at is no part of it
    assert plan.identity() == twin.identity()
    assert plan.fingerprint() == twin.fingerprint()
    if steps_of(plan, 0) != steps_of(stranger, 0):
        assert plan.fingerprint() != stranger.fingerprint()


def test_an_identity_from_before_a_field_was_renamed_is_still_that_of_the_plan():
    planning = PlanningConfig("balanced", m_mem=100, ranks=2, context=2, split_above=0.5)
    identity = make_plan(planning, of_lengths(10, 20, 10), 1, seed=0).identity()
    assert identity["seconds_per_split_token"] == 0.0
    old = {k: v for k, v in identity.items() if k != "seconds_per_split_token"}
    assert current_identity(old | {"anchor_seconds": 0.0}) == identity
    assert current_identity(old | {"anchor_seconds": 1e-6}) != identity
    assert current_identity(identity) == identity


def test_cost_predictions_are_not_part_of_the_identity():
    samples = of_shapes(*SHAPES)
    plans = [
        make_plan(PlanningConfig(policy="equal_tokens", m_mem=100, p=p), samples, 2, seed=0)
        for p in (None, 1.5, 3.0)
    ]
    assert len({plan.fingerprint() for plan in plans}) == 1


def test_the_order_of_row_names_does_not_affect_the_fingerprint():
    samples = of_lengths(10, 20, 10)
    plans = [
        make_plan(PlanningConfig(policy="fixed", rows=rows), samples, 2, seed=0)
        for rows in ({"10": 2, "20": 1}, {"20": 1, "10": 2})
    ]
    assert plans[0].fingerprint() == plans[1].fingerprint()


def test_ranks_of_the_mesh_and_of_the_config_are_the_same_ranks():
    samples = of_lengths(10, 20, 10)
    from_mesh = make_plan(PlanningConfig(policy="dual_constraint", m_mem=100), samples, 3, seed=0)
    from_config = make_plan(
        PlanningConfig(policy="dual_constraint", m_mem=100, ranks=3), samples, 8, seed=0
    )
    assert from_mesh.fingerprint() == from_config.fingerprint()
    assert (
        from_mesh.fingerprint()
        != make_plan(
            PlanningConfig(policy="dual_constraint", m_mem=100), samples, 8, seed=0
        ).fingerprint()
    )


def test_a_whole_number_and_the_same_float_are_the_same_setting():
    samples = of_lengths(10, 20, 10)
    whole = make_plan(PlanningConfig(policy="dual_constraint", m_mem=100, p=2), samples, 2, seed=0)
    real = make_plan(PlanningConfig(policy="dual_constraint", m_mem=100, p=2.0), samples, 2, seed=0)
    assert whole.identity() == real.identity()
    assert whole.fingerprint() == real.fingerprint()


# --------------------------------------------------------------------------------- speed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("buckets", [400, 50_000])
def test_two_hundred_thousand_samples_plan_in_seconds(policy, mode, buckets):
    lengths = np.random.default_rng(0).integers(1, buckets + 1, 200_000)
    samples = Samples(np.zeros((len(lengths), 3), np.int64), lengths)
    config = PlanningConfig(policy=policy, m_mem=8 * buckets, rows=4, ranks=8, ranks_mode=mode)
    began = time.process_time()
    plan = make_plan(config, samples, 8, seed=0)
    plan.step(0)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("policy", ["balanced", "first_fit", "equal_tokens", "dual_constraint"])
def test_an_epoch_begins_at_its_first_step(policy):
    samples = make_workload("mixed-resolution", 300)
    plan = make_plan(PlanningConfig(policy=policy, m_mem=90_000), samples, 2, 0)
    firsts = [plan.first_step(epoch) for epoch in (3, 0, 1, 2)]
    assert [plan.locate(first) for first in firsts] == [(3, 0), (0, 0), (1, 0), (2, 0)]
    assert firsts[1] == 0
    steps = sum(plan.epoch(epoch).steps for epoch in range(3))
    assert firsts[0] == steps
