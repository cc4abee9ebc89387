"""The samplers against diffusers itself; and the golden files are what it computes today."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

pytest.importorskip("diffusers")

from draw_samplers import GOLDEN, SAMPLERS, draw, flow_arrays, follow

from alload_jax.diffusion.samplers import sample
from alload_jax.diffusion.schedules import noise_levels

pytestmark = pytest.mark.parity

# Relative to each step's largest latent. Not bit for bit: other CPUs and versions of torch round
# tanh and sums otherwise.
TOLERANCE = 2e-6


def assert_steps_agree(ours, theirs):
    assert ours.shape == theirs.shape
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        bound = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=bound, err_msg=f"step {step}")


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 4, 10, 31, 50])
@pytest.mark.parametrize("shift", [1, 2.5, 5, 12])
def test_every_step_is_that_of_diffusers(sampler, steps, shift):
    arrays = {name: jnp.asarray(array.numpy()) for name, array in flow_arrays().items()}

    path = []

    def flow(latents, sigma, condition):
        path.append(latents)
        gain, scale = condition["gain"][:, None, None], 1 + sigma[:, None, None]
        return jnp.tanh(latents @ arrays["matrix"]) * scale * gain + condition["text"]

    sigmas, latents = (tensor.numpy() for tensor in follow(sampler, steps, shift))
    ours = noise_levels(sampler, steps, shift)
    np.testing.assert_allclose(ours, sigmas, rtol=5e-7 if sampler == "euler" else 0, atol=0)
    condition = {name: arrays[name] for name in ("gain", "text")}
    with jax.disable_jit():  # steps one by one, in Python
        drawn = sample(sampler, flow, arrays["noise"], condition, ours)
    assert_steps_agree(np.stack([*path, drawn]), latents)


def test_golden_files_are_fresh(tmp_path):
    draw(tmp_path)
    names = {"flow.safetensors", *(f"{sampler}.safetensors" for sampler in SAMPLERS)}
    assert {path.name for path in GOLDEN.iterdir()} == names
    for name in names:
        drawn, kept = (load_file(folder / name) for folder in (tmp_path, GOLDEN))
        assert drawn.keys() == kept.keys()
        for key, expected in kept.items():
            assert drawn[key].dtype == expected.dtype
            if key.endswith("latents"):
                assert_steps_agree(drawn[key], expected)
            else:
                np.testing.assert_array_equal(drawn[key], expected, err_msg=key)
