import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alload_jax.diffusion.samplers import guided, sample
from alload_jax.diffusion.schedules import noise_levels
from alload_jax.diffusion.timesteps import interpolate, squared_error, velocity


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
