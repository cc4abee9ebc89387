"""The samplers against golden files from diffusers (tests/parity/draw_samplers.py) and exact flows.

Golden latents are float32, as ours are, rounded in another order: 20 steps measured 4.4e-7 apart.
"""

import itertools
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from alload_jax.diffusion import samplers
from alload_jax.diffusion.samplers import guided, sample
from alload_jax.diffusion.schedules import Sampler, noise_levels, rounded_timesteps
from alload_jax.errors import InputError

GOLDEN = Path(__file__).parents[1] / "golden" / "samplers"
FLOW = load_file(GOLDEN / "flow.safetensors")
CONDITION = {"gain": jnp.asarray(FLOW["gain"]), "text": jnp.asarray(FLOW["text"])}
SAMPLERS = get_args(Sampler)
TOLERANCE = 2e-6

each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


def golden_flow(latents, sigma, condition):
    gain, scale = condition["gain"][:, None, None], 1 + sigma[:, None, None]
    return jnp.tanh(latents @ FLOW["matrix"]) * scale * gain + condition["text"]


def noise():
    return jnp.asarray(FLOW["noise"])


def trajectory(sampler, flow, start, condition, sigmas):
    """The latents at which the flow is evaluated, and the data: [steps + 1, B, ...]."""
    path = []

    def recorded(latents, sigma, condition):
        path.append(latents)
        return flow(latents, sigma, condition)

    with jax.disable_jit():  # steps one by one, in Python
        drawn = sample(sampler, recorded, start, condition, sigmas)
    return jnp.stack([*path, drawn])


def assert_steps_agree(ours, theirs):
    """Each step's largest difference, relative to the largest latent of that step."""
    assert ours.shape == theirs.shape
    for step, (mine, expected) in enumerate(zip(np.asarray(ours), theirs, strict=True)):
        bound = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=bound, err_msg=f"step {step}")


@each_sampler
def test_levels_and_latents_of_every_step_are_those_of_diffusers(sampler):
    golden = load_file(GOLDEN / f"{sampler}.safetensors")
    for steps, shift in itertools.product([1, 2, 3, 5, 20], [1, 3, 5]):
        case, sigmas = f"{steps}_steps_shift_{shift}", noise_levels(sampler, steps, shift)
        # Diffusers shifts Euler's levels in float32, we in float64.
        rtol = 0 if sampler == "unipc" else 5e-7
        np.testing.assert_allclose(sigmas, golden[f"{case}.sigmas"], rtol=rtol, atol=0)
        if shift == 3 or steps == 5:
            path = trajectory(sampler, golden_flow, noise(), CONDITION, sigmas)
            assert_steps_agree(path, golden[f"{case}.latents"])


@pytest.mark.parametrize("shift", [0.2, 1.0, 12.0])
def test_levels_fall_to_zero_and_rounded_timesteps_are_less_than_one_below(shift):
    for sampler, steps in itertools.product(SAMPLERS, [1, 2, 50]):
        sigmas = noise_levels(sampler, steps, shift)
        assert (sigmas.shape, sigmas.dtype) == ((steps + 1,), np.float32)
        assert sigmas[0] == np.float32(1 if sampler == "euler" else 1 - 1e-6)
        assert sigmas[-1] == 0
        assert (np.diff(sigmas) < 0).all()
    for steps in (1, 2, 50, 1000):
        found = rounded_timesteps(steps, shift)
        assert (found.dtype, found[0]) == (np.float32, 999)
        below = 1000 * noise_levels("unipc", steps, shift)[:-1].astype(np.float64) - found
        assert (found == np.round(found)).all()
        assert (below > -1e-4).all()  # levels are float32
        assert (below < 1 + 1e-4).all()


@each_sampler
def test_compiled_samples_are_the_same_row_by_row_in_a_program_that_does_not_grow(sampler):
    def draw(start, condition, steps=5):
        return sample(sampler, golden_flow, start, condition, noise_levels(sampler, steps, 3.0))

    compiled, eager = jax.jit(draw)(noise(), CONDITION), draw(noise(), CONDITION)
    assert_steps_agree(compiled[None], np.asarray(eager)[None])
    second = draw(*jax.tree.map(lambda array: array[1:], (noise(), CONDITION)))
    np.testing.assert_allclose(second, eager[1:], rtol=1e-5, atol=1e-6)
    programs = [
        str(jax.make_jaxpr(lambda x, steps=steps: draw(x, CONDITION, steps))(noise()))
        for steps in (5, 50)
    ]
    assert len({len(program.splitlines()) for program in programs}) == 1


def test_euler_takes_traced_levels_and_unipc_refuses_them():
    sigmas = noise_levels("euler", 5, 3.0)

    def drawn(sampler):
        return jax.jit(lambda levels: sample(sampler, golden_flow, noise(), CONDITION, levels))

    expected = sample("euler", golden_flow, noise(), CONDITION, sigmas)
    np.testing.assert_allclose(drawn("euler")(sigmas), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        drawn("unipc")(sigmas)


def gaussian_error(sampler, steps, spread=1.5):
    """Largest error on the way; from data N(0, s²) the flow carries noise x through √(…)·x."""

    def gaussian(latents, sigma, condition):
        t = sigma[0]
        return latents * (t - (1 - t) * spread**2) / ((1 - t) ** 2 * spread**2 + t**2)

    sigmas = noise_levels(sampler, steps, 1.0)
    path = trajectory(sampler, gaussian, noise(), None, sigmas)
    exact = np.sqrt((1 - sigmas) ** 2 * spread**2 + sigmas**2)[:, None, None, None] * noise()
    return np.abs(path - exact).max()


@pytest.mark.parametrize(("sampler", "least", "most"), [("euler", 1.8, 2.1), ("unipc", 4.0, 5.0)])
def test_order_of_convergence(sampler, least, most):
    """Twice the steps: half the error at first order, a quarter or less at second."""
    errors = np.array([gaussian_error(sampler, steps) for steps in (10, 20, 40)])
    gains = errors[:-1] / errors[1:]
    assert (gains > least).all()
    assert (gains < most).all()


def test_unipc_may_start_at_pure_noise():
    """Where ln(α / σ) is −∞ and the first step Euler's; diffusers starts 1e-6 below."""
    sigmas = noise_levels("unipc", 5, 3.0)
    sigmas[0] = 1
    path = trajectory("unipc", golden_flow, noise(), CONDITION, sigmas)
    straight = trajectory("euler", golden_flow, noise(), CONDITION, sigmas)
    assert_steps_agree(path[:2], np.asarray(straight[:2]))
    assert np.isfinite(path).all()


def test_weights_are_finite_and_keep_latents_that_are_data_already():
    """Latents equal to the data predicted from them stay: both weights of level s add up to 1."""
    for steps in (1, 2, 3, 4, 50):
        weights = samplers.steps_of(noise_levels("unipc", steps, 5.0))
        assert all(np.isfinite(array).all() for array in jax.tree.leaves(weights))
        for update in (weights.corrector, weights.predictor):
            np.testing.assert_allclose(update.origin + update.x0, 1, rtol=1e-6)


@pytest.mark.parametrize("guidance", [1, 1.0, 3.0])
def test_guidance_takes_any_tree_and_skips_what_it_does_not_need(guidance):
    rows = []

    def model(latents, sigma, condition):
        rows.append((len(latents), len(sigma), *map(len, jax.tree.leaves(condition))))
        return golden_flow(latents, sigma, condition)

    null = jax.tree.map(jnp.zeros_like, CONDITION)
    sigma = jnp.full(2, 0.5)
    guided_velocity = guided(model, null, guidance)(noise(), sigma, CONDITION)
    assert rows == [(2,) * 4 if guidance == 1 else (4,) * 4]
    conditional, empty = (golden_flow(noise(), sigma, tree) for tree in (CONDITION, null))
    expected = empty + guidance * (conditional - empty)
    np.testing.assert_allclose(guided_velocity, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "shift", "complaint"),
    [
        (0, 1.0, "steps is 0; it must be at least 1"),
        (5, 0.0, "shift is 0.0; it must be above 0 and finite"),
        (5, np.nan, "shift is nan; it must be above 0 and finite"),
        (5, np.inf, "shift is inf; it must be above 0 and finite"),
        (5, 1e9, "shift is 1000000000.0 with 5 steps, .* coincide; choose a shift"),
    ],
)
def test_invalid_schedules_are_refused(steps, shift, complaint):
    for sampler in SAMPLERS:
        with pytest.raises(InputError, match=f"^noise_levels: {complaint}"):
            noise_levels(sampler, steps, shift)


def test_unknown_samplers_are_refused():
    complaint = "^sampler is 'heun'; choose euler or unipc$"
    with pytest.raises(InputError, match=complaint):
        noise_levels("heun", 5, 1.0)
    with pytest.raises(InputError, match=complaint):
        sample("heun", golden_flow, noise(), CONDITION, noise_levels("euler", 5, 1.0))


@pytest.mark.parametrize(
    "sigmas", [[0.0], [0.0, 0.5, 1.0], [1.0, 0.5, 0.5, 0.0], [1.0, 0.5], [2.0, 0.0], [np.nan, 0.0]]
)
def test_unipc_refuses_levels_that_do_not_decrease_from_one_to_zero(sigmas):
    with pytest.raises(InputError, match=r"^unipc: sigmas are \[.*\]; they must decrease"):
        sample("unipc", golden_flow, noise(), CONDITION, np.array(sigmas))
