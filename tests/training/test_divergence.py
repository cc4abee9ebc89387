"""A run that diverges is seen, and a healthy one is left alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import errors

from alload_jax.errors import InputError
from alload_jax.objectives.flow_matching import FlowMatching
from alload_jax.training import DivergenceConfig
from alload_jax.training.divergence import Divergence, DivergenceGuard

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
    assert FlowMatching().loss_of_nothing(0.64) == pytest.approx(lost, rel=0.02)
    assert FlowMatching(noise_weighting="sigma_sqrt").loss_of_nothing(0.64) is None


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
