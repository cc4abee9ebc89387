"""The time of a layer under each rematerialisation policy, measured."""

import json
import math

import jax
import pytest

from alload_jax.bench import step_process
from alload_jax.models.common.config import ModelConfig
from alload_jax.models.families import config_from_fields
from alload_jax.planning.remat import LADDER
from alload_jax.training import trial_step
from alload_jax.training.trial_step import layer_seconds, measurable, square_latents

FIELDS = {"in_channels": 1, "dim": 16, "ffn_dim": 32, "num_heads": 2, "num_layers": 5}


def model_with(**fields):
    return config_from_fields(FIELDS | {"memory_budget": 40.0, "remat": "auto"} | fields)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_policy_has_a_time(dtype):
    found = layer_seconds(model_with(dtype=dtype), (2, 1, 4, 4))
    assert list(found) == list(LADDER)
    assert all(0 < seconds < math.inf for seconds in found.values())


def out_of_memory(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_without_memory_for_the_measurement_there_are_no_times(monkeypatch):
    monkeypatch.setattr(trial_step, "Step", out_of_memory)
    assert layer_seconds(model_with(), (2, 1, 4, 4)) is None


def test_policies_that_do_not_fit_have_no_time(monkeypatch):
    monkeypatch.setattr(trial_step, "_compiled", lambda step, spec, latents: spec.model.remat)

    def seconds(step, program, batch):
        return out_of_memory() if program in ("none", "matmuls_and_attention") else 3.0

    monkeypatch.setattr(trial_step, "_run", seconds)
    found = layer_seconds(model_with(), (2, 1, 4, 4))
    assert found == {each: 1.5 for each in LADDER if each not in ("none", "matmuls_and_attention")}


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 1000, 32_760, 99_991])
def test_a_square_row_has_about_as_many_tokens(tokens):
    model = model_with()
    rows, *latents = square_latents(model, tokens)
    found = math.prod(latents) / math.prod(model.patch_size)
    assert rows == 1
    assert found % 2 == 0
    assert tokens - math.isqrt(tokens) - 2 <= found <= max(2, tokens)


def test_cpus_and_layers_that_differ_are_not_measured(monkeypatch):
    assert not measurable(model_with())
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert measurable(model_with())
    assert not measurable(ModelConfig(family="without_layers"))


def test_a_measured_step_takes_the_policy_of_least_measured_time(monkeypatch):
    asked = []
    times = dict.fromkeys(LADDER, 2.0) | {"feed_forward_and_attention": 1.0}

    def layer_seconds(model, latents, **_):
        asked.append(latents)
        return times

    monkeypatch.setattr(step_process, "measurable", lambda model: True)
    monkeypatch.setattr(step_process, "layer_seconds", layer_seconds)
    model, seconds = step_process.resolved(
        step_process.Settings(
            json.loads(json.dumps(FIELDS)) | {"remat": "auto", "memory_budget": 9.0}, 3, (1, 8, 8)
        )
    )
    assert model.remat == "none"
    assert model.policies == ("feed_forward_and_attention",)
    assert seconds == times
    assert asked == [(3, 1, 8, 8)]
