"""`alload calibrate`: a run of a tiny model on this host, and refusals."""

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from patience import PATIENCE

from alload_jax.bench import calibration
from alload_jax.bench.calibration import Case, check_memory, grid, sparse_cases
from alload_jax.bench.calibration_fit import (
    fit_points,
    fit_sparse_outcomes,
    memory_details,
    point_rows,
)
from alload_jax.cli import main
from alload_jax.commands import calibrate
from alload_jax.data.batch import PackedBatch
from alload_jax.errors import InputError
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.cost import (
    CostFile,
    MemoryModel,
    QuadraticCost,
    SparseLayers,
    SparseTerms,
    bucketed_cost,
    read_cost_file,
    with_layers,
)
from alload_jax.planning.fit import Point
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.trial_step import training_spec

CONFIG = """
run: {folder: runs/tiny}
data: {folder: data/none}
planning: {m_mem: 64}
model: {dim: 16, ffn_dim: 32, num_heads: 2, num_layers: 1, patch_size: [1, 1, 1]}
"""
SHORT = ["--seconds", str(PATIENCE), "--shortest", "4", "--longest", "16"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Few compilations: the sizes for memory are points of the grid too.
    monkeypatch.setattr(calibration, "_TARGETS", (8, 16))
    monkeypatch.setattr(calibration, "_MEMORY_SIZES", (1, 2))
    monkeypatch.setattr(calibration, "_MEMORY_LENGTH", 4)
    monkeypatch.setattr("alload_jax.bench.calibration_fit._HOLD_OUT_FROM", 6)
    monkeypatch.setattr(calibration, "_TIMED_SECONDS", 0.05)
    run = calibration.Step.run
    # So few tokens take no time that grows among other processes.
    monkeypatch.setattr(
        calibration.Step, "run", lambda self, *of: run(self, *of) + 0.02 * of[1].latents.size
    )
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_a_tiny_model_and_its_sparse_layers_are_calibrated(config, tmp_path, monkeypatch, capsys):
    # Blocks are longer than these samples, which sparse layers do not make faster.
    run, used = calibration.Step.run, []

    def slower_by_density(self, gradient, batch):
        forced, tokens = self.model.sparse_attention.forced, batch.latents.size
        used.append((forced, tokens))
        return run(self, gradient, batch) + (0.5 * tokens if forced[0] < 1 else 0)

    monkeypatch.setattr(calibration.Step, "run", slower_by_density)
    sparse = "[1, 1, 1], sparse_attention: {selector: pooled, min_tokens: 9}"
    config.write_text(CONFIG.replace("[1, 1, 1]", sparse))
    out, picture = tmp_path / "cost.json", tmp_path / "fit.png"
    flags = ["--config", str(config), "--out", str(out), "--picture", str(picture), *SHORT]
    flags += ["--memory-gb", "0.5", "--set", "model.remat", "full"]
    began = time.perf_counter()
    assert main(["calibrate", *flags]) == 0
    seconds = time.perf_counter() - began
    costs = read_cost_file(out)
    assert all(math.isfinite(value) for value in vars(costs.quadratic).values())
    assert costs.power.p > 0
    assert (costs.origin, costs.device, costs.model["remat"]) == ("measured", "cpu", "full")
    assert costs.memory.bytes_of(costs.m_mem) <= 0.95 * 0.5e9
    assert costs.bytes_per_split_token == 12 * 4 * 16
    assert 0 < costs.program_seconds < seconds
    points, fits = costs.details["points"], costs.details["fits"]
    assert any(point["held_out"] for point in points)
    assert all(math.isfinite(form["held_out_mape"]) for form in fits.values())
    assert set(fits) == {"quadratic", "three_term", "power"}
    assert picture.stat().st_size > 10_000
    assert {forced for forced, _ in used} == {(1.0,), (0.1,), (0.3,)}
    assert {tokens for forced, tokens in used if forced[0] < 1} == {12, 16}
    sparse = costs.details["sparse"]
    assert [(p["density"], p["seq_len"]) for p in sparse["points"]] == [
        (density, seq_len) for density in (0.1, 0.3) for seq_len in (12, 16)
    ]
    assert sparse["mape"] < 0.1
    model = with_layers(costs, SparseLayers(1.0, 0.1, 9, 64)).quadratic
    for point in sparse["points"]:
        seconds = bucketed_cost(model, np.array([1]), np.array([point["seq_len"]]))
        assert seconds == pytest.approx(point["predicted_seconds"])
    assert costs.model["sparse_attention"] == {"selector": "pooled"}
    printed = capsys.readouterr().out
    for words in ("held out", "1 × 12 tokens, density 0.3: ", "steps with sparse attention"):
        assert words in printed


def test_a_step_whose_update_is_compiled_trains_what_is_not_frozen():
    fields = {"dim": 16, "ffn_dim": 32, "num_heads": 2, "num_layers": 1, "patch_size": (1, 1, 1)}
    model, trained = config_from_fields({"family": "wan", **fields}), ParametersConfig(("head",))
    step = calibration.Step(training_spec(model, parameters=trained), 1)
    step.compile_update()
    shape = (1, 1, 2, 2)
    assert step.run(step.compile(shape), step.batch(shape)) > 0
    assert int(step.state.step) == 1
    assert step.state.frozen


def test_outcomes_of_sparse_attention_become_terms():
    quadratic, terms = QuadraticCost(0.1, 1e-4, 1e-8, 1e-3), SparseTerms(1.4e-8, 2e-5, 1e-10)
    config = SparseAttentionConfig(min_tokens=4_000)
    costs = CostFile(quadratic=quadratic, sparse=terms)
    outcomes = []
    for density in calibration.DENSITIES:
        model = with_layers(costs, SparseLayers(1.0, density, 4_000)).quadratic
        for case in sparse_cases(256, 32_768, 4_000):
            [seconds] = bucketed_cost(model, np.array([case.rows]), np.array([case.seq_len]))
            outcomes.append(calibration.Outcome(case, float(seconds), density=density))
    found, details = fit_sparse_outcomes(outcomes, quadratic, config)
    np.testing.assert_allclose(list(vars(found).values()), list(vars(terms).values()), rtol=1e-6)
    assert details["mape"] < 1e-9
    assert len(details["points"]) == 6
    few = [*outcomes[:2], calibration.Outcome(Case(1, 9), note="skipped", density=0.3)]
    assert fit_sparse_outcomes(few, quadratic, config)[0] is None


def test_sparse_attention_is_measured_where_it_applies():
    for shortest, longest, min_tokens, lengths in (
        (256, 80_000, 16_384, [16_384, 36_096, 80_000]),
        (256, 80_000, 80_001, []),
        (256, 16_384, 16_384, [16_384]),
        (4, 16, 0, [4, 8, 16]),
        (100, 1_000, 250, [300, 500, 1_000]),
    ):
        assert [c.seq_len for c in sparse_cases(shortest, longest, min_tokens)] == lengths


STEP_SECONDS = {4: 0.01, 8: 0.2, 16: 1.0, 32: 2.0, 64: 9.0}
"""By tokens."""


class PretendedStep:
    """Takes no time, and says that it took STEP_SECONDS."""

    tokens_beside, state, accumulator = 0, np.zeros(2, np.float32), np.zeros(3, np.float32)
    model = SimpleNamespace(sparse_attention=None, patch_size=(1, 1, 1))

    def __init__(self):
        self.update, self.ran = program_of(50), []

    def compile_update(self):
        pass

    def compile(self, latents):
        return program_of(100 * math.prod(latents))

    def batch_shape(self, latents):
        return [np.zeros(latents, np.float32)]

    def batch(self, latents):
        return math.prod(latents)

    def run(self, program, tokens):
        self.ran.append(tokens)
        return STEP_SECONDS[tokens]


def program_of(temporary):
    found = SimpleNamespace(temp_size_in_bytes=temporary)
    return SimpleNamespace(memory_analysis=lambda: found)


@pytest.mark.parametrize(
    ("seconds", "memory", "repeats", "notes"),
    [
        (1000.0, None, {4: 15, 8: 7, 16: 3, 32: 3, 64: 1}, {}),
        (5.0, None, {4: 15, 8: 7, 16: 3}, dict.fromkeys((32, 64), "skipped: no time left")),
        (1000.0, 20 + 104 * 32, {4: 15, 8: 7, 16: 3, 32: 3}, {64: "needs 0.0 GB"}),
    ],
)
def test_the_grid_is_timed_within_time_and_memory(seconds, memory, repeats, notes, monkeypatch):
    monkeypatch.setattr(calibration, "_TARGETS", ())
    monkeypatch.setattr(calibration, "LEAST_POINTS", 3)
    step, bounds = PretendedStep(), calibration.Bounds(seconds, 4, 64, memory=memory)
    found = list(calibration.Calibration(step, bounds).measure(64))
    timed = {each.case.tokens: each for each in found if each.seconds}
    assert {tokens: each.repeats for tokens, each in timed.items()} == repeats
    assert {each.case.tokens: each.note for each in found if each.note} == notes
    for tokens, each in timed.items():
        assert each.seconds == each.least == each.most == STEP_SECONDS[tokens]
        assert each.bytes == 20 + 104 * tokens
        assert step.ran.count(tokens) == 1 + each.repeats


@pytest.mark.parametrize(("seconds", "ends", "least"), [(29, 6, 60), (40, 18, 80), (60, 30, None)])
def test_too_little_time_for_a_fit_is_told_as_soon_as_it_is_known(
    seconds, ends, least, monkeypatch
):
    """A program compiles in 6 seconds. Where that is little enough, the fourth step is too long."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def compile(step, latents):
        clock.now += 6
        return program_of(100)

    monkeypatch.setattr(PretendedStep, "compile", compile)
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "_TARGETS", ())
    monkeypatch.setattr(calibration, "cpus", lambda: 1)
    measured = calibration.Calibration(PretendedStep(), calibration.Bounds(seconds, 4, 64))
    if least is None:
        assert sum(each.seconds is not None for each in measured.measure(64)) == 5
    else:
        with pytest.raises(InputError, match=f"takes 6 s .* a fit needs 5; give at least {least}"):
            list(measured.measure(64))
    assert clock.now == ends


def test_steps_that_are_compiled_together_count_before_time_is_too_short(monkeypatch):
    """Four are compiled at once, and the sixth step would take too long."""
    monkeypatch.setattr(calibration, "cpus", lambda: 16)
    cases = [Case(1, 4), Case(2, 2), Case(1, 8), Case(2, 4), Case(1, 16), Case(1, 64)]
    monkeypatch.setattr(calibration, "grid", lambda *_: cases)
    measured = calibration.Calibration(PretendedStep(), calibration.Bounds(20, 4, 64))
    notes = [each.note for each in measured.measure(64)]
    assert notes == [None] * 5 + ["skipped: no time left"]


@pytest.mark.slow
def test_packed_rows_are_timed_beside_batches_where_that_decides(monkeypatch):
    fields = {"dim": 16, "ffn_dim": 32, "num_heads": 2, "num_layers": 1, "patch_size": [1, 1, 1]}
    step = calibration.Step(training_spec(config_from_fields({"family": "wan", **fields})), 1)
    measured = calibration.Calibration(step, calibration.Bounds())
    outcomes = [calibration.Outcome(Case(*case), 1.0) for case in ((1, 16), (4, 6), (2, 4))]
    assert measured.packed_ratio(outcomes) is None  # a CPU packs no rows by itself
    able = SimpleNamespace(packing_unsupported_reason=lambda _: "")
    monkeypatch.setattr(calibration, "family_of", lambda _: able)
    measured_run, batches = calibration.Step.run, []

    def run(self, program, batch):
        batches.append(batch)
        assert np.isfinite(measured_run(self, program, batch))
        return 3.0 if isinstance(batch, PackedBatch) else 2.0

    monkeypatch.setattr(calibration.Step, "run", run)
    assert measured.packed_ratio(outcomes) == pytest.approx(1.5)
    assert measured.packed_ratio(outcomes[:1]) is None
    # Rows that do not fit lose nothing that was measured.
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")
    with monkeypatch.context() as patch:
        patch.setattr(calibration.Step, "run", Mock(side_effect=full))
        assert measured.packed_ratio(outcomes) is None
    packed = [each for each in batches if isinstance(each, PackedBatch)]
    assert [int((each.seq_len == 6).sum()) for each in packed] == [4] * 4


def test_memory_is_a_line_through_compiled_programs(monkeypatch):
    monkeypatch.setattr(calibration, "_MEMORY_LENGTH", 16)
    bounds = calibration.Bounds(shortest=4, margin=0.05, memory=20 + 104 * 100)
    found = calibration.Calibration(PretendedStep(), bounds).memory()
    assert {case.tokens: size for case, size in found.sizes} == {
        tokens: 20 + 104 * tokens for tokens in (16, 32, 64)
    }
    assert found.m_mem == int((0.95 * bounds.memory - 20) / 104)
    outcomes = [calibration.Outcome(case, bytes=2 * size) for case, size in found.sizes]
    assert memory_details(found, outcomes)["worst_relative_error"] == pytest.approx(0.5)
    small = dataclasses.replace(bounds, memory=20 + 104 * 3)
    with pytest.raises(InputError, match="hold 2 tokens, fewer than the shortest sequence, 4"):
        calibration.Calibration(PretendedStep(), small).memory()
    clock = itertools.count(0, 9)  # seconds, of which each look takes nine
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(calibration, "cpus", lambda: 1)
    brief = dataclasses.replace(bounds, seconds=89.0)
    with pytest.raises(InputError, match=r"takes 9 s to compile .* needs 5; give at least 90"):
        calibration.Calibration(PretendedStep(), brief).memory()
    calibration.Calibration(PretendedStep(), dataclasses.replace(brief, seconds=90.0)).memory()


@pytest.mark.slow
def test_measurements_before_an_interrupt_are_fitted(config, tmp_path, monkeypatch):
    def interrupted(self, m_mem):
        for n in range(6):
            yield calibration.Outcome(Case(1, 4 * 2**n), 0.1 + n, 0.1, 9.0, 3, 10)
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration.Calibration, "measure", interrupted)
    again = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(calibration.Calibration, "packed_ratio", again)
    line = MemoryModel(1e6, 1e3)
    finding = calibration.MemoryFinding(1e8, [(Case(1, 4), 10)], line, 0.05, 4)
    monkeypatch.setattr(calibration.Calibration, "memory", lambda self: finding)
    out = tmp_path / "cost.json"
    flags = ["--config", str(config), "--out", str(out), "--layers", "1", *SHORT]
    assert main(["calibrate", *flags]) == 0
    assert len(read_cost_file(out).details["points"]) == 6


def test_the_grid_is_ascending_and_within_memory():
    cases = grid(256, 80_000, 100_000)
    assert [c.tokens for c in cases] == sorted(c.tokens for c in cases)
    assert {c.seq_len for c in cases} >= {256, 512, 65_536, 80_000}
    assert all(Case(1, c.seq_len) in cases for c in cases)
    assert max(c.tokens for c in grid(256, 4096, 5000)) <= 5000
    for seq_len, patch in itertools.product((1, 7, 32_760, 65_537), ((1, 2, 2), (2, 3, 1))):
        rows, *latents = Case(3, seq_len).latents(patch)
        assert rows == 3
        assert math.prod(latents) == seq_len * math.prod(patch)
        assert all(size % p == 0 for size, p in zip(latents, patch, strict=True))
    # Tokens of a joint condition count in a length, and make no latents.
    cases = grid(256, 4096, 10_000, beside=100)
    assert [case.seq_len for case in cases if case.rows == 1] == [356, 612, 1124, 2148, 4196]
    assert max(case.tokens for case in cases) <= 10_000
    for case in cases:
        assert math.prod(case.latents((1, 2, 2))[1:]) == 4 * (case.seq_len - 100)


def test_held_out_points_do_not_affect_the_fit():
    model = QuadraticCost(0.1, 1e-4, 1e-8, 1e-3)
    cases = grid(256, 16_384, 70_000)
    points = [
        Point(c.rows, c.seq_len, float(bucketed_cost(model, c.rows, c.seq_len))) for c in cases
    ]
    held = fit_points(points).held_out
    assert 0 < sum(held) <= len(points) / 4
    spoilt = [
        Point(p.rows, p.seq_len, p.seconds * (9 if out else 1))
        for p, out in zip(points, held, strict=True)
    ]
    assert fit_points(spoilt).quadratic == fit_points(points).quadratic
    assert fit_points(spoilt).summary()["quadratic"]["held_out_mape"] == pytest.approx(8 / 9)
    outcomes = [calibration.Outcome(c, p.seconds) for c, p in zip(cases, spoilt, strict=True)]
    for row in point_rows(fit_points(spoilt), outcomes):
        expected = 1 / 9 - 1 if row["held_out"] else 0.0
        assert row["residual"] == pytest.approx(expected, abs=1e-6)


def test_the_memory_check_runs_steps_at_m_mem_and_beyond(monkeypatch):
    calls = []

    def measured(_, settings, variables):
        assert variables == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.75"}
        calls.append(settings)
        return {"seconds": 1.0, "peak_bytes": 5e8} if len(calls) == 1 else {"error": "no memory"}

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(calibration, "measured", measured)
    model = {"dim": 16, "patch_size": [1, 2, 2], "condition_tokens": 3}
    details = {"margin": 0.05, "memory": {"shortest": 4096}}
    memory = MemoryModel(1e8, 4e3, 1e5)
    costs = CostFile(memory=memory, m_mem=100_000, model=model, details=details)
    found = check_memory(costs)
    within, beyond = found["within"], found["beyond"]
    assert (within["ran"], beyond["ran"]) == (True, False)
    assert (within["rows"], within["seq_len"]) == (24, 4096)
    assert within["relative_error"] == pytest.approx((1e8 + 4e3 * 24 * 4096 + 24e5) / 5e8 - 1)
    assert beyond["tokens"] >= 1.1 * costs.m_mem / 0.95
    assert calls[0]["condition_tokens"] == 3
    assert "condition_tokens" not in calls[0]["model"]
    costs.details["memory"]["shortest"] = 256
    assert check_memory(costs)["within"]["seq_len"] == 256


def test_every_flag_is_passed_to_the_measuring_process(config, monkeypatch):
    commands = []

    def started(command):
        commands.append(command)
        return contextlib.nullcontext(SimpleNamespace(wait=lambda: 1))

    monkeypatch.setattr(calibrate.subprocess, "Popen", started)
    flags = ["calibrate", "--config", "tiny.yaml", "--out", "b", "--set", "k", "v"]
    assert main([*flags, "--memory-check", "--memory-gb", "3.0"]) == 1
    assert commands == [[sys.executable, "-m", "alload_jax.cli", *flags, "--memory-gb", "3.0"]]
