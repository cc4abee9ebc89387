"""What `alload plan` says about its plans beside the figures."""

from planning_cases import of_lengths

from alload_jax.planning.cost import CostFile, QuadraticCost
from alload_jax.planning.factory import with_best_context
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.study import Study, advice
from alload_jax.planning.workloads import make_workload

WAN = CostFile(quadratic=QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4))


def told(samples, policy, ranks=8, **fields):
    study = Study(samples, PlanningConfig("balanced", **fields), WAN)
    return " ".join(advice(study, [study.case(policy, ranks)]))


def test_an_m_comp_that_does_not_bind_is_explained():
    samples = make_workload("mixed-resolution", 3000)
    longest = {"m_mem": 81_920, "m_comp": "longest"}
    assert "M_comp does not bind" in told(samples, "dual_constraint:independent", **longest)
    bound = told(samples, "dual_constraint:independent", m_mem=81_920, m_comp=1e9)
    assert "M_comp" not in bound


def test_one_giant_is_named_with_the_context_that_splits_it_which_auto_chooses():
    short = [500] * 2000
    samples = of_lengths(*short, 300_000)
    study = Study(samples, PlanningConfig("balanced", m_mem=300_000), WAN)
    whole = study.case("balanced", 16)
    found = " ".join(advice(study, [whole]))
    assert "one sample of 300,000 tokens" in found
    assert "--context" in found
    uniform = of_lengths(*short)
    assert "other ranks wait" not in told(uniform, "balanced", ranks=16, m_mem=300_000)

    config = PlanningConfig("balanced", m_mem=300_000, context="auto")
    chosen = with_best_context(config, samples, RankTopology(16), WAN).context
    study = Study(samples, config, WAN)
    auto = study.case("balanced", 16)
    assert auto.config.context == chosen > 4
    assert "other ranks wait" not in " ".join(advice(study, [auto]))
    assert auto.metrics.tokens_per_second > 2.7 * whole.metrics.tokens_per_second


def test_the_price_of_even_steps_is_told():
    samples = make_workload("long-video-V35", 3000)
    found = told(samples, "balanced", m_mem=350_000)
    assert "The bound of 2.5 (--sample-spread) costs" in found
    assert "--sample-spread" not in told(samples, "balanced", m_mem=350_000, sample_spread=None)
