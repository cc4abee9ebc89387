"""Plans that follow the step times of a run."""

import json
import pickle

import numpy as np
import pytest

from alload_jax.data.source import LoaderConfig
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.planning.cost import CostFile, QuadraticCost, write_cost_file
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload
from alload_jax.training.run_plan import RunPlan

PLANNED = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)
TRUE = QuadraticCost(0.05, 1.7e-5, 3.0e-9, 5e-4)
"""Attention takes three times as long as planned."""


@pytest.fixture
def planning(tmp_path):
    def make(**fields):
        path = tmp_path / "costs.json"
        write_cost_file(path, CostFile(quadratic=PLANNED))
        fields = {"policy": "balanced", "m_mem": 90_000, "recalibrate": "epoch"} | fields
        return PlanningConfig(cost_model=str(path), **fields)

    return make


def run_plan(planning, samples=800, ranks=2):
    plan = make_plan(planning, make_workload("mixed-resolution", samples), ranks, 0)
    return RunPlan(plan, planning, Cluster())


def train(run, first, stop, model=TRUE):
    """Reads steps and reports the times that `model` predicts; returns the steps' samples."""
    found = []
    steps = run.steps(first, stop, lambda step: step, LoaderConfig())
    for step in steps:
        terms = run.metrics(step.index).cost_terms
        run.drift(step.index, terms, float(np.dot(terms, coefficients(model))))
        found.append([part.samples for part in step.micro_batches])
    return found


def coefficients(model):
    return [model.c0, model.c_sequence, model.c1, model.c2]


@pytest.mark.parametrize("policy", ["balanced", "sorted"])
def test_epochs_after_the_first_are_planned_by_the_fitted_model(planning, policy):
    config = planning(policy=policy, ranks_mode="independent")
    run = run_plan(config)
    first = run.plan
    ends = [first.end_of_epoch(0)]
    steps = train(run, 0, 3 * ends[0])
    last = run.plan.locate(len(steps) - 1)[0]
    assert [each.epoch for each in run.plan.recalibrations] == list(range(1, last + 1))
    assert steps[: ends[0]] == [
        [part.samples for part in first.step(n).micro_batches] for n in range(ends[0])
    ]
    assert steps[ends[0] :] != [
        [part.samples for part in first.step(n).micro_batches] for n in range(ends[0], len(steps))
    ]
    model = run.plan.recalibrations[-1].cost
    assert model.c2 / model.c1 == pytest.approx(2 * PLANNED.c2 / PLANNED.c1, rel=0.5)
    # Its predictions are close to the truth, though a coefficient stays within bounds.
    number = len(steps) - 1
    terms = run.metrics(number).cost_terms
    seconds = float(np.dot(terms, coefficients(TRUE)))
    assert abs(run.drift(number, terms, seconds)) < 0.1
    assert run.metrics(number).predicted_cost == pytest.approx(seconds, rel=0.15)


def test_a_continued_run_trains_the_same_steps(planning):
    whole, before = run_plan(planning()), run_plan(planning())
    stop = 3 * whole.plan.steps_per_epoch
    all_steps = train(whole, 0, stop)
    for cut in (5, whole.plan.steps_per_epoch - 1, whole.plan.steps_per_epoch + 7):
        before = run_plan(planning())
        assert train(before, 0, cut) == all_steps[:cut]
        after = run_plan(planning())
        after.restore(json.loads(json.dumps(before.state())))
        assert train(after, cut, stop) == all_steps[cut:]
        assert after.plan.recalibrations == whole.plan.recalibrations


def test_without_recalibration_step_times_change_nothing(planning):
    run = run_plan(planning(recalibrate=None))
    plan, stop = run.plan, 2 * run.plan.steps_per_epoch
    train(run, 0, stop)
    assert run.plan is plan
    assert run.state() is None


def test_short_epochs_keep_their_model_until_enough_steps_are_timed(planning):
    run = run_plan(planning(), samples=100)
    each = run.plan.steps_per_epoch
    assert each < 10
    train(run, 0, 8 * each)
    first = run.plan.recalibrations[0].epoch
    steps = [run.plan.epoch(number).steps for number in range(first)]
    assert sum(steps) >= 20 > sum(steps[:-1])


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_recalibrated_plan_needs_no_other_programs(planning, context):
    config = planning(context=context, m_mem=80_000)
    samples = make_workload("mixed-resolution", 1500)
    plan = make_plan(config, samples, 4, 0)
    changed = plan.recalibrated(1, QuadraticCost(0.1, 1e-5, 4e-9, 1e-3))
    for number in range(3):
        before, after = plan.epoch(number), changed.epoch(number)
        assert before.packing.segments == after.packing.segments
        assert before.packing.split_sizes == after.packing.split_sizes
        assert before.padded_len.max() == after.padded_len.max()
        assert (number == 0) == np.array_equal(before.sample, after.sample)
        placed = np.sort(np.r_[after.sample[after.packing.late == 0], after.left_over.sample])
        assert set(placed.tolist()) == set(range(1500))
    assert changed.identity() == plan.identity()
    again = pickle.loads(pickle.dumps(changed))
    np.testing.assert_array_equal(again.epoch(2).sample, changed.epoch(2).sample)


def test_a_cost_model_without_seconds_is_refused():
    config = PlanningConfig("balanced", m_mem=90_000, recalibrate="epoch")
    with pytest.raises(InputError, match=r"planning\.cost_model predicts no seconds"):
        run_plan(config)


@pytest.mark.parametrize("policy", ["equal_tokens", "dual_constraint", "first_fit"])
def test_policies_without_a_cost_model_that_can_change_are_refused(policy):
    with pytest.raises(InputError, match=f"the plan of {policy} does not follow .* balanced"):
        PlanningConfig(policy, m_mem=100, recalibrate="epoch")


def test_a_run_that_ended_with_an_epoch_fits_before_it_goes_on(planning):
    before = run_plan(planning())
    end = before.plan.end_of_epoch(0)
    train(before, 0, end)
    assert not before.plan.recalibrations
    after = run_plan(planning())
    after.restore(json.loads(json.dumps(before.state())))
    train(after, end, end + 3)
    assert [each.epoch for each in after.plan.recalibrations] == [1]
