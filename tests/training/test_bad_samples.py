"""Samples that are not finite are left out of their step, and a run that diverges is seen."""

import dataclasses
import json
from contextlib import closing
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from group_cases import SIZES, SPEC, collation_of
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import mesh_of
from patience import PATIENCE, wait_until
from training_runs import Runs, computed, errors, lines_of

from alload_jax.data.collate import Collator
from alload_jax.data.loader import LoaderConfig, place_ahead
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import group_meshes, local_plan_ranks
from alload_jax.training import DivergenceConfig
from alload_jax.training.callbacks import Callback
from alload_jax.training.divergence import Divergence, DivergenceGuard
from alload_jax.training.loop import BadSamples, Loop
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import init_state
from alload_jax.training.trainer import Trainer

SAMPLES, STEPS = 12, 6
HUGE = {4: 3e38, 9: 1e25}
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


def write_data(folder, huge):
    rng = np.random.default_rng(0)
    with StoreWriter(folder, vae_stride=(1, 1, 1)) as writer:
        for n in range(SAMPLES):
            size = SIZES[n % 3 == 2]
            latents = rng.normal(size=(*size, 1)).clip(-1, 1).astype(np.float32)
            condition = rng.integers(0, 10, 2).astype(np.int32)
            writer.add(latents * np.float32(huge.get(n, 1.0)), condition, size)
    return read_manifest(folder)


class Notes(Callback):
    """What callbacks are told of the steps that count."""

    def __init__(self, most):
        self.most, self.steps, self.problems = most, {}, []

    def on_step_start(self, run, step):
        new = [each for each in step.problems if each not in self.problems]
        self.problems += new
        if new and len(self.problems) > self.most:
            run.refuse(new[-1])

    def on_step_end(self, run, step, metrics):
        self.steps[step.number] = (metrics, step.problems)

    def due(self, run):
        return run.done == 2


TRAINERS = {}
"""By name of the plan; with compiled programs, which all tests share."""


class Training:
    def __init__(self, folder, name, huge=HUGE, most=9):
        ranks, options = PLANS[name]
        self.folder, self.manifest = folder, write_data(folder / "data", huge)
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
    ours = Training(tmp_path / "ours", "bucketed", huge=dict.fromkeys(range(SAMPLES), 3e38))
    said = r"step 1: loss \w+, .* for each of its \d samples: training diverges; its"
    with pytest.raises(InputError, match=said):
        ours.run()
    assert json.loads((tmp_path / "ours" / "bad_step.json").read_text())["step"] == 1


class Faulty:
    """A device that computes one step wrongly."""

    def __init__(self, trainer):
        self._trainer = trainer

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def step(self, step):
        metrics = self._trainer.step(step)
        if step.number == 3:
            return metrics | {"loss": jax.numpy.nan}
        return metrics


def test_a_repair_that_finds_nothing_is_told_and_ends(tmp_path, capsys):
    ours = Training(tmp_path / "ours", "bucketed", huge={})
    ours.trainer = Faulty(ours.trainer)
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
    """Digits, one of which has latents beyond what float32 can square."""
    source = read_manifest(digits_folder)
    reader = StoreReader(source)
    with StoreWriter(tmp_path / "poisoned", vae_stride=source.vae_stride) as writer:
        for n in range(len(source)):
            arrays = reader.read(n)
            scale = np.float32(1e30 if n == 12 else 1.0)
            writer.add(arrays["latents"] * scale, arrays["labels"], tuple(source.shape[n]))
    runs = Runs(tmp_path, tmp_path / "poisoned")
    flags = ("--sampling.grids", "[]", "--run.steps", "12", "--planning.ranks", "2")
    refused = runs.here(*flags, "--run.folder", "refused")
    (line,) = errors(refused.stderr)
    assert "sample 12 gives a loss or gradient that is not finite; restore the record, or" in line

    flags = (*flags, "--data.loader.max_bad_records", "1")
    runs.finish(*flags, "--run.folder", "refused")
    both = runs.start_together(2, *flags)
    outputs = [each.communicate(timeout=PATIENCE) for each in both]
    assert [each.returncode for each in both] == [0, 0], outputs
    assert outputs[0][0].count("skipped:") == 1
    for name in ("refused", "run"):
        rows = runs.metrics(name)
        assert sum(row["skipped"] for row in rows) >= 1
        assert sum(row["samples"] + row["skipped"] for row in rows if row["epoch"] == 0) == 21
        assert lines_of(runs.folder / name / "bad_records.txt") == 1

    killed = runs.start(*flags, "--checkpoint.every", "2", "--run.folder", "killed")
    wait_until(lambda: lines_of(runs.folder / "killed" / "bad_records.txt") == 1, killed)
    killed.kill()
    killed.communicate()
    runs.finish(*flags, "--checkpoint.every", "2", "--run.folder", "killed")
    assert computed(runs.folder / "killed") == computed(runs.folder / "refused")


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


@pytest.mark.parametrize("loss", [18.0, 1e30])
def test_a_run_that_is_wrong_from_its_first_step_ends_at_once(loss):
    found = findings([loss] * 30, [1.0] * 30, NOTHING)
    assert next(n for n, each in found if each.stops) == 6


def test_weights_that_break_are_seen_where_a_model_has_learned():
    losses = np.concatenate([np.full(100, 0.1), np.full(50, 1.6)])
    (at, found), *others = findings(losses, np.ones(150), NOTHING)
    assert at == 106
    assert found.ago == 7
    assert found.stops
    assert not others


def test_a_single_bad_step_is_named_and_ends_nothing():
    losses, norms = healthy(0)
    losses[120] = 1e4
    ((at, found),) = findings(losses, norms, NOTHING)
    assert (at, found.spike, found.stops, found.ago) == (120, True, False, 1)


def test_gradients_that_grow_are_worth_a_warning():
    losses, norms = healthy(1)
    norms[300:] *= 1e4
    ((at, found),) = findings(losses, norms, NOTHING)
    assert at <= 310
    assert found.words.startswith("gradient norm")
    assert not found.stops


def test_a_level_that_lasts_becomes_the_usual():
    """Other data, say: they are told once, and later losses are compared with theirs."""
    losses = np.concatenate([np.full(100, 0.1), np.full(400, 0.4), np.full(100, 40.0)])
    found = findings(losses, np.ones(600))
    assert [(n, each.stops) for n, each in found] == [(106, False), (506, True)]


def test_steps_of_padding_do_not_count():
    losses = np.where(np.arange(200) % 2, 0.0, 1.0)
    assert findings(losses, losses, NOTHING) == []
    assert findings(np.tile([0.0] * 9 + [1.0], 40), np.tile([0.0] * 9 + [1.0], 40)) == []


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
    calls, said = guard(tmp_path, [0.1] * 5 + [0.95] * 8 + [0.1] * 20)
    assert (calls, said) == ([("hold", 65), ("hold", None)], "")
    warned, back = capsys.readouterr().err.splitlines()
    assert warned.startswith("warning: step 72: loss 0.95 over the last 10 steps, where")
    assert warned.endswith(": training may diverge; step 60 is kept")
    assert back == "step 83: losses and gradients are back at their usual size"


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
