"""M_comp, rows, context sizes and bounds that are searched, against exhaustive searches; advice."""

from dataclasses import replace

import numpy as np
import pytest
from planning_cases import of_lengths, refused

from alload_jax.planning.cost import CostFile, PowerCost, QuadraticCost
from alload_jax.planning.factory import longest_alone, m_comp_curve, make_plan, with_best_context
from alload_jax.planning.metrics import plan_metrics
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.balanced import Balanced
from alload_jax.planning.policies.bucketed import DualConstraint
from alload_jax.planning.policies.policy import RankTopology, makespan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import Study, advice
from alload_jax.planning.workloads import make_workload

LENGTHS = [100] * 400 + [400] * 100 + [2000] * 20
COST = QuadraticCost(1e-3, 1e-5, 1e-7)
INDEPENDENT = RankTopology(4, "independent")
COSTS = CostFile(quadratic=QuadraticCost(0.044, 2.0e-5, 1.2e-9, 1.1e-3))
"""About seconds of Wan 2.1's 1.3B model on an H200."""


def config(**fields):
    given = {"policy": "dual_constraint", "ranks_mode": "independent"} | fields
    return PlanningConfig(**given, m_mem=4000, ranks=4, p=2.0)


def test_the_curve_is_what_an_epoch_is_predicted_to_take_and_auto_takes_the_least():
    samples, costs = of_lengths(*LENGTHS), CostFile(quadratic=COST)
    curve = m_comp_curve(config(), samples, INDEPENDENT, costs)
    assert (np.diff(curve.m_comp) > 0).all()
    assert len(curve.m_comp) >= 17 + 9
    assert curve.m_comp[0] == pytest.approx(100**2)
    assert curve.m_comp[-1] == pytest.approx(2000**2 * 2)
    for m_comp, cost in list(zip(curve.m_comp, curve.cost, strict=True))[::8]:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([0, 0])))
        plan = DualConstraint(4000, float(m_comp), 2.0).plan_epoch(samples, INDEPENDENT, rng)
        assert cost == pytest.approx(plan_metrics(plan, COST, None).cost)
    plan = make_plan(config(m_comp="auto"), samples, 4, 0, costs)
    assert plan.policy.m_comp == curve.chosen
    assert curve.cost[curve.m_comp == curve.chosen] == curve.cost.min()
    flat = replace(curve, cost=np.ones_like(curve.cost))
    assert flat.chosen == curve.m_comp[-1]  # of equals the largest
    by_power = CostFile(power=PowerCost(1.5, 1e-6))
    assert make_plan(config(m_comp="auto"), samples, 4, 0, by_power).policy.m_comp > 0
    assert make_plan(config(policy="balanced", m_comp="auto"), samples, 4, 0, costs).epoch(0)


def test_longest_is_the_cost_of_the_longest_sample_alone():
    samples = of_lengths(*LENGTHS)
    plan = make_plan(config(m_comp="longest"), samples, 4, 0)
    assert (plan.policy.m_comp, plan.policy.p) == (2000.0**2, 2.0)
    left_open = make_plan(config(), samples, 4, 0)
    assert (plan.epoch(0).sample == left_open.epoch(0).sample).all()
    expected = 1e-3 + 1e-5 * 4000 + 1e-7 * 2000**2
    assert longest_alone(Balanced(4000, COST), samples) == pytest.approx(expected)


def test_a_large_data_set_is_drawn_from_and_its_epoch_scaled():
    samples = of_lengths(*LENGTHS * 60)
    costs = CostFile(quadratic=COST)
    curve = m_comp_curve(config(), samples, INDEPENDENT, costs)
    whole = make_plan(config(m_comp=curve.chosen), samples, 4, 0, costs)
    found = plan_metrics(whole.epoch(0), COST, None).cost
    assert curve.cost.min() == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize(
    ("name", "mode"), [("long-video-V35", "independent"), ("wan-480p", "synchronous")]
)
def test_auto_is_never_slower_than_the_plan_that_memory_alone_bounds(name, mode):
    """The search plans a draw; on the whole set its choice was 5 % slower than no bound."""
    samples, costs = make_workload(name, 30_000), CostFile(quadratic=COST)
    settings = PlanningConfig("dual_constraint", m_mem=350_000, ranks_mode=mode, m_comp="auto")
    found = make_plan(settings, samples, 8, 0, costs)
    open_bound = make_plan(replace(settings, m_comp=1e30), samples, 8, 0, costs)
    times = [makespan(plan.epoch(0), COST) for plan in (found, open_bound)]
    assert times[0] <= times[1]


def test_what_cannot_be_searched_is_refused():
    long, costs = of_lengths(1000, 1100, 1005), CostFile(quadratic=COST)
    free = CostFile(quadratic=QuadraticCost(0, 0, 0))
    given = PlanningConfig("dual_constraint", m_mem=500, m_comp="auto")
    few = (of_lengths(5), INDEPENDENT)
    for words, action, *args in (
        (
            "no M_comp; choose dual_constraint or balanced",
            m_comp_curve,
            config(policy="equal_tokens"),
            *few,
            costs,
        ),
        ("predicts a cost of 0 for samples", m_comp_curve, config(policy="balanced"), *few, free),
        ("m_mem must be at least 1100", make_plan, given, long, 2, 0),
        ("auto or longest", lambda: config(m_comp="")),
        ("auto or longest", lambda: config(m_comp="0x")),
    ):
        refused([words], action, *args)


def drawn_case(seed):
    """Lengths of 10 to 4,000 samples, 1 to 128 ranks, and M_mem."""
    rng = np.random.default_rng(seed)
    count = int(np.exp(rng.uniform(np.log(10), np.log(4000))))
    ranks = int(2 ** rng.integers(0, 8)) if rng.random() < 0.6 else int(rng.integers(1, 129))
    lengths = (
        lambda: np.exp(rng.normal(rng.uniform(6, 9.5), rng.uniform(0.2, 1.3), count)),
        lambda: rng.choice(rng.integers(200, 80_000, rng.integers(1, 7)), count),
        lambda: np.where(
            rng.random(count) < rng.uniform(0.02, 0.5),
            rng.integers(20_000, 76_000),
            rng.integers(256, 4000, count),
        ),
        lambda: rng.integers(256, rng.integers(1000, 76_000), count),
    )[seed % 4]()
    lengths = np.maximum(16, lengths).astype(int)
    return lengths, ranks, int(lengths.max() * np.exp(rng.uniform(0, np.log(6))))


def rate(plan):
    seq_len = plan.samples.seq_len
    return seq_len.sum() / makespan(plan.epoch(0), COSTS.quadratic)


@pytest.mark.parametrize(
    "seed", [*range(1, 6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 17))]
)
def test_the_tokens_of_a_row_are_as_good_as_any(seed):
    lengths, ranks, m_mem = drawn_case(seed)
    samples = of_lengths(*lengths.tolist())
    config = PlanningConfig("balanced", m_mem=m_mem, sample_spread=None if seed % 3 else 2.5)
    plan = make_plan(config, samples, ranks, 0, COSTS)
    best, tokens = 0.0, float(lengths.max())
    while tokens <= m_mem:
        policy = replace(plan.policy, row_tokens=int(tokens))
        best = max(best, rate(Plan(samples, policy, RankTopology(ranks), 0)))
        tokens *= 1.03
    assert lengths.max() <= plan.policy.row_tokens <= m_mem
    assert rate(plan) >= 0.98 * best


@pytest.mark.parametrize("seed", [19, 71])
def test_no_epoch_of_few_samples_takes_a_step_more_by_chance(seed):
    """Rows that all samples of the first epoch just fit into took half as long again in others."""
    lengths, ranks, m_mem = drawn_case(seed)
    plan = make_plan(
        PlanningConfig("balanced", m_mem=m_mem), of_lengths(*lengths.tolist()), ranks, 7, COSTS
    )
    times = [makespan(plan.epoch(number), COSTS.quadratic) for number in range(8)]
    assert max(times) < 1.05 * min(times)


@pytest.mark.parametrize("giants", [1, 4])
def test_context_and_row_are_chosen_together(giants):
    rng = np.random.default_rng(giants - 1)
    lengths = np.exp(rng.normal(8, 0.8, 120)).astype(int) + 16
    lengths[:giants] = rng.integers(60_000, 200_000, giants)
    samples = of_lengths(*lengths.tolist())
    auto = PlanningConfig("balanced", m_mem=220_000, context="auto")
    fixed = [replace(auto, context=context) for context in (1, 2, 4, 8)]
    best = max(rate(make_plan(each, samples, 8, 0, COSTS)) for each in fixed)
    assert rate(make_plan(auto, samples, 8, 0, COSTS)) >= 0.98 * best


def test_a_context_may_be_any_number_and_the_plan_counts_what_it_sends():
    samples = of_lengths(*[500] * 300, 90_000)
    costs = replace(COSTS, model={"num_heads": 12}, bytes_per_split_token=1e6)
    split = PlanningConfig("balanced", m_mem=100_000, context=8, link_bandwidth=1e9)
    assert make_plan(split, samples, 64, 0, costs).policy.context == 8
    # Four ranks exchange heads, and each gets the keys and values of four others.
    by_heads = replace(costs, model={"num_heads": 16})
    found = [split.seconds_per_split_token(each) for each in (costs, by_heads)]
    assert found == pytest.approx([1.25e-3, 0.875e-3])


def test_a_small_set_gets_rows_of_its_size():
    """Rows had at least half of M_mem, however few samples there were."""
    samples = of_lengths(*[1200] * 8)
    plan = make_plan(PlanningConfig("balanced", m_mem=60_000), samples, 8, 0, COSTS)
    assert plan.policy.row_tokens == 1200
    assert plan_metrics(plan.epoch(0), COSTS.quadratic, 60_000).padding == 0
    odd = make_plan(PlanningConfig("balanced", m_mem=32_761), of_lengths(32_760), 8, 0, COSTS)
    assert odd.policy.row_tokens == 32_760  # of odd rows, matrix products copy operands
    study = Study(samples, PlanningConfig(m_mem=60_000), COSTS)
    for compared in (["sorted", "auto", "balanced"], ["auto", "balanced", "sorted"]):
        names = [case.name for case in study.cases(compared, [8])]
        assert names == ["balanced", "sorted (synchronous)"]  # what auto takes is planned once


def told(study, policy, ranks=8):
    return " ".join(advice(study, [study.case(policy, ranks)]))


def test_a_bound_on_samples_that_costs_much_is_relaxed_and_its_price_told():
    rng = np.random.default_rng(0)
    stills = rng.integers(256, 4096, 6000)
    samples = of_lengths(*np.where(rng.random(6000) < 0.05, 75_600, stills).tolist())
    config = PlanningConfig("balanced", m_mem=75_600)
    study = Study(samples, config, COSTS)
    balanced, by_cost = (study.case(name, 8) for name in ("balanced", "sorted:independent"))
    assert balanced.plan.policy.sample_spread != 2.5
    tokens = [case.metrics.tokens_per_second for case in (balanced, by_cost)]
    assert tokens[0] >= 0.97 * tokens[1]
    [said] = advice(study, [balanced])
    assert "would cost" in said
    m_mem = int(said.split("--m-mem ")[1].split()[0])
    larger = Study(samples, replace(config, m_mem=m_mem), COSTS).case("balanced", 8)
    assert larger.plan.policy.sample_spread == 2.5
    assert larger.metrics.tokens_per_second >= 0.985 * tokens[0]


def test_a_bound_on_samples_that_costs_little_stays_and_is_told():
    samples = make_workload("long-video-V35", 2000)
    config = PlanningConfig("balanced", m_mem=350_000)
    assert "The bound of 2.5 (--sample-spread) costs" in told(
        Study(samples, config, COSTS), "balanced"
    )
    unbounded = Study(samples, replace(config, sample_spread=None), COSTS)
    assert "--sample-spread" not in told(unbounded, "balanced")


def test_an_m_comp_that_does_not_bind_is_explained():
    samples = make_workload("mixed-resolution", 1000)
    for m_comp, explained in (("longest", True), (1e9, False)):
        config = PlanningConfig("balanced", m_mem=81_920, m_comp=m_comp)
        said = told(Study(samples, config, COSTS), "dual_constraint:independent")
        assert ("M_comp does not bind" in said) == explained


def test_one_giant_is_named_with_the_context_that_splits_it_which_auto_chooses():
    short = [500] * 200
    samples = of_lengths(*short, 60_000)
    config = PlanningConfig("balanced", m_mem=60_000)
    study = Study(samples, config, COSTS)
    whole = study.case("balanced", 4)
    said = " ".join(advice(study, [whole]))
    assert "one sample of 60,000 tokens" in said
    uniform = Study(of_lengths(*short), config, COSTS)
    assert "other ranks wait" not in told(uniform, "balanced")
    chosen = with_best_context(config, samples, RankTopology(4), COSTS).context
    assert f"--context {chosen} splits" in said
    # A group would only avoid rows of an odd number of tokens, which are predicted to be faster.
    lengths = of_lengths(26_953, *[5390] * 115)
    said = told(Study(lengths, replace(config, m_mem=26_953), COSTS), "balanced", 2)
    assert "other ranks wait" in said
    assert "--context" not in said
    study = Study(samples, replace(config, context="auto"), COSTS)
    auto = study.case("balanced", 4)
    assert auto.config.context == chosen > 2
    assert "other ranks wait" not in " ".join(advice(study, [auto]))
    assert auto.metrics.tokens_per_second > 2 * whole.metrics.tokens_per_second
