"""Rows of the policies that fill buckets, and the ladders of lengths that merge buckets."""

import itertools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import WAN as COST
from planning_cases import examples, of_lengths, of_shapes, refused

from alload_jax.planning.cost import CostFile, MemoryModel
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.policies.bucketed import DualConstraint, EqualTokens, Fixed
from alload_jax.planning.policies.ladder import choose_ladder
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

LENGTHS = st.lists(st.integers(1, 100_000), min_size=1, max_size=12)


def rows_by_bucket(policy, samples):
    buckets = samples.buckets()
    rows = policy.rows_per_bucket(buckets)
    assert rows.dtype == np.int64
    return {buckets.name(k): int(rows[k]) for k in range(len(buckets))}


def rows_by_length(policy, lengths):
    return {int(k): v for k, v in rows_by_bucket(policy, of_lengths(*lengths)).items()}


def exact_quotients(m_comp, seq_len, p):
    """Every value that M_comp // S^p may take: one, but for ties that floats cannot decide."""
    if p == int(p):
        # A hair below a whole number of rows is taken for it, see the policy.
        quotient = Fraction(m_comp) / seq_len ** int(p)
        return {math.floor(quotient), math.floor(quotient * (1 + Fraction(1, 10**9)))}
    with localcontext() as context:
        context.prec = 60
        quotient = Decimal(m_comp) / Decimal(seq_len) ** Decimal(p)
        slack = max(Decimal(1), quotient) * Decimal("1e-12")
        return {math.floor(quotient - slack), math.floor(quotient * (1 + Decimal("1e-9")) + slack)}


@given(
    LENGTHS,
    st.integers(0, 10**6),
    st.sampled_from([1.0, 2.0, 3.0]) | st.floats(0.5, 3.0),
    st.floats(1e-3, 1e3),
)
@examples(60)
def test_rows_are_those_of_the_papers_formulas(lengths, extra, p, share):
    m_mem, m_comp = max(lengths) + extra, share * float(max(lengths)) ** p
    assert rows_by_length(EqualTokens(m_mem), lengths) == {s: m_mem // s for s in lengths}
    found = rows_by_length(DualConstraint(m_mem, m_comp, p), lengths)
    assert found.keys() == set(lengths)
    for seq_len, rows in found.items():
        allowed = exact_quotients(m_comp, seq_len, p)
        assert rows in {max(1, min(m_mem // seq_len, by_compute)) for by_compute in allowed}


def test_dual_constraint_is_exact_at_whole_numbers_of_rows_and_open_beyond_all_work():
    for short, long, p, rows in ((256, 1024, 1.5, 8), (7, 28, 1.5, 8), (397, 3573, 0.5, 3)):
        assert (long // short) ** p == rows
        assert rows_by_length(DualConstraint(10**9, None, p), [short, long])[short] == rows
    for m_comp in (1e12, 1e30, math.inf):
        found = rows_by_length(DualConstraint(1000, m_comp), [1, 10, 100])
        assert found == {1: 1000, 10: 100, 100: 10}


def test_fixed_rows_are_one_number_for_all_or_found_by_the_buckets_name():
    assert rows_by_length(Fixed(7), [10, 20]) == {10: 7, 20: 7}
    assert rows_by_length(Fixed({"10": 3, "20": 1}), [10, 20]) == {10: 3, 20: 1}
    assert rows_by_length(Fixed(2**20), [10]) == {10: 2**20}
    samples = of_shapes((17, 16, 16), (1, 16, 16), (1, 16, 32), (1, 32, 16))
    rows = {"1x16x16": 9, "1x16x32": 5, "1x32x16": 4, "17x16x16": 2, "33x16x16": 1}
    assert rows_by_bucket(Fixed(rows), samples) == {k: rows[k] for k in list(rows)[:4]}
    # Their buckets are not merged.
    samples = of_lengths(*[10] * 8, *[11] * 8)
    epoch = make_plan(PlanningConfig("fixed", rows=4), samples, 1, 0).epoch(0)
    assert set(zip(epoch.padded_len.tolist(), epoch.rows.tolist(), strict=True)) == {
        *((10, 4), (11, 4))
    }


LONG = of_lengths(50, 100, 99, 300, 100)
TOO_LONG = ["m_mem is 99 tokens", "at least 300", "sample 1 (100 tokens), 4 (100 tokens), 3 (300 "]
SHAPES = of_shapes((1, 16, 16), (17, 16, 16))


def test_samples_longer_than_memory_and_wrong_rows_are_refused():
    for policy, samples, said in (
        (EqualTokens(99), LONG, ["equal_tokens", *TOO_LONG]),
        (DualConstraint(99), LONG, ["dual_constraint", *TOO_LONG]),
        (Fixed(1, 99), LONG, ["fixed", *TOO_LONG]),
        (EqualTokens(100), of_lengths(*[200] * 8, 10), ["4 (200 tokens) and 3 more; it"]),
        (Fixed({"1x16x16": 4, "17x16x16": 0}), SHAPES, ["17x16x16", "0 rows", "at least 1"]),
        (Fixed(2**20 + 1), SHAPES, ["1048577 rows", "at most 1,048,576"]),
        (Fixed({"1x16x16": 4, "9x16x16": 1}), SHAPES, ["no bucket 17x16x16", "1x16x16, 9x16x16"]),
        (Fixed(4, 15), SHAPES, ["bucket 17x16x16", "4 rows", "m_mem = 15", "at most 3 rows"]),
    ):
        refused(said, policy.rows_per_bucket, samples.buckets())
        for enough in (EqualTokens(300), DualConstraint(300), Fixed(1, 300)):
            assert enough.rows_per_bucket(LONG.buckets())[-1] == 1


def found_by(samples, ranks, costs=CostFile(quadratic=COST), **settings):  # noqa: B008
    plan = make_plan(PlanningConfig(**settings), samples, ranks, 0, costs)
    return plan_metrics(plan.epoch(0), COST, settings.get("m_mem"))


def padding_of(rungs, lengths):
    """Padding of samples that are padded to the rungs alone."""
    padded = np.asarray(rungs)[np.searchsorted(rungs, lengths)]
    return 1 - lengths.sum() / padded.sum()


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.01, 0.2]),
)
@examples(30)
def test_little_padding_is_found_where_so_few_buckets_allow_it(lengths, most, program_share):
    """Of the ladders with little padding, or else of all, it is one that takes least time."""
    lengths = np.asarray(lengths)
    shapes = of_lengths(*lengths.tolist()).buckets()
    ladder = choose_ladder(
        shapes, lambda found: np.ones_like(found.seq_len), 1, most, program_share
    )

    def rank(rungs):
        padding = padding_of(rungs, lengths)
        return padding > 0.05, padding + program_share * len(rungs)

    *lower, longest = np.unique(lengths).tolist()
    sizes = range(min(most, len(lower) + 1))
    possible = [[*each, longest] for n in sizes for each in itertools.combinations(lower, n)]
    assert rank(ladder.lengths) == min(map(rank, possible))


def test_few_samples_of_many_shapes_fill_their_rows():
    """Rows were always M_mem // S: half of what 32 samples of 15 shapes computed was padding."""
    lengths = np.random.default_rng(1).choice([64, 63, 60, 66, 1088, 1071, 1020, 1122], 32)
    samples = of_lengths(*lengths.tolist())
    assert found_by(samples, 1, CostFile(), policy="equal_tokens", m_mem=4352).padding <= 0.1


def test_short_sequences_are_bounded_by_the_memory_of_their_conditions():
    samples = of_lengths(*[16] * 40_000, 4000)
    costs = CostFile(quadratic=COST, memory=MemoryModel(0.0, 1.0, 30.0))
    epoch = make_plan(PlanningConfig("equal_tokens", m_mem=100_000), samples, 1, 0, costs).epoch(0)
    share = epoch.rows * (epoch.padded_len + 30) / (100_000 * (1 + 30 / 256))
    assert 0.5 < share.max() <= 1


WAN, MIXED, VIDEOS = "wan-480p", "mixed-resolution", "long-video-V45"


@pytest.mark.parametrize(
    ("policy", "workload", "options", "total"),
    [
        ("fixed", WAN, {"rows": 2}, -233998.99),
        ("equal_tokens", WAN, {}, 136165.61),
        ("equal_tokens", MIXED, {"max_programs": 7}, -93727.32),
        ("sorted", WAN, {}, 87563.02),
        ("sorted", MIXED, {"ranks_mode": "independent"}, -29316.66),
        ("dual_constraint", WAN, {}, 28699.72),
        ("dual_constraint", MIXED, {"ranks_mode": "independent"}, 125232.81),
        ("first_fit", WAN, {"look_ahead": 2}, -282029.8),
        ("first_fit", MIXED, {"max_segments": 3, "align": 64}, 267767.03),
        ("balanced", WAN, {}, -14352.11),
        ("balanced", MIXED, {"sample_spread": None}, -376352.07),
        ("balanced", MIXED, {"max_segments": 9, "micro_batches_per_step": 2}, -64698.28),
        ("balanced", VIDEOS, {"m_mem": 350000, "look_ahead": 2}, -1047808.11),
        ("balanced", VIDEOS, {"m_mem": 360000, "context": "auto"}, 184012.49),
        ("balanced", WAN, {"context": 4, "m_mem": 20000}, 26841.76),
        ("balanced", WAN, {"context": 2, "split_above": 0.5, "row_tokens": 40000}, -212005.99),
    ],
)
def test_plans_are_those_of_earlier_versions(policy, workload, options, total):
    """Else a run would go on with other steps. All places are summed up, each with a factor."""
    config = PlanningConfig(policy=policy, **{"m_mem": 80_000} | options)
    epoch = make_plan(config, make_workload(workload, 300, seed=3), 4, seed=1).epoch(1)
    part = epoch.micro_batch_of_part()
    columns = (epoch.step, epoch.rank, epoch.padded_len)
    found = sum(column[part] for column in columns) + epoch.sample + epoch.part_offsets()
    assert np.cos(np.arange(len(part))) @ found == pytest.approx(total, abs=0.01)
