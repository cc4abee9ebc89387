"""The flow against a plain Euler loop: given frames, a given first frame, and two experts."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alload_jax.diffusion.schedules import noise_levels
from alload_jax.diffusion.timesteps import TimestepConfig
from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.families import abstract_model, build_model
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling.config import SamplingConfig
from alload_jax.sampling.flow import Condition, LowNoise, make_flow
from alload_jax.sampling.samples import make_draw

PLAIN = WanConfig(
    dim=16, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8, in_channels=2, dtype="float32"
)
GIVEN = dataclasses.replace(
    PLAIN, in_channels=5, out_channels=2, text=TextConfig(6, 4), image=ImageConfig(dim=4)
)
SIGMAS = noise_levels("euler", 4, 3.0)
GUIDANCE = 2.0
LABELS = Condition(np.array([[3]])), Condition(np.array([[PLAIN.num_classes]]))


def values_of(config, seed):
    params = nnx.to_pure_dict(nnx.state(build_model(config, nnx.Rngs(seed)), nnx.Param))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape), params)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def euler(velocity, noise, first=None):
    """The loop in NumPy; `velocity` of (latents, sigma, of the null condition)."""
    latents = noise
    for sigma, after in itertools.pairwise(SIGMAS):
        if first is not None:
            latents = np.concatenate([first, latents[:, 1:]], axis=1)
        slope, null = (np.asarray(velocity(latents, sigma, is_null)) for is_null in (False, True))
        latents = latents + (after - sigma) * (null + GUIDANCE * (slope - null))
    return latents if first is None else np.concatenate([first, latents[:, 1:]], axis=1)


def model_of(config, values):
    return nnx.merge(abstract_model(config).graph, values)


def test_a_shift_of_the_config_takes_the_place_of_that_of_training():
    values, labels = values_of(PLAIN, 0), np.array([[3], [5]])

    def draw(trained, own):
        config = SamplingConfig(steps=3, shift=own)
        draws = make_draw(PLAIN, TimestepConfig(shift=trained), config, (1, 1, 1))
        return draws(values, jax.random.key(0), labels, (1, 4, 4))

    drawn = [draw(4.0, None), draw(1.0, 4.0), draw(1.0, None)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[0] - drawn[2]).max() > 1e-3
    with pytest.raises(InputError, match=r"sampling\.shift is 0"):
        SamplingConfig(shift=0.0)


def test_given_channels_and_images_reach_the_model_at_every_step():
    values, noise, given = values_of(GIVEN, 0), normal(1, 1, 3, 4, 4, 2), normal(2, 1, 3, 4, 4, 3)
    text, image = normal(3, 1, 4, 6), normal(4, 1, 5, 4)
    model = model_of(GIVEN, values)

    def velocity(latents, sigma, is_null):
        inputs = jnp.concatenate([latents, given], axis=-1)
        words = jnp.zeros_like(text) if is_null else text
        return model.forward(inputs, jnp.full(1, 1000 * sigma), words, image).velocity

    flow = make_flow(GIVEN, "euler", SIGMAS, GUIDANCE)
    null = Condition(np.zeros_like(text), image, given)
    found = jax.jit(flow)(values, noise, Condition(text, image, given), null)
    np.testing.assert_allclose(found, euler(velocity, noise), rtol=2e-4, atol=2e-5)


def test_a_given_first_frame_stays_and_has_timestep_zero():
    values, noise, first = values_of(PLAIN, 0), normal(1, 1, 3, 4, 4, 2), normal(2, 1, 1, 4, 4, 2)
    model = model_of(PLAIN, values)

    def velocity(latents, sigma, is_null):
        frame_tokens = jnp.array([0.0, 1000 * sigma, 1000 * sigma]).repeat(4)[None]
        return model.forward(latents, frame_tokens, LABELS[is_null].tokens).velocity

    conditions = (each._replace(first_frame=first) for each in LABELS)
    found = jax.jit(make_flow(PLAIN, "euler", SIGMAS, GUIDANCE))(values, noise, *conditions)
    np.testing.assert_array_equal(found[:, :1], first)
    np.testing.assert_allclose(found, euler(velocity, noise, first), rtol=2e-4, atol=2e-5)


def test_the_model_and_the_experts_boundary_see_rounded_timesteps():
    pair = values_of(PLAIN, 0), values_of(PLAIN, 1)
    noise, sigmas = normal(1, 1, 1, 4, 4, 2), noise_levels("euler", 4, 3.0)
    timesteps = np.floor(1000 * sigmas[:-1])
    boundary = float(timesteps[1] + sigmas[1] * 1000) / 2000  # above the rounded level only
    models = [model_of(PLAIN, values) for values in pair]

    def velocity(latents, sigma, is_null):
        timestep = timesteps[np.abs(sigmas[:-1] - sigma).argmin()]
        model = models[int(timestep < 1000 * boundary)]
        return model.forward(latents, jnp.full(1, timestep), LABELS[is_null].tokens).velocity

    low = LowNoise(boundary, GUIDANCE)
    flow = make_flow(PLAIN, "euler", sigmas, GUIDANCE, low, timesteps)
    found = jax.jit(flow)(pair, noise, *LABELS)
    np.testing.assert_allclose(found, euler(velocity, noise), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("sampler", ["euler", "unipc"])
def test_each_expert_takes_its_noise_levels(sampler):
    pair, sigmas = (values_of(PLAIN, 0), values_of(PLAIN, 1)), noise_levels(sampler, 4, 3.0)
    noise = normal(1, 1, 1, 4, 4, 2)

    def drawn(values, low_noise=None, guidance=GUIDANCE):
        flow = make_flow(PLAIN, sampler, sigmas, guidance, low_noise)
        return np.asarray(jax.jit(flow)(values, noise, *LABELS))

    if sampler == "unipc":  # either expert alone
        for below, expected in ((1e-6, drawn(pair[0])), (2.0, drawn(pair[1], guidance=1.0))):
            np.testing.assert_allclose(
                drawn(pair, LowNoise(below, 1.0)), expected, rtol=1e-5, atol=1e-6
            )
        return
    models = [model_of(PLAIN, values) for values in pair]

    def velocity(latents, sigma, is_null):
        number = int(sigma < sigmas[2])  # at the boundary itself the first one
        if number == 1:  # guidance 1: the conditional velocity itself
            is_null = False
        return (
            models[number]
            .forward(latents, jnp.full(1, 1000 * sigma), LABELS[is_null].tokens)
            .velocity
        )

    between = drawn(pair, LowNoise(float(sigmas[2]), 1.0))
    np.testing.assert_allclose(between, euler(velocity, noise), rtol=2e-4, atol=2e-5)
