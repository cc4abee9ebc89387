import numpy as np
import pytest
from planning_cases import of_lengths

from alload_jax.planning.cost import PowerCost, QuadraticCost
from alload_jax.planning.metrics import SimulationSettings, plan_metrics, simulate
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.bucketed import Fixed
from alload_jax.planning.policies.policy import RankTopology

LINEAR = PowerCost(1.0)


def epoch_of(lengths, ranks, rows=1, mode="independent"):
    samples = of_lengths(*lengths)
    return Plan(samples, Fixed(rows), RankTopology(ranks, mode), 0).epoch(0), samples.seq_len


def test_a_simulation_without_noise_matches_the_metrics():
    plan, seq_len = epoch_of([10, 30, 20, 20, 50], 2)
    found = simulate(plan, seq_len, LINEAR, SimulationSettings())
    expected = plan_metrics(plan, seq_len, LINEAR, None)
    assert found.seconds == pytest.approx(expected.cost)
    assert found.imbalance == pytest.approx(expected.imbalance)
    assert found.imbalance_max == pytest.approx(expected.imbalance_max)
    assert found.idle == pytest.approx(expected.idle)
    assert found.step_cv == pytest.approx(expected.step_cv)
    assert found.tokens_per_second == pytest.approx(130 / expected.cost)
    assert found.samples_per_second == pytest.approx(5 / expected.cost)


def test_the_all_reduce_delays_every_step_and_leaves_ranks_idle():
    plan, seq_len = epoch_of([10] * 4, 2)
    found = simulate(plan, seq_len, LINEAR, SimulationSettings(all_reduce=5.0))
    assert found.seconds == pytest.approx(2 * 15)
    assert found.idle == pytest.approx(5 / 15)
    assert found.imbalance == 0


def test_noise_keeps_the_work_but_makes_ranks_wait():
    plan, seq_len = epoch_of([10] * 8000, 8)
    quiet = simulate(plan, seq_len, LINEAR, SimulationSettings())
    noisy = simulate(plan, seq_len, LINEAR, SimulationSettings(noise=0.05))
    # The mean of the largest of 8 standard normal numbers is 1.4236.
    assert noisy.seconds / quiet.seconds == pytest.approx(1 + 0.05 * 1.4236, rel=0.01)
    assert noisy.idle == pytest.approx(1 - 1 / (1 + 0.05 * 1.4236), abs=0.005)


def test_equal_seeds_give_equal_simulations():
    plan, seq_len = epoch_of([10, 20] * 50, 4)
    once, again, other = (
        simulate(plan, seq_len, LINEAR, SimulationSettings(0.1, 0.0, seed)) for seed in (1, 1, 2)
    )
    assert once == again
    assert once.seconds != other.seconds


def test_a_plan_that_costs_nothing_has_no_speed():
    plan, seq_len = epoch_of([10, 20], 2)
    found = simulate(plan, seq_len, QuadraticCost(0, 0, 0), SimulationSettings())
    assert (found.seconds, found.tokens_per_second, found.idle) == (0, 0, 0)
    assert np.isfinite([found.imbalance, found.step_cv]).all()
