import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from alload_jax.diffusion.flow import interpolate, squared_error, velocity
from alload_jax.diffusion.samplers import guided, sample
from alload_jax.diffusion.schedules import noise_levels
from alload_jax.diffusion.timesteps import (
    TimestepConfig,
    sample_sigma,
    shift_of,
    shift_sigma,
)
from alload_jax.errors import InputError


def clips(seed, shape=(3, 2, 4, 4, 1)):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_the_path_runs_from_data_to_noise_at_the_target_velocity():
    data, noise = clips(0), clips(1)
    np.testing.assert_array_equal(interpolate(data, noise, jnp.zeros(3)), data)
    np.testing.assert_array_equal(interpolate(data, noise, jnp.ones(3)), noise)
    sigma = jnp.asarray([0.1, 0.5, 0.7])
    _, slope = jax.jvp(lambda s: interpolate(data, noise, s), (sigma,), (jnp.ones(3),))
    np.testing.assert_allclose(slope, velocity(data, noise), rtol=1e-6)


def test_the_error_is_each_samples_own_mean():
    ours, theirs = clips(2), clips(3)
    expected = [
        np.mean((np.asarray(a) - np.asarray(b)) ** 2) for a, b in zip(ours, theirs, strict=True)
    ]
    np.testing.assert_allclose(squared_error(ours, theirs), expected, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_euler_is_exact_on_the_flow_to_a_single_point(steps, shift):
    target, noise = clips(4), clips(5)

    def towards_target(latents, sigma, labels):
        return (latents - target) / sigma[:, None, None, None, None]

    drawn = sample(
        "euler",
        towards_target,
        noise,
        jnp.zeros((3, 1), jnp.int32),
        noise_levels("euler", steps, shift),
    )
    np.testing.assert_allclose(drawn, target, atol=1e-5)


def test_euler_converges_at_first_order_on_a_gaussian():
    """Data N(0, s²): the flow carries noise x to s·x exactly."""
    spread, noise = 0.3, clips(6)

    def gaussian(latents, sigma, labels):
        t = sigma[0]
        variance = (1 - t) ** 2 * spread**2 + t**2
        return latents * (t - (1 - t) * spread**2) / variance

    def error(steps):
        drawn = sample(
            "euler",
            gaussian,
            noise,
            jnp.zeros((3, 1), jnp.int32),
            noise_levels("euler", steps, 1.0),
        )
        return float(jnp.abs(drawn - spread * noise).max())

    assert error(400) < 0.6 * error(200) < 0.36 * error(100)


def test_guidance_moves_from_unconditional_through_conditional():
    def model(latents, sigma, labels):
        return latents * 0 + labels[:, :1, None, None, None].astype(jnp.float32)

    latents, sigma = clips(7), jnp.ones(3)
    labels, null = jnp.full((3, 1), 4), jnp.full((3, 1), 10)
    for guidance, expected in ((0.0, 10.0), (1.0, 4.0), (2.0, -2.0)):
        guided_velocity = guided(model, null, guidance)(latents, sigma, labels)
        np.testing.assert_allclose(guided_velocity, np.full(latents.shape, expected))


def draws(config, seq_len=16, count=20_000):
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.vmap(lambda key: sample_sigma(key, config, seq_len))(keys), np.float64)


def largest_gap(values, distribution):
    """Kolmogorov's statistic; 1.95/√n is exceeded once in a thousand."""
    values = np.sort(values)
    steps = np.arange(len(values) + 1) / len(values)
    cumulative = distribution(values)
    return max(np.abs(cumulative - steps[1:]).max(), np.abs(cumulative - steps[:-1]).max())


def test_uniform_levels_are_uniform():
    gap = largest_gap(draws(TimestepConfig(distribution="uniform")), lambda x: x)
    assert gap < 1.95 / np.sqrt(20_000)


def test_logit_normal_levels_are_normal_in_logits():
    from scipy.special import ndtr

    sigma = draws(TimestepConfig(mean=0.4, std=1.3))
    logits = np.log(sigma / (1 - sigma))
    assert largest_gap(logits, lambda x: ndtr((x - 0.4) / 1.3)) < 1.95 / np.sqrt(20_000)


def test_the_shift_adds_its_logarithm_to_the_logit():
    sigma = jnp.linspace(0.01, 0.99, 50)
    shifted = shift_sigma(sigma, 3.0)
    logit = lambda s: np.log(s / (1 - s))  # noqa: E731
    np.testing.assert_allclose(logit(shifted) - logit(sigma), np.log(3.0), rtol=2e-3)


def test_the_shift_grows_with_the_root_of_length():
    config = TimestepConfig(shift=2.0, shift_seq_len=16, shift_power=0.5)
    assert shift_of(config, 16) == 2.0
    assert shift_of(config, 64) == 4.0
    assert np.median(draws(config, 1024)) > np.median(draws(config, 16)) + 0.2


@pytest.mark.parametrize("name", ["std", "shift", "shift_seq_len"])
def test_invalid_settings_are_refused(name):
    with pytest.raises(InputError, match=rf"objective\.timesteps\.{name} is 0"):
        TimestepConfig(**{name: 0})


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 0.875), (0.875, 1.0), (0.3, 0.6)])
def test_levels_of_one_expert_are_those_of_the_whole_in_its_range(distribution, lowest, highest):
    whole = TimestepConfig(distribution=distribution, mean=0.4, shift=3.0, shift_power=0.5)
    part = dataclasses.replace(whole, lowest=lowest, highest=highest)
    keys = jax.random.split(jax.random.key(0), 40_000)
    seq_len = 64
    every, found = (
        np.asarray(jax.vmap(lambda key, c=config: sample_sigma(key, c, seq_len))(keys))
        for config in (whole, part)
    )
    expected = every[(every >= lowest) & (every <= highest)]
    assert lowest <= found.min() <= found.max() <= highest
    assert scipy.stats.ks_2samp(found, expected).pvalue > 1e-3


@pytest.mark.parametrize("ends", [(0.5, 0.5), (-0.1, 1.0), (0.9, 0.2), (0.0, float("nan"))])
def test_a_range_of_levels_that_is_none_is_refused(ends):
    with pytest.raises(InputError, match=r"objective\.timesteps\.lowest is"):
        TimestepConfig(lowest=ends[0], highest=ends[1])
