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
from alload_jax.models.families import abstract_model
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.sampling.config import SamplingConfig
from alload_jax.sampling.flow import Condition, make_expert_flows, make_flow
from alload_jax.sampling.samples import make_draw

PLAIN = WanConfig(
    dim=16, ffn_dim=16, num_heads=2, num_layers=1, freq_dim=8, in_channels=2, dtype="float32"
)
GIVEN = dataclasses.replace(
    PLAIN, in_channels=5, out_channels=2, text=TextConfig(6, 4), image=ImageConfig(dim=4)
)
SIGMAS = noise_levels("euler", 4, 2.9)
GUIDANCE = 2.0
LABELS = Condition(np.array([[3]])), Condition(np.array([[PLAIN.num_classes]]))


def values_of(config, seed):
    shapes, rng = abstract_model(config).params, np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.float32(0.3 * rng.normal(size=leaf.shape)), shapes)


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


@nnx.jit
def forward(model, *arguments):
    return model.forward(*arguments).velocity


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
        return forward(model, inputs, jnp.full(1, 1000 * sigma), words, image)

    flow = make_flow(GIVEN, "euler", SIGMAS, GUIDANCE)
    null = Condition(np.zeros_like(text), image, given)
    found = jax.jit(flow)(values, noise, Condition(text, image, given), null)
    np.testing.assert_allclose(found, euler(velocity, noise), rtol=2e-4, atol=2e-5)


def test_a_given_first_frame_stays_and_has_timestep_zero():
    values, noise, first = values_of(PLAIN, 0), normal(1, 1, 3, 4, 4, 2), normal(2, 1, 1, 4, 4, 2)
    model = model_of(PLAIN, values)

    def velocity(latents, sigma, is_null):
        frame_tokens = jnp.array([0.0, 1000 * sigma, 1000 * sigma]).repeat(4)[None]
        return forward(model, latents, frame_tokens, LABELS[is_null].tokens)

    conditions = (each._replace(first_frame=first) for each in LABELS)
    found = jax.jit(make_flow(PLAIN, "euler", SIGMAS, GUIDANCE))(values, noise, *conditions)
    np.testing.assert_array_equal(found[:, :1], first)
    np.testing.assert_allclose(found, euler(velocity, noise, first), rtol=2e-4, atol=2e-5)


def drawn_by(flows, values, state):
    for flow, each in zip(flows, values, strict=True):
        state = jax.jit(flow)(each, state, *LABELS)
    return np.asarray(state)


@pytest.mark.parametrize("rounded", [False, True])
def test_each_expert_takes_its_noise_levels_by_the_timesteps_that_the_model_sees(rounded):
    """At the boundary itself the first one; the second one's guidance is 1."""
    pair = values_of(PLAIN, 0), values_of(PLAIN, 1)
    noise, timesteps = normal(1, 1, 1, 4, 4, 2), 1000 * SIGMAS[:-1]
    boundary = float(SIGMAS[2])
    if rounded:
        timesteps = np.floor(timesteps)
        boundary = float(timesteps[1] / 1000 + SIGMAS[1]) / 2  # above the rounded level only
    models = [model_of(PLAIN, values) for values in pair]

    def velocity(latents, sigma, is_null):
        place = np.abs(SIGMAS[:-1] - sigma).argmin()
        number = int(place >= (1 if rounded else 3))
        labels = LABELS[is_null and number == 0].tokens
        return forward(models[number], latents, jnp.full(1, timesteps[place]), labels)

    given = (PLAIN, "euler", SIGMAS, (GUIDANCE, 1.0), boundary, timesteps if rounded else None)
    found = drawn_by(make_expert_flows(*given), pair, noise)
    np.testing.assert_allclose(found, euler(velocity, noise), rtol=2e-4, atol=2e-5)


def test_unipc_at_a_boundary_beyond_all_levels_draws_by_either_expert_alone():
    pair, sigmas = (values_of(PLAIN, 0), values_of(PLAIN, 1)), noise_levels("unipc", 4, 3.0)

    noise = normal(1, 1, 1, 4, 4, 2)
    for below, number, guidance in ((1e-6, 0, GUIDANCE), (2.0, 1, 1.0)):
        alone = [make_flow(PLAIN, "unipc", sigmas, guidance)]
        expected = drawn_by(alone, [pair[number]], noise)
        flows = make_expert_flows(PLAIN, "unipc", sigmas, (GUIDANCE, 1.0), below)
        found = drawn_by(flows, pair, noise)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
