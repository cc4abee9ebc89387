"""Metrics of plans, recomputed from the plan's file alone; simulations; and the file itself."""

import dataclasses
import json
import statistics
import warnings
from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from planning_cases import MODES, cases, examples, of_lengths

from alload_jax import cli
from alload_jax.errors import InputError, run_command
from alload_jax.planning.cost import CostFile, PowerCost, QuadraticCost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.metrics import (
    RepeatedNeighbours,
    SimulationSettings,
    coefficient_of_variation,
    idle_fraction,
    imbalance,
    plan_metrics,
    repeated_neighbours,
    simulate,
    step_metrics,
)
from alload_jax.planning.plan import METADATA_KEY, Plan, plan_table, write_plan
from alload_jax.planning.policies.bucketed import Fixed
from alload_jax.planning.policies.policy import RankTopology
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.workloads import make_workload

COSTS = npst.arrays(
    float, npst.array_shapes(min_dims=2, max_dims=2), elements=st.just(0.0) | st.floats(1e-6, 1e6)
)
LINEAR = PowerCost(1.0)


def epoch_of(lengths, ranks, rows=1, mode="independent", micro_batches=1):
    topology = RankTopology(ranks, mode, micro_batches)
    return Plan(of_lengths(*lengths), Fixed(rows), topology, seed=0).epoch(0)


@given(COSTS, st.floats(1e-3, 1e3))
@examples(40)
def test_step_metrics_are_taken_over_the_last_axis_in_any_unit(array, unit):
    for function in (imbalance, idle_fraction, coefficient_of_variation):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = function(array)
        assert found.shape == array.shape[:-1]
        assert found == pytest.approx([float(function(row)) for row in array])
        assert function(array * unit) == pytest.approx(found, abs=1e-9)
    # Idle time and imbalance are two views of one ratio.
    assert 1 / (1 - idle_fraction(array)) - 1 == pytest.approx(imbalance(array), abs=1e-9)


def test_weights_of_long_samples_and_repeated_neighbours_worked_out_by_hand():
    samples = of_lengths(*[1] * 10, *[9] * 10)
    plan = Plan(samples, Fixed({"1": 10, "9": 1}), RankTopology(1), 0)
    found = plan_metrics(plan.epoch(0), LINEAR, None)
    # One step of ten short samples, and ten of a long one each.
    assert (found.longest_weight, found.longest_weight_by_step) == pytest.approx((1, 10))
    epoch = epoch_of([5] * 4, 1, rows=2)
    before, same, other, alone = (
        dataclasses.replace(epoch, sample=np.array(order), offsets=np.array([0, 2, end]))
        for order, end in (([0, 1, 2, 3], 4), ([3, 2, 0, 1], 4), ([0, 2, 1, 3], 4), ([0, 2], 2))
    )
    assert repeated_neighbours(before, same) == pytest.approx((1, 2 / 6))
    assert repeated_neighbours(before, other) == pytest.approx((0, 2 / 6))
    assert repeated_neighbours(before, alone) == (0, 0)
    single = dataclasses.replace(epoch, sample=np.arange(2), offsets=np.array([0, 1, 2]))
    assert repeated_neighbours(single, single) == RepeatedNeighbours(0.0, 0.0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
@examples(20)
def test_dropped_and_duplicated_samples_are_counted(placements):
    epoch = epoch_of([5] * 10, 2, mode="synchronous")
    offsets = np.r_[np.zeros(len(epoch.rows), int), len(placements)]
    broken = dataclasses.replace(epoch, sample=np.array(placements), offsets=offsets)
    found = plan_metrics(broken, LINEAR, None)
    assert found.dropped == 10 - len(set(placements))
    assert found.duplicated == len(placements) - len(set(placements))


def rows_of(plan, epoch, path):
    """The lines of a plan's file."""
    write_plan(path, plan_table({epoch: plan.epoch(epoch)}, plan.identity()))
    return read_plan(path)


def read_plan(path):
    table = pa.parquet.read_table(path)
    return table.to_pylist(), json.loads(table.schema.metadata[METADATA_KEY])


def expected_rows(plan, epoch, lengths):
    """The lines of a bucketed plan's file, by its steps."""
    first = epoch * plan.steps_per_epoch
    return [
        {"epoch": epoch, "step": index, "rank": part.rank, "micro_batch": part.index}
        | {"sample": sample, "seq_len": lengths[sample], "padded_len": part.seq_len}
        | {"tokens": lengths[sample], "offset": row * part.seq_len, "region": "whole"}
        | {"split_tokens": 0, "rows": part.rows, "slots": 0}
        | dict(zip(("frames", "height", "width"), part.shape, strict=True))
        for index in range(plan.steps_per_epoch)
        for part in plan.step(first + index).micro_batches
        for row, sample in enumerate(part.samples)
    ]


def shapes_of_work(rows, settings):
    """{(step, micro_batch): {rank: (rows, padded_len, shape)}}, with ranks that compute padding."""
    work = defaultdict(dict)
    for row in rows:
        shape = (row["frames"], row["height"], row["width"])
        work[row["step"], row["micro_batch"]][row["rank"]] = row["rows"], row["padded_len"], shape
    if settings["mode"] == "synchronous":
        for held in work.values():
            (shared,) = set(held.values())
            held.update(dict.fromkeys(range(settings["ranks"]), shared))
    return work


def rank_totals(work, settings, cost):
    """{step: [cost of every rank]}."""
    totals = defaultdict(lambda: [0.0] * settings["ranks"])
    for (step, _), held in work.items():
        for rank, (rows, padded_len, _) in held.items():
            totals[step][rank] += cost(rows, padded_len)
    return totals


def of_step(costs):
    return max(costs) / statistics.fmean(costs) - 1


def variation(values):
    return statistics.pstdev(values) / statistics.fmean(values)


def correlation(by_step):
    """Pearson's, of keys and values; 0 where one of them is constant."""
    if len(set(by_step.values())) < 2:
        return 0.0
    return statistics.correlation(list(by_step), list(by_step.values()))


def recomputed(rows, settings, cost, m_mem):
    """All metrics but the weights of samples, and the cost of ranks by step."""
    work = shapes_of_work(rows, settings)
    held = [each for ranks in work.values() for each in ranks.values()]
    costs = rank_totals(work, settings, cost)
    squares = rank_totals(work, settings, lambda b, s: b * s**2)
    makespans = [max(ranks) for ranks in costs.values()]
    lengths, largest = defaultdict(list), Counter()
    for row in rows:
        lengths[row["step"]].append(row["seq_len"])
        largest[row["step"]] = max(largest[row["step"]], cost(1, row["padded_len"]))
    above = [max(c) / max(statistics.fmean(c), largest[step]) - 1 for step, c in costs.items()]
    tokens = sum(row["seq_len"] for row in rows)
    placed = Counter(row["sample"] for row in rows)
    mean = statistics.fmean(map(len, lengths.values()))
    per_step = [len(each) / mean for each in lengths.values()]
    imbalances, shares = list(map(of_step, costs.values())), [len(set(v)) for v in lengths.values()]
    found = {"steps": len(costs), "samples": len(rows), "tokens": tokens, "cost": sum(makespans)}
    found |= {"step_samples_min": min(per_step), "step_samples_max": max(per_step)}
    found |= {"imbalance": statistics.fmean(imbalances), "imbalance_max": max(imbalances)}
    found |= {"excess": statistics.fmean(above), "excess_max": max(above), "longest_weight": 1.0}
    found |= {"dropped": max(placed) + 1 - len(placed), "duplicated": len(rows) - len(placed)}
    return costs, found | {
        "buckets": len(set(held)),
        "segments": max(Counter((r["step"], r["micro_batch"], r["rank"]) for r in rows).values()),
        "idle": 1 - sum(map(statistics.fmean, costs.values())) / sum(makespans),
        "cost_cv": statistics.fmean(map(variation, costs.values())),
        "compute_cv": statistics.fmean(map(variation, squares.values())),
        "step_cv": variation(makespans),
        "padding": 1 - tokens / sum(b * s for b, s, _ in held),
        "utilisation": tokens / (m_mem * len(held)) if m_mem else None,
        "order_correlation": correlation({k: statistics.fmean(v) for k, v in lengths.items()}),
        "length_share": statistics.fmean(shares) / len({row["seq_len"] for row in rows}),
        "tokens_per_second": tokens / sum(makespans),
    }


@given(
    case=cases(),
    epoch=st.integers(0, 3),
    model=st.builds(PowerCost, st.floats(0.5, 3))
    | st.builds(QuadraticCost, st.floats(0, 1), st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-6)),
)
@examples(40)
def test_the_file_is_the_plan_and_all_metrics_follow_from_it(tmp_path_factory, case, epoch, model):
    manifest, config, seed = case
    plan = make_plan(config, manifest.samples(), 1, seed)
    rows, settings = rows_of(plan, epoch, tmp_path_factory.mktemp("plan") / "plan.parquet")
    assert rows == expected_rows(plan, epoch, manifest.lengths())
    assert settings == plan.identity()

    def cost(rows, seq_len):
        if isinstance(model, PowerCost):
            return rows * float(seq_len) ** model.p
        return model.c0 + model.c1 * rows * seq_len + model.c2 * rows * seq_len * seq_len

    columns = plan.epoch(epoch)
    costs, expected = recomputed(rows, settings, cost, config.m_mem)
    found = dataclasses.asdict(plan_metrics(columns, model, config.m_mem))
    assert found.keys() == expected.keys() | {"longest_weight_by_step"}
    for name, value in expected.items():
        value = None if value is None else pytest.approx(value, rel=1e-9, abs=1e-9)
        assert found[name] == value, name
    for number, ranks in costs.items():
        step = step_metrics(plan.step(epoch * plan.steps_per_epoch + number), plan, model)
        assert step.predicted_cost == pytest.approx(max(ranks))
        assert step.imbalance == pytest.approx(of_step(ranks), abs=1e-9)
        held = [row for row in rows if row["step"] == number]
        assert (step.samples, step.tokens) == (len(held), sum(row["tokens"] for row in held))
        work = shapes_of_work(held, settings).values()
        computed = sum(b * s for ranks in work for b, s, _ in ranks.values())
        assert step.padding == pytest.approx(1 - step.tokens / computed)
    simulated = simulate(columns, model, SimulationSettings())
    assert simulated.seconds == pytest.approx(expected["cost"])
    assert simulated.tokens_per_second == pytest.approx(expected["tokens_per_second"])
    assert simulated.samples_per_second == pytest.approx(len(rows) / expected["cost"])
    for name in ("imbalance", "imbalance_max", "idle", "step_cv"):
        assert getattr(simulated, name) == pytest.approx(expected[name], abs=1e-9)


def packed_costs(rows, plan, model, turns):
    """{(step, micro_batch): [cost of every rank]} of a packed plan, from the file alone."""
    context, ranks = getattr(plan.policy, "context", 1), plan.topology.ranks
    costs = {}
    for row in rows:
        base = model.c0 + model.c1 * row["padded_len"] + model.c_sequence * row["slots"]
        costs[row["step"], row["micro_batch"]] = [base] * ranks
    for row in rows:
        turn, squares = (row["step"], row["micro_batch"]), model.c2 * row["seq_len"] ** 2
        if row["region"] == "whole":
            costs[turn][row["rank"]] += squares
        else:  # the ranks of a group share it evenly
            first = row["rank"] // context * context
            for rank in range(first, first + context):
                costs[turn][rank] += squares * row["tokens"] / row["seq_len"] / context
    return costs


@pytest.mark.parametrize(("policy", "context"), [("first_fit", 1), ("balanced", 4)])
def test_the_metrics_of_a_packed_plan_can_be_recomputed(tmp_path, policy, context):
    model = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)
    samples = make_workload("mixed-resolution", 1000)
    config = PlanningConfig(policy, m_mem=81_920, context=context, link_bandwidth=1e30)
    plan = make_plan(config, samples, 8, 0, CostFile(quadratic=model))
    rows, _ = rows_of(plan, 0, tmp_path / "plan.parquet")
    turns = {(row["step"], row["micro_batch"]) for row in rows}
    costs = packed_costs(rows, plan, model, turns)
    metrics = plan_metrics(plan.epoch(0), model, 81_920)
    assert metrics.steps == len(turns)
    assert metrics.cost == pytest.approx(sum(map(max, costs.values())))
    assert metrics.imbalance == pytest.approx(statistics.fmean(map(of_step, costs.values())))
    assert metrics.imbalance_max == pytest.approx(max(map(of_step, costs.values())))
    tokens = sum(row["tokens"] for row in rows)
    assert metrics.tokens == tokens == samples.seq_len.sum()
    computed = len(turns) * 8 * rows[0]["padded_len"]
    assert metrics.padding == pytest.approx(1 - tokens / computed)
    assert metrics.samples == len({row["sample"] for row in rows}) == 1000
    assert ("split" in {row["region"] for row in rows}) == (context > 1)
    assert metrics.longest_weight == pytest.approx(1)


def test_ranks_wait_for_the_all_reduce_and_for_noise_that_depends_on_its_seed():
    found = simulate(epoch_of([10] * 4, 2), LINEAR, SimulationSettings(all_reduce=5.0))
    assert (found.seconds, found.idle) == pytest.approx((2 * 15, 5 / 15))
    assert found.imbalance == 0
    free = simulate(epoch_of([10, 20], 2), QuadraticCost(0, 0, 0), SimulationSettings())
    assert (free.seconds, free.tokens_per_second, free.idle, free.step_cv) == (0, 0, 0, 0)
    plan = epoch_of([10] * 8000, 8)
    quiet, noisy, again, other = (
        simulate(plan, LINEAR, SimulationSettings(noise, 0.0, seed))
        for noise, seed in ((0.0, 1), (0.05, 1), (0.05, 1), (0.05, 2))
    )
    # The mean of the largest of 8 standard normal numbers is 1.4236.
    assert noisy.seconds / quiet.seconds == pytest.approx(1 + 0.05 * 1.4236, rel=0.01)
    assert noisy.idle == pytest.approx(1 - 1 / (1 + 0.05 * 1.4236), abs=0.005)
    assert noisy == again
    assert noisy.seconds != other.seconds
    alone, calm = epoch_of([10] * 8000, 1), SimulationSettings()
    loud = simulate(alone, LINEAR, SimulationSettings(0.5, 0.0, 1)).seconds
    assert loud == pytest.approx(simulate(alone, LINEAR, calm).seconds, rel=0.03)


@pytest.mark.parametrize("mode", MODES)
def test_the_command_writes_the_documented_columns_order_and_settings(tmp_path, capsys, mode):
    path, out = tmp_path / "m.parquet", tmp_path / "new" / "folder" / "plan.parquet"
    pa.parquet.write_table(pa.table({"seq_len": [10, 20, 40] * 5}), path)
    flags = ["--m-mem", "80", "--ranks", "3", "--micro-batches-per-step", "2", "--epoch", "2"]
    flags += ["--manifest", str(path), "--out", str(out), "--ranks-mode", mode, "--json"]
    assert run_command(cli.main, ["plan", *flags]) == 0
    schema = pa.parquet.read_schema(out)
    assert schema.names == [
        *("epoch", "step", "rank", "micro_batch", "sample", "seq_len", "padded_len", "tokens"),
        *("offset", "region", "split_tokens", "rows", "slots", "frames", "height", "width"),
    ]
    assert {schema.field(k).type for k in schema.names if k != "region"} == {pa.int64()}
    rows, settings = read_plan(out)
    places = [(row["step"], row["micro_batch"], row["rank"]) for row in rows]
    assert places == sorted(places)
    assert settings == json.loads(capsys.readouterr().out)["plan"]
    expected = {"ranks": 3, "micro_batches_per_step": 2, "manifest": str(path), "epoch": 2}
    assert settings.items() >= expected.items()
    assert mode in settings.values()


def test_an_earlier_plan_is_replaced_and_stays_where_writing_fails(tmp_path, monkeypatch):
    def fail(table, path):
        path.write_text("half a plan")
        raise OSError("no space left")

    out, table = tmp_path / "plan.parquet", pa.table({"step": [0]})
    out.write_text("an earlier plan")
    with monkeypatch.context() as patch:
        patch.setattr(pa.parquet, "write_table", fail)
        with pytest.raises(InputError, match="no space left"):
            write_plan(out, table)
    assert out.read_text() == "an earlier plan"
    write_plan(out, table)
    assert pa.parquet.read_table(out) == table
    assert [each.name for each in tmp_path.iterdir()] == ["plan.parquet"]
