"""Every schedule against its formula in float64."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alload_jax.config import read_config
from alload_jax.errors import InputError
from alload_jax.training.optimizer import OptimizerConfig, learning_rate_schedule

PEAK = 0.5


def formula(config, length, step):
    """The learning rate of a step, counted from 0."""
    warmup, end = config.warmup_steps, PEAK * config.final_fraction
    if step < warmup:
        first = PEAK / warmup
        return first + (PEAK - first) * step / warmup
    if config.schedule == "constant":
        return PEAK
    if config.schedule == "wsd":
        decay = config.decay_steps or max(1, round(config.decay_fraction * length))
        progress = min(max(step - (length - decay), 0) / decay, 1)
        left = 1 - (math.sqrt(progress) if config.decay_shape == "sqrt" else progress)
    else:
        progress = min((step - warmup) / max(1, length - warmup), 1)
        left = (
            (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
        )
    return end + (PEAK - end) * left


@settings(deadline=None, max_examples=60)
@given(
    schedule=st.sampled_from(["cosine", "constant", "linear", "wsd"]),
    warmup=st.integers(0, 30),
    length=st.integers(60, 300),
    final=st.sampled_from([0.0, 0.1, 1.0]),
    decay=st.one_of(st.none(), st.integers(1, 30)),
    fraction=st.floats(0.01, 0.5),
    shape=st.sampled_from(["linear", "sqrt"]),
    own=st.booleans(),
)
def test_the_rate_follows_the_formula(schedule, warmup, length, final, decay, fraction, shape, own):
    config = OptimizerConfig(
        learning_rate=PEAK,
        schedule=schedule,
        schedule_steps=length if own else None,
        warmup_steps=warmup,
        final_fraction=final,
        decay_steps=decay,
        decay_fraction=fraction,
        decay_shape=shape,
    )
    found = learning_rate_schedule(config, 4000 if own else length)
    steps = np.arange(0, length + 20, 7)
    expected = [formula(config, length, step) for step in steps]
    np.testing.assert_allclose([found(step) for step in steps], expected, rtol=1e-4, atol=1e-6)


def test_the_curve_of_a_schedule_of_its_own_length_does_not_depend_on_the_run():
    config = OptimizerConfig(schedule="linear", schedule_steps=50, warmup_steps=5)
    short, long = learning_rate_schedule(config, 20), learning_rate_schedule(config, 400)
    assert [short(step) for step in range(60)] == [long(step) for step in range(60)]


def test_a_decay_that_does_not_fit_is_refused_when_the_config_is_read():
    flags = ["--run.folder", "r", "--data.folder", "d", "--planning.m_mem", "9"]
    wsd = [*flags, "--run.steps", "20", "--optimizer.schedule", "wsd"]
    with pytest.raises(InputError, match=r"warmup_steps is 100 and the decay .* takes 4 steps"):
        read_config(wsd)
    fits = read_config([*wsd, "--optimizer.warmup_steps", "16"])
    assert float(learning_rate_schedule(fits.optimizer, 20)(16)) == pytest.approx(1e-4)
