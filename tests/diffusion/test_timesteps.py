"""Noise levels in float32 under jit, against their distributions in float64."""

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alload_jax.diffusion.timesteps import TimestepConfig, sample_sigma, shift_of, shift_sigma
from alload_jax.errors import InputError

COUNT = 20_000
LARGEST_GAP = 2.7 / np.sqrt(COUNT) + 1 / 256
"""Of Kolmogorov and Smirnov: exceeded once in a million, and a unit of float32 in narrow ranges."""


def draws(config, seq_len=16, count=COUNT):
    def draw(keys, seq_len):
        return jax.vmap(lambda key: sample_sigma(key, config, seq_len))(keys)

    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.jit(draw)(keys, seq_len))


# ---------------------------------------------------------------- the oracle, in float64


def share_below(sigma, config, seq_len=16):
    """The share of levels up to σ."""
    shift = config.shift * (seq_len / config.shift_seq_len) ** config.shift_power
    ends = np.asarray([config.lowest, config.highest])
    if config.distribution == "logit_normal":
        mean = config.mean + np.log(shift)
        low, high, found = (
            (scipy.special.logit(value) - mean) / config.std for value in (*ends, sigma)
        )
        return scipy.stats.truncnorm.cdf(found, low, high)
    low, high, found = (uniform_of(value, shift, config) for value in (*ends, sigma))
    return (found - low) / (high - low)


def uniform_of(sigma, shift, config):
    """The uniform number that gives a level after the shift."""
    before = sigma / (sigma + shift * (1 - sigma))
    if config.distribution == "uniform":
        return before
    low, high = np.zeros_like(before), np.ones_like(before)
    for _ in range(60):  # eq. 20 of arXiv 2403.03206 falls; its place 1 − u rises
        place = (low + high) / 2
        level = place - config.mode_scale * (np.cos(np.pi / 2 * (1 - place)) ** 2 - place)
        low, high = np.where(level < before, place, low), np.where(level < before, high, place)
    return high


def gap(config, seq_len=16):
    """The statistic of Kolmogorov and Smirnov of drawn levels, which are rounded to float32."""
    found, counts = np.unique(draws(config, seq_len), return_counts=True)
    assert np.isfinite(found).all()
    assert np.float32(config.lowest) <= found[0] <= found[-1] <= np.float32(config.highest)
    found, following = (
        values.astype(np.float64) for values in (found, np.nextafter(found, np.float32(2)))
    )
    bounds = np.clip((found + following) / 2, config.lowest, config.highest)
    return np.abs(share_below(bounds, config, seq_len) - counts.cumsum() / COUNT).max()


# ---------------------------------------------------------------- distributions

LEVELS = st.one_of(
    st.floats(-8, 8).map(lambda logit: float(scipy.special.expit(logit))), st.sampled_from([0, 1])
)


@given(
    ends=st.tuples(LEVELS, LEVELS).map(sorted),
    distribution=st.sampled_from(["uniform", "logit_normal", "mode"]),
    mean=st.floats(-4, 4),
    std=st.floats(0.05, 3),
    mode_scale=st.floats(-1, 1.7),
    shift=st.floats(1, 17),
    shift_power=st.sampled_from([0, 0.3, 0.5]),
    seq_len=st.integers(1, 100_000),
)
@settings(max_examples=8, deadline=None)
def test_levels_are_drawn_from_their_distribution(ends, seq_len, **values):
    try:
        config = TimestepConfig(lowest=ends[0], highest=ends[1], shift_seq_len=256, **values)
    except InputError:
        assume(False)
    assert gap(config, seq_len) < LARGEST_GAP


RECIPES = {
    "SD3": {"shift": 3.0},
    "SD3 by mode": {"distribution": "mode", "shift": 3.0},
    "SD3 by resolution": {"shift_seq_len": 1024, "shift_power": 0.5},
    "Wan 2.2, high": {"shift": 12.0, "lowest": 0.875},
    "Wan 2.2, low": {"shift": 5.0, "highest": 0.9},
    "Wan 2.2, high, uniform": {"distribution": "uniform", "shift": 5.0, "lowest": 0.875},
    "a far upper tail": {"lowest": 0.999},
    "a far lower tail": {"shift": 12.0, "highest": 0.05},
    "a hundred deviations away": {"mean": -8.0, "std": 0.1, "lowest": 0.9},
    "a narrow range": {"std": 3.0, "lowest": 0.5, "highest": 0.5001},
    "both ends in one tail": {"mean": 6.0, "lowest": 0.001, "highest": 0.002},
    "the ends of mode": {"distribution": "mode", "mode_scale": -1.0, "lowest": 0.999},
    "a range as narrow as float32 allows": {
        "distribution": "uniform",
        "lowest": 0.5,
        "highest": 0.5 + 256 * 2**-24,
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_levels_of_published_recipes_and_of_tails(recipe):
    assert gap(TimestepConfig(**RECIPES[recipe]), 75_600) < LARGEST_GAP


# ---------------------------------------------------------------- the shift


@given(sigma=st.floats(0, 1, width=32), shift=st.floats(1e-4, 1e4))
@settings(max_examples=30)
def test_the_shift_of_no_level_is_beyond_0_and_1(sigma, shift):
    assert 0 <= shift_sigma(np.float32(sigma), 1 - np.float32(sigma), np.float32(shift)) <= 1


def test_the_shift_adds_its_logarithm_to_the_logit_and_grows_with_a_power_of_length():
    sigma = np.linspace(0.01, 0.99, 50)
    shifted = np.asarray(shift_sigma(sigma, 1 - sigma, 3.0))
    expected = scipy.special.logit(sigma) + np.log(3.0)
    np.testing.assert_allclose(scipy.special.logit(shifted), expected, atol=1e-4)
    config = TimestepConfig(shift=2.0, shift_seq_len=16, shift_power=0.5)
    assert [shift_of(config, length) for length in (4, 16, 64)] == [1.0, 2.0, 4.0]


NAN, INFINITE = float("nan"), float("inf")
FINITE = ("mean", "std", "mode_scale", "shift", "shift_seq_len", "shift_power")
RANGE = r"lowest is .*they must be from 0 to 1"
NARROW = "lowest is .* too narrow for float32.* widen the range"
MOVED = f"{NARROW}, or move mean towards it"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *(({name: value}, f"{name} is {value}") for name in FINITE for value in (NAN, INFINITE)),
        *(({"lowest": low, "highest": 0.5}, RANGE) for low in (0.5, -0.1, 0.9, NAN)),
        ({"highest": 1.1}, RANGE),
        ({"mode_scale": 1.752}, "mode_scale is 1.752; it must be from -1 to 1.75"),
        ({"distribution": "uniform", "lowest": 0.5, "highest": 0.5 + 255 * 2**-24}, f"{NARROW}$"),
        ({"lowest": 1 - 1e-8}, MOVED),
        ({"highest": 1e-320, "distribution": "uniform"}, f"{NARROW}$"),
        ({"mean": -8.0, "std": 0.001, "lowest": 0.9}, MOVED),
        ({"mean": -60.0, "lowest": 0.9999}, MOVED),
        ({"std": 1e-9, "lowest": 0.2, "highest": 0.8}, MOVED),
        ({"lowest": 0.9999, "shift_power": -0.9}, MOVED),
        ({"shift": 1e300}, "shift is .* beyond float32"),
        ({"shift_power": 1000.0}, "shift is .* beyond float32"),
    ],
)
def test_values_that_cannot_be_drawn_from_are_refused(values, words):
    with pytest.raises(InputError, match=rf"objective\.timesteps\.{words}"):
        TimestepConfig(**values)
