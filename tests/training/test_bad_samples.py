"""Samples that are not finite are left out of their step, and a run that diverges is seen."""

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from group_cases import SPEC, collation_of, write_data
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import mesh_of
from patience import PATIENCE
from training_runs import Runs, computed, errors, lines_of

from alload_jax.data.collate import Collator
from alload_jax.data.loader import LoaderConfig, place_ahead
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives import FlowMatching
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import group_meshes, local_plan_ranks
from alload_jax.training import DivergenceConfig
from alload_jax.training.callbacks import Callback, CallbackContext, GradientNoiseConfig
from alload_jax.training.divergence import Divergence, DivergenceGuard
from alload_jax.training.loop import BadSamples, Loop
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.signals import StopRequest
from alload_jax.training.state import init_state
from alload_jax.training.trainer import Trainer

SAMPLES, STEPS = 12, 6
HUGE = {4: 5e37, 9: 1e25}
"""Samples whose losses are infinite, one of them before the mean over its tokens."""
PLANS = {
    "bucketed": (1, {"policy": "fixed", "rows": 2, "micro_batches_per_step": 2}),
    "packed": (2, {"policy": "balanced", "m_mem": 64, "max_segments": 3}),
    "groups": (2, {"policy": "fixed", "rows": 2, "ranks_mode": "independent"}),
}
CASES = [
    pytest.param(name, marks=[] if name == "bucketed" else [pytest.mark.slow]) for name in PLANS
]

pytestmark = pytest.mark.skipif(
    len(jax.devices("cpu")) < 2 or jax.default_backend() != "cpu", reason="needs 2 CPU devices"
)


class Notes(Callback):
    """What callbacks are told of the steps that count."""

    def __init__(self, most):
        self.most, self.steps, self.problems, self.waits = most, {}, [], {}

    def on_step_start(self, run, step):
        self.waits.setdefault(step.number, []).append(step.wait_seconds)
        new = [each for each in step.problems if each not in self.problems]
        self.problems += new
        if new and len(self.problems) > self.most:
            run.refuse(new[-1])

    def on_step_end(self, run, step, metrics):
        self.steps[step.number] = (metrics, step.problems)

    def due(self, run):
        return run.done == 2

    def act(self, run):
        assert run.done == 2


TRAINERS = {}
"""By name of the plan; with compiled programs, which all tests share."""


class Training:
    def __init__(self, folder, name, huge=HUGE, most=9):
        ranks, options = PLANS[name]
        self.folder, self.manifest = folder, write_data(folder / "data", SAMPLES, huge)
        self.mesh = mesh_of(ranks)
        planning, samples = PlanningConfig(**options), self.manifest.samples(SPEC.model.patch_size)
        self.plan = make_plan(planning, samples, ranks, seed=3)
        collation = collation_of(self.manifest, self.plan)
        self.groups = group_meshes(self.mesh, self.plan)
        here = local_plan_ranks(self.mesh, self.plan.topology.ranks)
        reader = StoreReader(self.manifest)
        self.collator = Collator(reader, here, collation, self.plan.group_ranks)
        self.run_plan = RunPlan(self.plan, planning, Cluster(), manifest=self.manifest)
        state = init_state(SPEC, self.mesh, seed=0)
        if name not in TRAINERS:
            TRAINERS[name] = Trainer(SPEC, self.mesh, state, self.groups)
            list(TRAINERS[name].compile(collation.shapes(self.plan)))
        self.trainer = TRAINERS[name]
        self.trainer.begin(state)
        self.trainer.is_finite(next(self.place([self.collator(self.plan.step(0))])))  # forgets
        self.notes, self.most = Notes(most), most

    def place(self, steps):
        return place_ahead(iter(steps), self.mesh, groups=self.groups)

    def run(self, first=0, steps=STEPS):
        repair = BadSamples(
            *(self.trainer, self.run_plan, self.collator, lambda step: next(self.place([step]))),
            *(self.folder, self.most, lambda: None),
        )
        loop = Loop(self.trainer, first, steps, [self.notes], repair)
        given = self.run_plan.steps(first, steps, self.collator, LoaderConfig())
        with closing(given):
            loop.run(self.place(given))
        return loop

    def without(self, samples):
        """The same steps, from which samples are left out before."""
        collate = dataclasses.replace(self.collator, excluded=frozenset(samples))
        steps = [collate(self.plan.step(number)) for number in range(STEPS)]
        return [self.trainer.step(step) for step in self.place(steps)]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def floats(metrics):
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_without_their_bad_samples(name, tmp_path):
    ours = Training(tmp_path / "ours", name)
    loop = ours.run()
    assert (loop.done, loop.refusal) == (STEPS, "")
    theirs = Training(tmp_path / "theirs", name, huge={})  # healthy, and left out all the same
    expected = theirs.without(HUGE)
    assert bits(ours.trainer.state) == bits(theirs.trainer.state)
    assert [floats(metrics) for metrics, _ in ours.notes.steps.values()] == [
        floats(metrics) for metrics in expected
    ]
    named = [
        {int(text.split("sample ")[1].split()[0]) for text in problems}
        for _, problems in ours.notes.steps.values()
    ]
    planned = [
        {sample for part in ours.plan.step(number).micro_batches for sample in part.samples}
        for number in range(STEPS)
    ]
    assert named == [each & HUGE.keys() for each in planned]
    assert set.union(*named) == HUGE.keys()
    # A step that begins again after a repair has waited for its data once.
    assert 0.0 in [wait for waits in ours.notes.waits.values() for wait in waits[1:]]


def test_more_bad_samples_than_allowed_refuse_the_step_and_keep_what_is_done(tmp_path):
    ours = Training(tmp_path / "ours", "bucketed", most=0)
    loop = ours.run()
    (problem,) = [each for each in ours.notes.problems if each == loop.refusal]
    assert problem.endswith("gives a loss or gradient that is not finite")
    sample = int(problem.split("sample ")[1].split()[0])
    numbers = [
        number
        for number in range(STEPS)
        for part in ours.plan.step(number).micro_batches
        if sample in part.samples
    ]
    assert loop.done == int(ours.trainer.state.step) == min(numbers)


def test_a_step_all_of_whose_samples_are_bad_is_no_matter_of_samples(tmp_path):
    ours = Training(tmp_path / "ours", "bucketed", huge=dict.fromkeys(range(SAMPLES), 5e37))
    said = r"step 1: loss \w+, .* for each of its \d samples: training diverges; its"
    with pytest.raises(InputError, match=said):
        ours.run()
    assert json.loads((tmp_path / "ours" / "bad_step.json").read_text())["step"] == 1


@given(st.sets(st.integers(0, 40), max_size=11))
def test_the_search_names_every_bad_sample_up_to_a_bound(tmp_path_factory, bad):
    class Known(BadSamples):
        def _is_finite(self, samples, number):
            return bad.isdisjoint(samples)

    plan, folder = SimpleNamespace(content=lambda number: []), tmp_path_factory.mktemp("run")
    search = Known(None, plan, None, None, folder, 0, None)
    if len(bad) <= 8:
        assert search._search(range(41), [], {}) == sorted(bad)
        return
    with pytest.raises(InputError, match="for more than 8 samples: training diverges"):
        search._search(range(41), [], {})


@pytest.mark.parametrize("bad", [2, SAMPLES])
def test_a_step_of_one_sample_is_compared_with_others(bad, tmp_path, monkeypatch):
    """As long clips are trained: bad ones are named, and if all are bad the run diverges."""
    monkeypatch.setitem(PLANS, "alone", (1, {"policy": "fixed", "rows": 1}))
    order = [
        part.samples[0]
        for step in map(Training(tmp_path / "plan", "alone").plan.step, range(SAMPLES))
        for part in step.micro_batches
    ]
    ours = Training(tmp_path / "ours", "alone", huge=dict.fromkeys(order[:bad], 5e37))
    if bad < SAMPLES:
        assert ours.run().done == STEPS
        named = [int(each.split("sample ")[1].split()[0]) for each in ours.notes.problems]
        assert named == order[:bad]
        return
    with pytest.raises(InputError, match=r"step 1: .* those of other steps are not finite: train"):
        ours.run()


def test_a_repair_that_finds_nothing_is_told_and_ends(tmp_path, capsys, monkeypatch):
    ours = Training(tmp_path / "ours", "bucketed", huge={})
    compute, wrong = ours.trainer.step, {3: {"loss": np.nan}}  # by a faulty device

    def faulty(step):
        return compute(step) | wrong.get(step.number, {})

    monkeypatch.setattr(ours.trainer, "step", faulty)
    with pytest.raises(InputError, match=r"step 4: loss nan, .*, and finite in parts"):
        ours.run()
    assert "computed again; the device may be faulty" in capsys.readouterr().err


def test_without_a_repair_a_loop_stops(tmp_path):
    ours = Training(tmp_path / "ours", "bucketed")
    loop = Loop(ours.trainer, 0, STEPS, [])
    steps = [ours.collator(ours.plan.step(number)) for number in range(STEPS)]
    with pytest.raises(InputError, match=r"loss .*; the last checkpoint is unchanged"):
        loop.run(ours.place(steps))


# ------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_a_bad_sample_is_named_skipped_counted_and_resumed_exactly(tmp_path, digits_folder):
    """Digits, one of which has latents beyond what float32 can square; a later one is damaged."""
    source = read_manifest(digits_folder)
    reader = StoreReader(source)
    with StoreWriter(tmp_path / "poisoned", vae_stride=source.vae_stride) as writer:
        for n in range(len(source)):
            arrays = reader.read(n)
            scale = np.float32(1e30 if n == 14 else 1.0)
            writer.add(arrays["latents"] * scale, arrays["labels"], tuple(source.shape[n]))
    runs = Runs(tmp_path, tmp_path / "poisoned")
    flags = ("--sampling.grids", "[]", "--run.steps", "12", "--planning.ranks", "2")
    flags += ("--planning.micro_batches_per_step", "1", "--data.folder", runs.spoil(12))
    flags += ("--data.loader.max_bad_records",)
    refused = runs.here(*flags, "0", "--run.folder", "refused")
    (line,) = errors(refused.stderr)
    assert "sample 14 gives a loss or gradient that is not finite; restore the record, or" in line

    both = runs.start_together(2, *flags, "1")
    for process in both:
        out, err = process.communicate(timeout=PATIENCE)
        (line,) = errors(err)
        assert "(sample 12) has checksum" in line
        done = lines_of(runs.folder / "run" / "metrics.jsonl")
        assert (process.returncode, f"saved at step {done}" in line) == (2, True), line
        assert out.count("skipped:") == (2 if process is both[0] else 0)
    assert (runs.folder / "run" / "checkpoints" / str(done)).exists()
    for name in ("run", "refused", "whole"):
        runs.finish(*flags, "2", "--run.folder", name)
        rows = runs.metrics(name)
        assert sum(row["skipped"] for row in rows) >= 2
        assert sum(row["samples"] + row["skipped"] for row in rows if row["epoch"] == 0) == 21
        assert lines_of(runs.folder / name / "bad_records.txt") == 2
    assert computed(runs.folder / "refused") == computed(runs.folder / "whole")


# ---------------------------------------------------------------- divergence


NOTHING = 1.7


def findings(losses, norms, nothing=None, stop_above=10.0):
    """What is found, with the number of the step from 0."""
    divergence = Divergence(stop_above, nothing)
    pairs = zip(losses, norms, strict=True)
    found = [(n, divergence.add(float(loss), float(norm))) for n, (loss, norm) in enumerate(pairs)]
    return [(n, each) for n, each in found if each is not None]


def healthy(seed, steps=400, bounded=True):
    """Losses and norms: heavy tails, several lengths with levels of their own, a falling trend."""
    rng = np.random.default_rng(seed)
    level = np.exp(-np.arange(steps) / rng.uniform(30, 2000) * rng.uniform(0, 3))
    noise = np.exp(rng.uniform(0.05, 1.2) * rng.normal(size=steps))
    lengths = np.exp(rng.normal(size=4) * rng.uniform(0, 1.2))
    noise = noise * lengths[rng.choice(4, steps, p=rng.dirichlet([0.5] * 4))]
    losses = level * noise * rng.uniform(0.05, 1)
    if bounded:  # no model of any use loses more than one that predicts nothing, but by chance
        losses = NOTHING * np.minimum(losses, 1) * np.exp(0.12 * rng.normal(size=steps))
    growth = 1 + np.minimum(np.arange(steps) / rng.uniform(1, 100), 5)
    weights = rng.choice([0.1, 1.0], steps)  # with gradient_mean plan, small steps count for less
    return losses, weights * growth * np.exp(rng.uniform(0.1, 1) * rng.normal(size=steps))


@pytest.mark.parametrize("bounded", [True, False])
def test_no_healthy_series_gives_a_false_alarm(bounded):
    for seed in range(40):
        nothing = NOTHING if bounded else None
        assert findings(*healthy(seed, bounded=bounded), nothing) == [], seed


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(30, 200), st.floats(1.15, 4.0), st.floats(0, 1.0))
def test_losses_that_grow_are_seen_soon_and_end_the_run(seed, start, growth, noise):
    rng = np.random.default_rng(seed)
    losses, norms = healthy(seed)
    rise = np.minimum(growth ** np.arange(1, 401), 1e6) * np.exp(noise * rng.normal(size=400))
    losses[start:] = NOTHING * rise[: 400 - start]
    found = findings(losses, norms, NOTHING)
    stops = [(n, each) for n, each in found if each.stops]
    assert start <= found[0][0] <= start + 20
    assert len(stops) == 1
    assert stops[0][0] <= start + 50
    assert all(n + 1 - each.ago >= start for n, each in found)


@given(st.floats(1.1, 100.0), st.floats(0.001, 1000.0), st.integers(0, 1000))
def test_a_scale_of_the_loss_changes_nothing_where_nothing_is_known_of_it(factor, scale, seed):
    losses, norms = healthy(seed, 120, bounded=False)
    losses[80:] *= factor
    same = [(n, each.ago, each.stops) for n, each in findings(losses, norms)]
    assert [(n, each.ago, each.stops) for n, each in findings(scale * losses, norms)] == same


def series(*parts):
    """Of losses: (value, steps) in turn."""
    return np.repeat(*zip(*parts, strict=True))


def changed(seed, part, factor, of_losses=True):
    """A healthy series in which a part of the losses or norms is multiplied."""
    pair = healthy(seed)
    pair[0 if of_losses else 1][part] *= factor
    return pair


@pytest.mark.parametrize(
    ("pair", "nothing", "found"),
    [
        # Wrong from the first step.
        *(
            ((series((loss, 30)),) * 2, NOTHING, [(0, False, True, 1), (6, True, False, 7)])
            for loss in (18.0, 1e30)
        ),
        # Weights that break where a model has learned.
        ((series((0.1, 100), (1.6, 50)), np.ones(150)), NOTHING, [(106, True, False, 7)]),
        # A single bad step.
        (changed(0, 120, 1e6), NOTHING, [(120, False, True, 1)]),
        # A level that lasts becomes the usual one: other data, say.
        (
            (series((0.1, 100), (0.4, 400), (40.0, 100)), np.ones(600)),
            None,
            [(106, False, False, 7), (506, True, False, 7)],
        ),
        # Steps of padding do not count.
        ((series((0.1, 10), (0.0, 40), (0.4, 12)),) * 2, None, []),
        ((np.tile([0.0] * 9 + [1.0], 40),) * 2, None, []),
    ],
)
def test_what_is_found_ends_a_run_or_is_a_spike(pair, nothing, found):
    seen = findings(*pair, nothing)
    assert [(n, each.stops, each.spike, each.ago) for n, each in seen] == found


def test_gradients_that_grow_are_worth_a_warning():
    ((at, found),) = findings(*changed(1, slice(300, None), 1e4, of_losses=False), NOTHING)
    assert at <= 310
    assert found.words.startswith("gradient norm")
    assert not found.stops


def test_bounds_of_the_usual_are_refused():
    for value in (2.0, -1.0, float("nan")):
        with pytest.raises(InputError, match=r"divergence\.stop_above"):
            DivergenceConfig(stop_above=value)


def test_the_loss_of_nothing_is_that_of_a_velocity_of_zero():
    rng = np.random.default_rng(0)
    data, noise = rng.normal(0, 0.8, 100_000), rng.normal(size=100_000)
    lost = float(np.mean((noise - data) ** 2))
    model = WanConfig()
    assert FlowMatching().loss_of_nothing(0.64, model) == pytest.approx(lost, rel=0.02)
    assert FlowMatching(noise_weighting="sigma_sqrt").loss_of_nothing(0.64, model) is None
    assert (
        FlowMatching().loss_of_nothing(0.64, dataclasses.replace(model, prediction="data")) is None
    )


class Held:
    """Checkpoints of steps 10, 20, ... in memory."""

    def __init__(self):
        self.calls = []

    def hold(self, before):
        self.calls.append(("hold", before))
        return None if before is None or before <= 10 else (before - 1) // 10 * 10

    def set_aside(self, start):
        self.calls.append(("set_aside", start))
        return [f"diverged-{start}"]


def guard(tmp_path, losses):
    """What a guard tells its checkpoints, and raises in the end."""
    held, plan = Held(), SimpleNamespace(content=lambda number: [{"samples": [number]}])
    guarded = DivergenceGuard(Divergence(10.0, NOTHING), held, plan, tmp_path)
    guarded.follow((0.1, 1.0) for _ in range(60))  # of earlier starts
    try:
        for number, loss in enumerate(losses, 60):
            guarded.add(number, loss, 1.0)
    except InputError as error:
        return held.calls, str(error)
    return held.calls, ""


def test_a_checkpoint_from_before_is_held_until_losses_are_back(tmp_path, capsys):
    calls, said = guard(tmp_path, [0.1] * 5 + ([0.95] * 8 + [0.1] * 4) * 2 + [0.1] * 16)
    assert (calls, said) == ([("hold", 65), ("hold", None)], "")
    warned, back = capsys.readouterr().err.splitlines()
    assert warned.startswith("warning: step 72: loss 0.95 over the last 10 steps, where")
    assert warned.endswith(": training may diverge; step 60 is kept")
    assert back == "step 95: losses and gradients are back at their usual size"


def test_a_run_that_diverges_ends_and_sets_checkpoints_since_then_aside(tmp_path):
    calls, said = guard(tmp_path, [0.1] * 5 + [100.0] * 10)
    assert calls == [("hold", 65), ("set_aside", 65)]
    assert "step 72: loss 100 over the last 10 steps" in said
    assert "training diverges; diverged-65: checkpoints since then. Lower" in said
    assert said.endswith("the same command goes on from step 60")


def test_the_samples_of_a_single_bad_step_are_written_down(tmp_path, capsys):
    assert guard(tmp_path, [0.1] * 5 + [1e4] + [0.1] * 20)[1] == ""
    content = json.loads((tmp_path / "bad_step.json").read_text())
    assert content == {"step": 66, "micro_batches": [{"samples": [65]}]}
    assert "warning: step 66: loss 1e+04, where the largest of " in capsys.readouterr().err


@pytest.mark.slow
def test_a_rate_that_is_too_high_ends_the_run_and_keeps_what_was_before(runs):
    runs.finish("--run.steps", "40", "--optimizer.schedule", "constant")
    flags = ("--run.steps", "90", "--optimizer.learning_rate", "30", "--checkpoint.every", "3")
    result = runs.here(*flags, "--optimizer.schedule", "constant")
    (line,) = [line for line in errors(result.stderr) if line.startswith("error: ")]
    assert "training diverges" in line
    assert line.endswith("the same command goes on from step 40")
    names = {path.name for path in (runs.folder / "run" / "checkpoints").iterdir()}
    assert all(name.startswith("diverged-") for name in names - {"40"} if int(name[-2:]) > 40)
    runs.finish("--run.steps", "44", "--optimizer.schedule", "constant")


def test_the_noise_scale_is_of_repaired_steps_and_in_the_unit_of_the_objectives_weights(capsys):
    config, measured = GradientNoiseConfig(every=5, steps=3), []
    noise = config.make(CallbackContext(Path(), StopRequest(), weighting="token"))
    run = SimpleNamespace(noise_scale=lambda steps: measured.append(steps) or 0.25)
    for run.done, name in ((1, "early"), (3, "good"), (4, "bad"), (4, "repaired"), (5, "last")):
        noise.on_step_end(run, SimpleNamespace(number=run.done - 1, name=name), {})
    assert noise.due(run)
    noise.act(run)
    assert {step.name for step in measured[0]} == {"good", "repaired", "last"}
    assert "step 5: 0.25 tokens" in capsys.readouterr().out
    run.done = 10
    assert not noise.due(run)
