"""What a run says before its first step."""

import numpy as np
import pytest

from alload_jax.planning.cost import PowerCost, QuadraticCost
from alload_jax.planning.factory import make_plan
from alload_jax.planning.samples import Samples
from alload_jax.planning.settings import PlanningConfig
from alload_jax.report.summary import Opening, changed_settings, opening_lines, unused_settings


def samples_of(lengths):
    lengths = np.asarray(lengths)
    shape = np.stack([np.ones_like(lengths), np.full_like(lengths, 16), 16 * lengths], axis=1)
    return Samples(shape, lengths)


def opening_of(lengths, m_mem, ranks=2, cost=None):
    config = PlanningConfig(policy="equal_tokens", m_mem=m_mem)
    plan, cost = make_plan(config, samples_of(lengths), ranks, seed=0), cost or PowerCost(2.0)
    return Opening(plan, "equal_tokens", m_mem, cost, True, 100, 20, "new, drawn with run.seed 0")


def test_what_the_model_does_not_read_is_a_warning():
    opening = opening_of([10] * 40, 100)._replace(doubts=["each sample has embeddings"])
    assert opening_lines(opening)[1] == ["each sample has embeddings"]


def test_a_run_says_what_it_will_do():
    opening = opening_of([10] * 40, 100, cost=QuadraticCost(1.0, 0.01, 0.0))
    lines, warnings = opening_lines(opening)
    assert lines == [
        "data: 40 samples of 10 to 10 tokens; an epoch has 2 steps, the run 100 (50.0 epochs)",
        "steps: 20.0 samples on 2 ranks by equal_tokens, 100% of m_mem (100 tokens) filled, "
        "0.0% padding; programs to compile: 1",
        "predicted: 2.00 s a step, 0.0 h for what is left, without compilation; ranks wait 0.0% "
        "of the time",
        "weights: new, drawn with run.seed 0",
    ]
    assert warnings == []


def test_costs_without_a_unit_predict_no_time():
    lines, _ = opening_lines(opening_of([10] * 40, 100))
    assert not any(line.startswith("predicted") for line in lines)


@pytest.mark.parametrize(
    ("lengths", "m_mem", "words"),
    [
        ([60] * 40, 110, "micro-batches fill 55% of planning.m_mem on average; lower"),
        (range(50, 90), 90, "10 programs are compiled for 40 samples; prepare fewer sizes"),
    ],
)
def test_poor_plans_are_named(lengths, m_mem, words):
    _, warnings = opening_lines(opening_of(lengths, m_mem, ranks=1))
    assert any(words in warning for warning in warnings)


@pytest.mark.parametrize("key", ["run.initial_weights", "run.initial_lora"])
@pytest.mark.parametrize("earlier", [None, "a"])
def test_weights_that_a_run_that_goes_on_does_not_read_are_named(key, earlier):
    before = {"run.steps": 5, key: earlier}
    now = {"run.steps": 6, "run.initial_weights": None, "run.initial_lora": None, key: "garbage"}
    line = unused_settings(before, now)
    assert line.startswith(f"{key} garbage: not used")
    assert "run.folder" in line
    assert unused_settings(now, now) == unused_settings({}, now) == ""


def test_changed_settings_are_named():
    before = {"run.steps": 10, "optimizer.learning_rate": 1e-3, "old": 1}
    now = {"run.steps": 20, "optimizer.learning_rate": 1e-3, "new": 2}
    assert changed_settings(before, now) == "changed since the last start: run.steps 10 → 20"
    assert changed_settings(now, now) == ""
    many = {str(n): n for n in range(9)}
    line = changed_settings(many, {key: value + 1 for key, value in many.items()})
    assert line.endswith(" and 3 more")
