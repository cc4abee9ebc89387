"""Plans for the least time to a loss, where the noise of gradients is known."""

import dataclasses

import numpy as np
import pytest
from planning_cases import WAN, of_lengths, refused

from alload_jax.planning.cost import CostFile
from alload_jax.planning.factory import choose_policy, make_plan, make_policy
from alload_jax.planning.policies.balanced import RowTrials
from alload_jax.planning.policies.policy import RankTopology, makespan, time_to_loss
from alload_jax.planning.settings import PlanningConfig, policy_config
from alload_jax.planning.study import Study, advice

COSTS = CostFile(quadratic=WAN)
NOISY = PlanningConfig("balanced", m_mem=131_072, noise_scale=60.0)


def samples_of(count, longest, seed=0):
    """Log-normal lengths."""
    drawn = np.random.default_rng(seed).lognormal(7.5, 1.2, count)
    return of_lengths(*np.clip(drawn, 8, longest).astype(int).tolist())


def loss_time(plan, noise_scale):
    """By its definition: a step makes 1 / (1 + noise over signal) of the progress."""
    epoch = plan.epoch(0)
    steps = [[] for _ in range(epoch.steps)]
    for work in range(len(epoch.rows)):
        steps[epoch.step[work]] += epoch.sample[epoch.parts_of(work)].tolist()
    counts = np.array([len(set(step)) for step in steps], float)
    mean = counts.mean()
    noise = noise_scale / mean + np.mean((counts / mean - 1) ** 2)
    return makespan(epoch, COSTS.quadratic) / epoch.steps * (1 + noise)


@pytest.mark.parametrize("policy", ["sorted:independent", "balanced", "first_fit"])
def test_noise_and_uneven_steps_take_time(policy):
    config = policy_config(dataclasses.replace(NOISY, noise_scale=None), policy)
    plan = make_plan(config, samples_of(600, 32_760), 4, 0, COSTS)
    found = time_to_loss(plan.epoch(0), COSTS.quadratic, 60.0)
    assert found == pytest.approx(loss_time(plan, 60.0))


@pytest.mark.parametrize(
    ("count", "ranks", "noise_scale"), [(300, 2, 1e5), (1000, 4, 3.0), (9000, 64, 300.0)]
)
def test_no_other_row_reaches_a_loss_much_sooner(count, ranks, noise_scale):
    samples, config = samples_of(count, 32_760), dataclasses.replace(NOISY, noise_scale=noise_scale)
    found = loss_time(make_plan(config, samples, ranks, 0, COSTS), noise_scale)
    for tokens, spread in ((32_768, 1.3), (46_000, None), (65_536, 2.5), (131_072, 1.3)):
        other = dataclasses.replace(
            config, noise_scale=None, row_tokens=tokens, sample_spread=spread
        )
        assert found <= 1.03 * loss_time(make_plan(other, samples, ranks, 0, COSTS), noise_scale)


def test_the_less_noise_the_fewer_samples_of_a_step():
    samples, found = samples_of(1000, 32_760), []
    for noise_scale in (1.0, 100.0, 1e6, None):
        config = dataclasses.replace(NOISY, noise_scale=noise_scale)
        found.append(make_plan(config, samples, 4, 0, COSTS))
    steps = [plan.epoch(0).steps for plan in found]
    assert steps[0] > 1.5 * steps[2]
    assert steps[0] >= steps[1] >= steps[2]
    fields = [dataclasses.asdict(plan.policy) for plan in found[2:]]
    assert fields[0]["row_tokens"] == pytest.approx(fields[1]["row_tokens"], rel=0.05)
    assert "noise_scale" not in found[3].identity()  # that of runs before it was known


@pytest.mark.parametrize("noise_scale", [None, 3.0, 300.0])
def test_what_the_search_leaves_out_cannot_be_faster(noise_scale):
    """The bound of a row is no more than its time, and tells short rows from long ones."""
    samples, ranks = samples_of(120, 8_192), RankTopology(4)
    config = dataclasses.replace(NOISY, noise_scale=noise_scale, max_segments=64)
    trials = RowTrials(make_policy(config, COSTS), samples, ranks)
    footprint = np.sort(-(-samples.seq_len // trials.policy.align) * trials.policy.align)[::-1]
    rows = np.array([8_192, 12_288, 20_480, 32_768, 65_536, 131_072])
    bounds = trials._lower_bounds(rows, footprint)
    times = np.array([trials.time(int(row), 64) for row in rows])
    assert (bounds <= times * (1 + 1e-9)).all()
    assert bounds[0] > 0.6 * times[0]


def test_where_an_empty_row_costs_nothing_less_noise_still_makes_shorter_rows():
    samples, rows = samples_of(300, 32_760), []
    for unit in (1.0, 1e9):  # costs need not be seconds
        attention = {"c0": 0.0, "c1": 0.0, "c_sequence": 0.0, "c2": WAN.c2 * unit}
        costs = CostFile(quadratic=dataclasses.replace(WAN, **attention))
        for scale in (3.0, 1e5):
            config = dataclasses.replace(NOISY, noise_scale=scale)
            rows.append(make_plan(config, samples, 2, 0, costs).policy.row_tokens)
    assert rows[0] < rows[1]
    assert rows[:2] == rows[2:]


def test_auto_takes_the_policy_that_reaches_a_loss_first():
    samples = samples_of(600, 32_760)
    for noise_scale in (2.0, 1e5):
        auto = PlanningConfig(m_mem=131_072, noise_scale=noise_scale)
        chosen = choose_policy(auto, lambda _: samples, 4, COSTS, packs=True).config
        times = {}
        for name in ("equal_tokens", "sorted:independent", "balanced"):
            config = policy_config(auto, name)
            times[config.policy] = loss_time(make_plan(config, samples, 4, 0, COSTS), noise_scale)
        assert times[chosen.policy] <= 1.03 * min(times.values())


def test_plans_tell_how_far_a_step_comes_and_wrong_scales_are_refused():
    study = Study(samples_of(300, 32_760), NOISY, COSTS)
    (said,) = advice(study, [(case := study.case("balanced", 2))])
    steps, time = case.metrics.steps, case.metrics.cost / case.metrics.steps
    slower = loss_time(make_plan(NOISY, study.samples, 2, 0, COSTS), NOISY.noise_scale)
    assert said == (
        f"{case.name}: {300 / steps:,.1f} samples a step make {time / slower:.0%} of the progress "
        f"of one without noise; as much takes {slower:.4g} s."
    )
    for scale in (0, -1.0, float("nan")):
        refused(["planning.noise_scale is", "above 0"], PlanningConfig, noise_scale=scale)
