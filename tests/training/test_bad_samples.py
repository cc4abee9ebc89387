"""Samples whose loss or gradient is not finite are left out of their step: their weight is 0."""

import dataclasses
import json
from contextlib import closing

import jax
import numpy as np
import pytest
from group_cases import SIZES, SPEC, collation_of
from layouts import mesh_of
from patience import PATIENCE, wait_until
from training_runs import Runs, computed, errors, lines_of

from alload_jax.data.collate import Collator
from alload_jax.data.loader import LoaderConfig, place_ahead
from alload_jax.data.manifest import read_manifest
from alload_jax.data.store import StoreReader, StoreWriter
from alload_jax.distributed.cluster import Cluster
from alload_jax.errors import InputError
from alload_jax.planning.factory import make_plan
from alload_jax.planning.settings import PlanningConfig
from alload_jax.sharding.mesh import group_meshes, local_plan_ranks
from alload_jax.training.callbacks import Callback
from alload_jax.training.loop import BadSamples, Loop
from alload_jax.training.run_plan import RunPlan
from alload_jax.training.state import init_state
from alload_jax.training.trainer import make_trainer

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
        self.run_plan = RunPlan(self.plan, planning, Cluster(), number=self.manifest.number)
        state = init_state(SPEC, self.mesh, seed=0)
        if name not in TRAINERS:
            TRAINERS[name] = make_trainer(SPEC, self.mesh, state, self.groups)
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
