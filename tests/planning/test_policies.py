import itertools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import cases, examples, of_lengths, of_shapes, refusal

from alload_jax.planning.cost import CostFile, QuadraticCost
from alload_jax.planning.factory import make_plan, make_policy
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.policies.bucketed import DualConstraint, EqualTokens, Fixed
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


@given(LENGTHS, st.integers(0, 10**6))
@examples(80)
def test_equal_tokens_rows_are_m_mem_over_length(lengths, extra):
    m_mem = max(lengths) + extra
    expected = {s: m_mem // s for s in lengths}
    assert rows_by_length(EqualTokens(m_mem), lengths) == expected


@given(
    LENGTHS,
    st.integers(0, 10**6),
    st.sampled_from([1.0, 2.0, 3.0]) | st.floats(0.5, 3.0),
    st.floats(1e-3, 1e3),
)
@examples(150)
def test_dual_constraint_rows_are_the_papers_formula(lengths, extra, p, share):
    m_mem, m_comp = max(lengths) + extra, share * float(max(lengths)) ** p
    found = rows_by_length(DualConstraint(m_mem, m_comp, p), lengths)
    assert found.keys() == set(lengths)
    for seq_len, rows in found.items():
        allowed = exact_quotients(m_comp, seq_len, p)
        assert rows in {max(1, min(m_mem // seq_len, by_compute)) for by_compute in allowed}


@given(LENGTHS, st.integers(0, 10**6), st.sampled_from([1, 2, 3]))
@examples(60)
def test_dual_constraint_takes_its_default_m_comp_from_the_longest_alone(lengths, extra, p):
    longest = max(lengths)
    m_mem = longest + extra
    expected = {s: max(1, min(m_mem // s, longest**p // s**p)) for s in lengths}
    assert rows_by_length(DualConstraint(m_mem, None, float(p)), lengths) == expected


@pytest.mark.parametrize(
    ("short", "long", "p", "rows"), [(256, 1024, 1.5, 8), (7, 28, 1.5, 8), (397, 3573, 0.5, 3)]
)
def test_dual_constraint_is_exact_where_the_bound_is_a_whole_number_of_rows(short, long, p, rows):
    assert (long // short) ** p == rows
    assert rows_by_length(DualConstraint(10**9, None, p), [short, long])[short] == rows


@given(LENGTHS, st.integers(1, 8))
@examples(30)
def test_dual_constraint_never_takes_more_rows_than_equal_tokens(lengths, factor):
    m_mem = factor * max(lengths)
    most = rows_by_length(EqualTokens(m_mem), lengths)
    for seq_len, rows in rows_by_length(DualConstraint(m_mem), lengths).items():
        assert 1 <= rows <= most[seq_len]


@pytest.mark.parametrize("m_comp", [1e12, 1e19, 1e30, math.inf])
def test_a_compute_bound_beyond_all_work_leaves_equal_tokens(m_comp):
    lengths = [1, 10, 100]
    assert rows_by_length(DualConstraint(1000, m_comp), lengths) == {1: 1000, 10: 100, 100: 10}


@given(LENGTHS, st.integers(1, 64))
@examples(30)
def test_fixed_rows_are_one_number_for_all(lengths, rows):
    assert rows_by_length(Fixed(rows), lengths) == dict.fromkeys(lengths, rows)


def test_fixed_rows_are_found_by_the_buckets_name():
    samples = of_shapes((17, 16, 16), (1, 16, 16), (1, 16, 32), (1, 32, 16))
    rows = {"1x16x16": 9, "1x16x32": 5, "1x32x16": 4, "17x16x16": 2, "33x16x16": 1}
    assert rows_by_bucket(Fixed(rows), samples) == {k: rows[k] for k in list(rows)[:4]}


def test_fixed_rows_of_lengths_are_found_by_length():
    assert rows_by_length(Fixed({"10": 3, "20": 1}), [10, 20]) == {10: 3, 20: 1}


@given(cases())
@examples(100)
def test_no_policy_holds_more_than_memory_or_less_than_a_row(case):
    manifest, config, _ = case
    buckets = manifest.samples().buckets()
    rows = make_policy(config).rows_per_bucket(buckets)
    assert rows.shape == (len(buckets),)
    assert (rows >= 1).all()
    if config.m_mem is not None:
        assert (rows * buckets.seq_len <= config.m_mem).all()


@pytest.mark.parametrize("policy", [EqualTokens(99), DualConstraint(99), Fixed(1, 99)])
def test_a_sample_longer_than_memory_is_refused(policy):
    samples = of_lengths(50, 100, 99, 300, 100)
    message = refusal(policy.rows_per_bucket, samples.buckets())
    name = {"EqualTokens": "equal_tokens", "DualConstraint": "dual_constraint", "Fixed": "fixed"}
    assert name[type(policy).__name__] in message
    assert "m_mem is 99 tokens" in message
    for sample in ("1 (100 tokens)", "4 (100 tokens)", "3 (300 tokens)"):
        assert sample in message
    assert "at least 300" in message
    assert "(99 tokens)" not in message
    assert "more;" not in message


def test_a_refusal_counts_the_samples_that_it_does_not_name():
    samples = of_lengths(*[200] * 8, 10)
    message = refusal(EqualTokens(100).rows_per_bucket, samples.buckets())
    assert message.count("(200 tokens)") == 5
    assert "and 3 more" in message


@given(LENGTHS, st.sampled_from([EqualTokens, DualConstraint]))
@examples(30)
def test_memory_for_the_longest_sample_is_enough_and_one_token_less_is_not(lengths, policy):
    buckets = of_lengths(*lengths).buckets()
    assert policy(max(lengths)).rows_per_bucket(buckets)[-1] == 1
    assert f"at least {max(lengths)}" in refusal(policy(max(lengths) - 1).rows_per_bucket, buckets)


@pytest.mark.parametrize("rows", [0, -2])
def test_fixed_rows_below_one_are_refused(rows):
    buckets = of_shapes((1, 16, 16), (17, 16, 16)).buckets()
    message = refusal(Fixed({"1x16x16": 4, "17x16x16": rows}).rows_per_bucket, buckets)
    for part in ("planning.rows", "17x16x16", f"{rows} rows", "at least 1"):
        assert part in message


def test_fixed_rows_that_leave_a_bucket_out_are_refused():
    buckets = of_shapes((1, 16, 16), (17, 16, 16)).buckets()
    message = refusal(Fixed({"1x16x16": 4, "9x16x16": 1}).rows_per_bucket, buckets)
    for part in ("planning.rows", "no bucket 17x16x16", "1x16x16, 9x16x16"):
        assert part in message


def test_fixed_rows_over_memory_are_refused():
    buckets = of_lengths(10, 30).buckets()
    message = refusal(Fixed(4, 100).rows_per_bucket, buckets)
    for part in ("bucket 30", "4 rows", "30 tokens", "m_mem = 100", "at most 3 rows fit"):
        assert part in message


@given(cases(policies=("sorted",), modes=("independent",)))
@examples(60)
def test_sorted_puts_neighbours_in_cost_into_a_step(case):
    manifest, config, seed = case
    samples = manifest.samples()
    epoch = make_plan(config, samples, 1, seed).epoch(0)
    cost = epoch.rows * epoch.padded_len.astype(float) ** (config.p or 2.0)
    turn = epoch.step * config.micro_batches_per_step + epoch.micro_batch
    spans = sorted((cost[turn == n].min(), cost[turn == n].max()) for n in np.unique(turn))
    # No two groups of ranks overlap in cost by more than their ends.
    for (_, most), (least, _) in itertools.pairwise(spans):
        assert most <= least


def test_sorted_needs_no_more_programs_than_shapes_and_idles_hardly():
    samples = make_workload("mixed-resolution", 20_000)
    cost = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)
    config = PlanningConfig("sorted", m_mem=81_920, ranks_mode="independent")
    epoch = make_plan(config, samples, 8, 0, CostFile(quadratic=cost)).epoch(0)
    found = plan_metrics(epoch, samples.seq_len, cost, 81_920)
    assert found.idle < 0.01
    assert found.buckets <= 64
    assert found.padding < 0.05
    assert abs(found.order_correlation) < 0.2
