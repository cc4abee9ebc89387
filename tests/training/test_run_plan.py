"""Plans that follow the step times of a run."""

import dataclasses
import itertools
import json
import pickle
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from alload_jax.data.loader import LoaderConfig
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.models.common.sparse_attention.config import (
    DENSITY,
    SPARSE_LAYERS,
    SparseAttentionConfig,
)
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.planning.analytic import step_cost
from alload_jax.planning.architecture import from_fields
from alload_jax.planning.cost import (
    BandedCost,
    CostFile,
    QuadraticCost,
    SparseCost,
    SparseLayers,
    SparseTerms,
    write_cost_file,
)
from alload_jax.planning.devices import DEVICES
from alload_jax.planning.factory import choose_policy, make_plan
from alload_jax.planning.plan import Plan
from alload_jax.planning.policies.windows import step_times
from alload_jax.planning.settings import PlanningConfig
from alload_jax.planning.stream import Chunk, StreamPlan
from alload_jax.planning.workloads import make_workload
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.callbacks import telemetry
from alload_jax.training.callbacks.telemetry import DeviceSpeeds
from alload_jax.training.run_plan import RunPlan, first_layers, run_costs, sparse_layers

PLANNED = QuadraticCost(0.05, 1.7e-5, 1.0e-9, 5e-4)
TRUE = QuadraticCost(0.05, 1.7e-5, 3.0e-9, 5e-4)
"""Attention takes three times as long as planned."""


@pytest.fixture
def planning(tmp_path):
    def make(sparse=None, **fields):
        path = tmp_path / "costs.json"
        write_cost_file(path, CostFile(quadratic=PLANNED, sparse=sparse))
        usual = {"policy": "balanced", "m_mem": 90_000, "recalibrate": "epoch"}
        return PlanningConfig(**usual | {"cost_model": str(path)} | fields)

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


def resumed(before, after, step=0):
    """Gives a run what another one's checkpoint keeps."""
    after.restore(json.loads(json.dumps(before.state(step))), step)
    return after


def samples_of(plan, first, stop):
    return [[part.samples for part in plan.step(n).micro_batches] for n in range(first, stop)]


def test_samples_that_are_left_out_count_in_no_figure(planning):
    whole, excluded = run_plan(planning()), frozenset(range(0, 800, 7))
    run = RunPlan(whole.plan, planning(), Cluster(), excluded=excluded)
    for number in range(whole.plan.steps_per_epoch):
        before, found = whole.metrics(number), run.metrics(number)
        placed = [n for part in whole.plan.step(number).micro_batches for n in part.samples]
        kept = [n for n in placed if n not in excluded]
        tokens = whole.plan.samples.seq_len[kept].sum()
        padding = 1 - tokens / before.tokens * (1 - before.padding)
        assert found == before._replace(
            samples=len(kept), tokens=tokens, padding=pytest.approx(padding)
        )


def test_epochs_after_the_first_are_planned_by_the_fitted_model(planning):
    run = run_plan(planning(policy="sorted", ranks_mode="independent"))
    first = run.plan
    end = first.end_of_epoch(0)
    steps = train(run, 0, 3 * end)
    last = run.plan.locate(len(steps) - 1)[0]
    assert [each.epoch for each in run.plan.recalibrations] == list(range(1, last + 1))
    assert steps[:end] == samples_of(first, 0, end)
    assert steps[end:] != samples_of(first, end, len(steps))
    model = run.plan.recalibrations[-1].cost
    assert model.c2 / model.c1 == pytest.approx(2 * PLANNED.c2 / PLANNED.c1, rel=0.5)
    # Its predictions are close to the truth, though a coefficient stays within bounds.
    number = len(steps) - 1
    terms = run.metrics(number).cost_terms
    seconds = float(np.dot(terms, coefficients(TRUE)))
    assert abs(run.drift(number, terms, seconds)) < 0.1
    assert run.metrics(number).predicted_cost == pytest.approx(seconds, rel=0.15)


LONGER = 30_000
"""Tokens of samples whose attention takes three times as long as planned."""
SLOW = (1.0, 0.8, 1.0, 1.0)


def train_unlike(run, first, stop):
    """As `train`, with long samples and a rank that are slower than planned, as is measured."""
    true = BandedCost(**vars(PLANNED), edges=(LONGER,), squares=(3 * PLANNED.c2,))
    found, seconds = [], []
    for step in run.steps(first, stop, lambda step: step, LoaderConfig()):
        window, within = run.plan.of_step(step.index)
        seconds.append(float(step_times(window.only(within), true, np.array(SLOW))[0]))
        run.drift(step.index, run.metrics(step.index).cost_terms, seconds[-1])
        run.add_probe([1 / speed for speed in SLOW])
        found.append([part.samples for part in step.micro_batches])
    return found, seconds


@pytest.fixture
def short_windows(monkeypatch):
    monkeypatch.setattr("alload_jax.planning.plan._ROWS", 0)


@pytest.mark.usefixtures("short_windows")
def test_windows_follow_the_times_and_speeds_that_are_measured(planning):
    run = run_plan(planning(recalibrate="window"), 2400, 4)
    base, each = run.plan, run.plan.steps_per_epoch
    assert each > 2 * len(base.window(0))
    steps, seconds = train_unlike(run, 0, 2 * each)
    first = len(base.window(0))
    assert steps[:first] == samples_of(base, 0, first)
    assert len(run.plan.revisions) <= 3
    for number in range(2):  # every epoch holds each sample once, in as many steps
        placed = [n for step in steps[number * each :][:each] for part in step for n in part]
        assert sorted(placed) == list(range(2400))
    assert base.first_step(2) == run.plan.first_step(2) == base.end_of_epoch(each)
    plain = run_plan(planning(recalibrate=None), 2400, 4)
    unmoved, before = train_unlike(plain, 0, 2 * each)
    assert unmoved == samples_of(base, 0, 2 * each)
    assert plain.state(0) is None
    assert sum(seconds[each:]) < 0.92 * sum(before[each:])
    assert run.plan.revision(2 * each - 1).speed == SLOW
    assert abs(run.drift(2 * each - 1, (), seconds[-1])) < 0.1


@pytest.mark.parametrize(
    ("probes", "found"),
    [
        ([[1, 1, 2]] * 2, []),
        ([[1, 1, 1.02]] * 3, []),
        ([[1, 1, 2], [1, 1, 2], [9, 1, 1]], [1, 1, 0.5]),
        ([[3, 3, 3]] * 9 + [[1, 1, 0.5]] * 3, [1, 1, 2]),
        ([[1, 1, 1e9]] * 3, [1, 1, 0.01]),
        ([[1.1, 1]] * 3, [0.91, 1]),
        ([[1, 1.1, 1, 1.1]] * 3, [1, 0.91, 1, 0.91]),
    ],
)
def test_speeds_of_ranks_are_medians_of_the_last_measurements(planning, probes, found):
    run = run_plan(planning())
    for seconds in probes:
        run.add_probe(seconds)
    assert run.speeds() == found


def test_short_epochs_keep_their_model_until_enough_steps_are_timed(planning):
    run = run_plan(planning(), samples=100)
    each = run.plan.steps_per_epoch
    assert each < 10
    train(run, 0, 8 * each)
    first = run.plan.recalibrations[0].epoch
    steps = [run.plan.epoch(number).steps for number in range(first)]
    assert sum(steps) >= 20 > sum(steps[:-1])


def test_a_recalibrated_plan_needs_no_other_programs(planning):
    config = planning(context=4, m_mem=80_000)
    samples = make_workload("mixed-resolution", 1500)
    plan = make_plan(config, samples, 4, 0)
    changed = plan.recalibrated(1, QuadraticCost(0.1, 1e-5, 4e-7, 0.0))
    for number in range(3):
        before, after = plan.epoch(number), changed.epoch(number)
        assert before.packing.segments == after.packing.segments
        assert before.packing.split_sizes == after.packing.split_sizes
        assert before.padded_len.max() == after.padded_len.max()
        assert (number == 0) == np.array_equal(before.sample, after.sample)
        assert set(after.sample.tolist()) == set(range(1500))
    assert changed.identity() == plan.identity()
    again = pickle.loads(pickle.dumps(changed))
    np.testing.assert_array_equal(again.epoch(2).sample, changed.epoch(2).sample)


@pytest.mark.parametrize(
    ("mode", "others"),
    [("epoch", ("equal_tokens", "first_fit")), ("window", ("sorted", "first_fit"))],
)
def test_plans_that_cannot_be_recalibrated_are_refused(mode, others, planning):
    config = PlanningConfig("balanced", m_mem=90_000, recalibrate=mode)
    with pytest.raises(
        InputError, match=rf"is {mode}, but planning\.cost_model predicts no seconds"
    ):
        run_plan(config)
    for policy in others:
        with pytest.raises(InputError, match=f"the plan of {policy} does not follow .* balanced"):
            PlanningConfig(policy, m_mem=100, recalibrate=mode)
    auto, samples = planning(policy="auto", recalibrate=mode), make_workload("wan-480p", 40)
    choose = partial(choose_policy, auto, lambda _: samples, 2, auto.costs())
    assert choose(packs=True).config.policy == "balanced"
    if mode == "epoch":
        assert choose(packs=False).config.policy == "sorted"
    else:
        with pytest.raises(InputError, match=r"window, which needs packed rows.* give epoch"):
            choose(packs=False)


# ---------------------------------------------------------------- layers with sparse attention


TERMS = SparseTerms(1.4e-9, 1.5e-6, 6e-12)
SWITCH_AT = 23
"""The step from which layers are sparse."""


def wan(**fields):
    sparse = SparseAttentionConfig(min_tokens=8_000, **fields)
    return WanConfig(dim=32, ffn_dim=64, num_heads=2, num_layers=4, sparse_attention=sparse)


def sparse_run(planning, model, samples=800):
    costs = run_costs(model, planning)
    plan = make_plan(planning, make_workload("mixed-resolution", samples), 2, 0, costs)
    return RunPlan(plan, planning, Cluster(), costs, model)


def logged(number):
    """What step `number` logs: three of four layers are sparse after SWITCH_AT, ever sparser."""
    if number < SWITCH_AT:
        return {SPARSE_LAYERS: 0.0, DENSITY: 1.0}
    density = max(0.1, 0.5 - 0.01 * (number - SWITCH_AT))
    return {SPARSE_LAYERS: 0.75, DENSITY: 0.25 + 0.75 * density}


def train_sparse(run, first, stop, timed=True):
    """As the loop: a step is read when the metrics of the last two before it are not known."""
    found, drifts = [], []

    def settle(number):
        planned = run.metrics(number)
        seconds = float(np.dot(planned.cost_terms, (*coefficients(PLANNED), *vars(TERMS).values())))
        if timed:
            drifts.append(run.drift(number, planned.cost_terms, seconds))
        run.observe(number, logged(number))

    for step in run.steps(first, stop, lambda step: step, LoaderConfig()):
        found.append([part.samples for part in step.micro_batches])
        if step.index - 2 >= first:
            settle(step.index - 2)
    for number in range(max(first, stop - 2), stop):
        settle(number)
    return found, drifts


@pytest.mark.parametrize("timed", [True, False])
def test_an_epoch_is_planned_for_the_layers_that_have_become_sparse(planning, timed):
    run = sparse_run(planning(TERMS), wan())
    dense = run_plan(planning(TERMS, recalibrate=None)).plan
    end = dense.end_of_epoch(0)
    assert end > SWITCH_AT
    steps, drifts = train_sparse(run, 0, 2 * end + 9, timed)
    assert steps[:end] == samples_of(dense, 0, end)
    models = run.plan.recalibrations
    assert [each.epoch for each in models] == [1, 2]
    known = logged(end - 3)
    expected = sparse_layers(wan().sparse_attention, known[SPARSE_LAYERS], known[DENSITY])
    assert models[0].cost.layers == expected
    assert expected.share == 0.75
    # The steps took what the terms say: nothing but the layers has changed.
    np.testing.assert_allclose(
        models[1].cost.coefficients, (*coefficients(PLANNED), *vars(TERMS).values()), rtol=1e-3
    )
    assert not drifts or max(map(abs, drifts)) < 1e-6


RUNS = {
    "dense": (lambda planning: run_plan(planning()), train),
    "sparse": (
        lambda planning: sparse_run(planning(TERMS), wan()),
        lambda *of: train_sparse(*of)[0],
    ),
    "windows": (
        lambda planning: run_plan(planning(recalibrate="window"), 1600, 4),
        lambda *of: train_unlike(*of)[0],
    ),
}
"""What begins a run, and what trains steps of it."""


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("kind", RUNS)
def test_a_continued_run_trains_the_same_steps(kind, planning):
    begun, follow = partial(RUNS[kind][0], planning), RUNS[kind][1]
    whole = begun()
    windows, end = kind == "windows", whole.plan.end_of_epoch(0)
    first = whole.plan.window(0).stop if windows else end
    stop = whole.plan.first_step(2) if windows else 3 * whole.plan.steps_per_epoch
    steps = follow(whole, 0, stop)
    # At an epoch's end it fits before it goes on; of windows, the last cut lies in the third.
    last = whole.plan.window(first).stop + 5 if windows else first + 7
    for cut in (first - 1, first, last):
        before = begun()
        assert follow(before, 0, cut) == steps[:cut]
        assert (before.plan.recalibrations == ()) == (windows or cut <= end)
        after = resumed(before, begun(), cut)
        assert after.plan.starts == before.plan.starts
        assert after.metrics(cut) == before.metrics(cut)
        assert follow(after, cut, stop) == steps[cut:]
        assert after.plan.recalibrations == whole.plan.recalibrations
        assert not windows or after.plan.revisions == whole.plan.revisions


@pytest.mark.parametrize(
    "fields", [{}, {"recalibrate": None}, {"recalibrate": None, "cost_model": None}]
)
def test_a_run_goes_on_late_without_the_plans_of_all_epochs_before(fields, planning, monkeypatch):
    """Epochs of packed plans differ in their numbers of steps."""
    before, after = (run_plan(planning(**fields), 60) for _ in range(2))
    if not fields:
        train(before, 0, before.plan.first_step(3))
    step = before.plan.first_step(40) + 1
    expected, planned, plan = before.plan.step(step), [], Plan._plan_epoch
    monkeypatch.setattr(Plan, "_plan_epoch", lambda *of: planned.append(of[1]) or plan(*of))
    resumed(before, after, step)
    assert after.plan.step(step) == expected
    assert after.plan.first_step(41) == before.plan.first_step(41)
    assert planned == [40]


def test_all_processes_plan_by_what_the_first_one_knows(planning, monkeypatch):
    planning, model = planning(TERMS), wan()
    first = sparse_run(planning, model)
    end = first.plan.end_of_epoch(0)
    train_sparse(first, 0, end + 1)
    decided = json.dumps(dataclasses.asdict(first.plan.recalibrations[0].cost))
    other = sparse_run(planning, model)
    monkeypatch.setattr(other._cluster, "broadcast", lambda compute: json.loads(decided))
    train_sparse(other, 0, end + 1, timed=False)
    assert other.plan.recalibrations == first.plan.recalibrations


def test_steps_are_predicted_for_the_layers_that_they_begin_with(planning):
    """Also without recalibration, and the checkpoint keeps what that needs."""
    run, new, again = (sparse_run(planning(TERMS, recalibrate=None), wan()) for _ in range(3))
    run.observe(4, {SPARSE_LAYERS: 0.5, DENSITY: 0.55})
    after = run.metrics(5)
    assert after.predicted_cost < new.metrics(5).predicted_cost
    assert run.metrics(4) == new.metrics(4)
    resumed(run, again)
    assert again.metrics(5) == after
    assert again.plan.recalibrations == ()


def test_layers_are_read_from_what_steps_log_and_forced_ones_are_planned_for(planning):
    cost = sparse_run(planning(TERMS), wan(forced=(1.0, 0.2, 0.1, 0.3))).plan.policy.cost
    assert (cost.layers, cost.c3) == (SparseLayers(0.75, 0.2, 8_000, 64), TERMS.c3)
    assert first_layers(WanConfig(dim=32, num_heads=2)) is None
    assert first_layers(wan()) == SparseLayers(0.0, 1.0, 8_000, 64)
    assert first_layers(wan(forced=(1.0,) * 4)) == first_layers(wan())
    everything = wan(selector="all", forced=(0.1, 0.1, 1.0, 1.0))
    assert first_layers(everything) == SparseLayers(0.5, 1.0, 8_000, 64)
    for densities in ((0.5, 1.0, 1.0, 0.25), (0.02,) * 4, (1e-3, 1.0, 1.0, 1.0)):
        sparse = [density for density in densities if density < 1]
        found = first_layers(wan(forced=densities))
        assert found.share == len(sparse) / 4
        assert found.density == pytest.approx(sum(sparse) / len(sparse))


def test_models_are_planned_by_arithmetic_without_a_cost_model():
    model, planning = wan(), PlanningConfig("sorted", m_mem=90_000)
    dense = dataclasses.replace(model, sparse_attention=None)
    found = run_costs(model, planning)
    assert isinstance(found.quadratic, SparseCost)
    architecture = from_fields(model.architecture())
    expected = step_cost(architecture, DEVICES["h200"], model.remat)
    assert found.quadratic.coefficients[:4] == expected.coefficients
    assert run_costs(dense, planning).quadratic == expected
    for each in (model, dense):
        assert run_costs(each, PlanningConfig("sorted", m_mem=90_000, p=2.0)) == CostFile()
    # Its steps are fitted like others, whatever their device's speed.
    sparse_run(PlanningConfig("sorted", m_mem=90_000, recalibrate="epoch"), model)


@pytest.mark.parametrize("policy", ["balanced", "equal_tokens"])
def test_the_samples_of_a_step_are_named_as_in_the_data_folder(policy):
    splits = {"context": 2, "split_above": 0.0} if policy == "balanced" else {}
    planning = PlanningConfig(policy=policy, m_mem=90_000, **splits)
    plan = make_plan(planning, make_workload("long-video-V60", 60), 2, 0)
    run = RunPlan(
        plan, planning, Cluster(), manifest=SimpleNamespace(number=lambda sample: 1000 + sample)
    )
    for number in range(plan.steps_per_epoch):
        content, step = run.content(number), plan.step(number)
        json.dumps(content)  # which takes only what is no number of NumPy
        for found, part in zip(content, step.micro_batches, strict=True):
            assert found["samples"] == [1000 + sample for sample in part.samples]
            if part.row_plan:
                expected = [1000 + sample for sample in part.row_plan.split_samples]
                assert found["row_plan"]["split_samples"] == expected
            expected = dataclasses.asdict(part) | {"samples": found["samples"]}
            assert found | {"row_plan": 0} == expected | {"row_plan": 0}
    steps = map(plan.step, range(plan.steps_per_epoch))
    rows = [part.row_plan for step in steps for part in step.micro_batches]
    assert policy != "balanced" or any(row.split_samples for row in rows)


def test_a_folder_whose_captions_have_all_changed_is_that_of_the_checkpoint():
    planning = PlanningConfig(policy="equal_tokens", m_mem=90_000)

    def run_of(checksum, joined=None, weight=None):
        count, sums = len(checksum), np.asarray(checksum, np.uint32)
        manifest = SimpleNamespace(is_store=True, number=int, sample_numbers=np.arange(count))
        manifest.checksum, manifest.joined = sums, joined
        manifest.contents = sums if joined is None else np.asarray(joined, np.uint32)
        samples = make_workload("mixed-resolution", count)
        samples = samples if weight is None else dataclasses.replace(samples, weight=weight)
        plan = make_plan(planning, samples, 2, 0)
        return RunPlan(plan, planning, Cluster(), manifest=manifest)

    first, second, third = (np.arange(60) + base for base in (0, 100, 200))
    begun = run_of(first)
    state = json.loads(json.dumps(begun.state(2)))
    changed, new = run_of([*second, 7, 8], [*first, 7, 8]), [60, 61]
    assert changed.restore(state, 2) == "2 joined, 60 changed"
    epoch = next(n for n in range(2, 200) if changed.plan.step(n).epoch)
    taken = [s for step in samples_of(begun.plan, 0, 2) for part in step for s in part]
    left = [s for step in samples_of(changed.plan, 2, epoch) for part in step for s in part]
    assert sorted({*taken, *left}) == [*range(60), *new]
    # Captions may change again, after a checkpoint that has changed ones.
    state = json.loads(json.dumps(run_of(second, first).state(2)))
    assert run_of(third, first).restore(state, 2) == "60 changed"
    assert run_of(third).restore(state, 2) == ""  # another folder
    # A weight is what its samples have in the rest of the epoch.
    state = json.loads(json.dumps(run_of(first).state(2)))
    twice = run_of(first, weight=np.where(first < 9, 2.0, 1.0))
    assert twice.restore(state, 2) == "60 are the same, with other weights"
    epoch = next(n for n in range(2, 200) if twice.plan.step(n).epoch)
    left = [s for step in samples_of(twice.plan, 2, epoch) for part in step for s in part]
    assert sorted([*taken, *left]) == sorted([*range(60), *range(9)])
    again = json.loads(json.dumps(twice.state(3)))
    resumed = run_of(first, weight=np.where(first < 9, 2.0, 1.0))
    assert resumed.restore(again, 3) == ""
    assert resumed.plan.step(3) == twice.plan.step(3)
    del state["data"]["weights"]  # of an old version
    assert run_of(first, weight=np.full(60, 2.0)).restore(state, 2) == ""


def test_slow_devices_are_found_and_named_once(planning, capsys, monkeypatch):
    """Ranks are those of the plan, whichever process has their devices."""
    run = run_plan(planning(recalibrate="window", ranks=8), ranks=8)

    def mesh_of(platform="gpu", data=4):
        one = partial(SimpleNamespace, platform=platform)
        devices = [one(id=n, process_index=n // 2 % 2) for n in range(2 * data)]
        sizes = {"data": data, "fsdp": 1, "context": 1, "tensor": 2}
        return SimpleNamespace(devices=np.array(devices).reshape(data, 1, 1, 2), shape=sizes)

    mesh = mesh_of()
    now = [0.0]
    other = [0.05, 0.1, 1.0, 1.0, 1.0, 1.25]  # process 1, whose device 7 is slow
    cluster = SimpleNamespace(all_gather=lambda value: [value, other])

    def probe():
        now[0] += 0.01
        return [1.0] * 4

    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = DeviceSpeeds(run, mesh, cluster, probe)
    loop = SimpleNamespace(done=5)
    found.on_start(loop)
    measured = []
    for loop.done in range(5, 3000):
        now[0] += 0.1
        if found.due(loop):
            found.act(loop)
            measured.append(loop.done)
    assert measured[0] == 5 + 32
    assert np.diff(measured[:3]).tolist() == [32, 32]
    assert set(np.diff(measured[2:])) == {500}  # of 0.1 s, of which 0.05 s are a thousandth
    assert run.speeds() == [1, 1, 1, 1, 1, 1, 0.8, 0.8]
    said = capsys.readouterr().err
    assert said.count("warning") == said.count("\n") == 1
    assert "rank 6 (device 6 of process 1) takes 25% longer" in said
    assert "rows are planned to that" in said
    others = ((run_plan(planning(recalibrate="epoch")), mesh), (run, mesh_of("cpu")))
    for plan, place in (*others, (run, mesh_of(data=1))):
        assert not DeviceSpeeds(plan, place, cluster, probe).due(loop)


def test_devices_do_the_same_work_each_by_itself(monkeypatch):
    monkeypatch.setattr(telemetry, "_WIDTH", 32)
    mesh = make_mesh(MeshConfig(data=jax.device_count()))
    measured = telemetry.DeviceProbe(mesh, Cluster())
    for _ in range(2):
        found = measured()
        assert len(found) == jax.device_count()
        assert min(found) > 0


class Endless:
    """A feed of samples 0, 1, 2 and so on, like those of a plan in turn."""

    def __init__(self, count):
        self.count = count

    def chunks(self, state):
        for first in itertools.count(state or 0, 1000):
            keys = np.arange(first, first + 1000)
            yield Chunk(keys % self.count, keys, first + 1000)


def test_a_checkpoint_keeps_where_a_stream_goes_on(planning):
    """Samples have their keys where a step is written down."""

    def run():
        whole = make_plan(planning(recalibrate=None), make_workload("mixed-resolution", 800), 8, 0)
        plan = StreamPlan(whole.samples, whole.policy, whole.topology, 0, Endless(800))
        return RunPlan(plan, planning(recalibrate=None), Cluster())

    ours = run()
    step = ours.plan.first_step(9) + 3
    kept = json.loads(json.dumps(ours.state(step)))
    assert (kept["stream"]["window"], kept["stream"]["step"]) == (8, ours.plan.first_step(8))
    theirs = run()
    assert theirs.restore(kept, step) == ""
    assert theirs.metrics(step) == ours.metrics(step)
    content = ours.content(step)
    assert theirs.content(step) == content
    keys, planned = ours.plan.step(step).window.keys, ours.plan.step(step).micro_batches
    for part, written in zip(planned, content, strict=True):
        assert written["samples"] == keys[list(part.samples)].tolist()
    json.dumps(content)
