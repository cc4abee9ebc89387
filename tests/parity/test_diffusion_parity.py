"""Samplers, noise, weights and statistics beside diffusers; and the golden files are fresh."""

import inspect
import json

import diffusers
import draw_models
import draw_samplers
import jax
import numpy as np
import pytest
import scipy.stats
import torch
from diffusers import training_utils
from safetensors.numpy import load_file

from alload_jax.data.sources.arrays import normalized
from alload_jax.diffusion.timesteps import TimestepConfig, loss_weight, sample_sigma

pytestmark = pytest.mark.parity

# Not bit for bit: other CPUs, thread counts and versions of torch round and sum otherwise.
# Relative to each tensor's largest element.
OF_STEPS = 2e-6
OF_MODELS = 1e-5
OF_ANGLES = 6e-5
"""Of what multiplies sines of up to 1,000, where the values of float32 are 6e-5 apart."""
SMALLEST = 1e-2
"""Gradients that are zero up to rounding have no digits in common."""


def assert_steps_agree(ours, theirs):
    assert ours.shape == theirs.shape
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        bound = OF_STEPS * np.abs(expected).max()
        np.testing.assert_allclose(mine, expected, rtol=0, atol=bound, err_msg=f"step {step}")


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap", "none"])
def test_the_weights_are_those_of_diffusers(scheme):
    sigma = np.linspace(0.001, 1, 500, dtype=np.float32)
    expected = training_utils.compute_loss_weighting_for_sd3(scheme, torch.from_numpy(sigma))
    np.testing.assert_allclose(loss_weight(sigma, scheme, 5.0), expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("scheme", ["logit_normal", "mode", "none"])
def test_the_levels_have_the_distribution_of_diffusers(scheme):
    """Its draws are places in timesteps from 1000 down to 0: a place u is the level 1 − u."""
    drawn = training_utils.compute_density_for_timestep_sampling(
        scheme, 20_000, 0.5, 1.2, 1.29, generator=torch.Generator().manual_seed(0)
    )
    name = "uniform" if scheme == "none" else scheme
    config = TimestepConfig(distribution=name, mean=-0.5, std=1.2, mode_scale=1.29)
    keys = jax.random.split(jax.random.key(0), 20_000)
    found = np.asarray(jax.vmap(lambda key: sample_sigma(key, config, 16))(keys))
    assert scipy.stats.ks_2samp(found, 1 - drawn.numpy()).pvalue > 1e-3


def test_wan_2_1_latents_are_normalised_as_in_diffusers():
    defaults = inspect.signature(diffusers.AutoencoderKLWan.__init__).parameters
    mean, deviation = (
        np.array(defaults[name].default, np.float32) for name in ("latents_mean", "latents_std")
    )
    latents = np.random.default_rng(0).normal(size=(2, 3, 4, 16)).astype(np.float32)
    expected = (latents - mean) / deviation
    np.testing.assert_allclose(normalized(latents, "wan2.1"), expected, rtol=1e-6)


# ---------------------------------------------------------------- golden files


def assert_same_keys(drawn, kept):
    assert drawn.keys() == kept.keys()
    assert {k: v.dtype for k, v in drawn.items()} == {k: v.dtype for k, v in kept.items()}


def test_golden_files_of_samplers_are_fresh(tmp_path):
    draw_samplers.draw(tmp_path)
    names = [path.name for path in draw_samplers.GOLDEN.iterdir()]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    for name in names:
        drawn, kept = (load_file(folder / name) for folder in (tmp_path, draw_samplers.GOLDEN))
        assert_same_keys(drawn, kept)
        for key, expected in kept.items():
            if key.endswith("latents"):
                assert_steps_agree(drawn[key], expected)
            else:
                np.testing.assert_array_equal(drawn[key], expected, err_msg=key)


@pytest.mark.parametrize("family", draw_models.FAMILIES)
def test_golden_files_of_models_are_fresh(family, tmp_path):
    cases, golden = draw_models.FAMILIES[family][0], draw_models.GOLDEN / family
    assert {each.name for each in golden.iterdir()} == {case.name for case in cases}
    for case in cases:
        folders = (tmp_path / case.name, golden / case.name)
        draw_models.draw(family, case, folders[0])
        configs = [json.loads((each / "transformer/config.json").read_text()) for each in folders]
        assert configs[0] | {"_diffusers_version": configs[1]["_diffusers_version"]} == configs[1]
        for name in ("transformer/diffusion_pytorch_model", "inputs", "expected"):
            drawn, kept = (load_file(each / f"{name}.safetensors") for each in folders)
            assert_same_keys(drawn, kept)
            for key, expected in kept.items():
                tolerance = OF_ANGLES if "timestep_embedder.linear_1" in key else OF_MODELS
                bound = tolerance * max(np.abs(expected).max(), SMALLEST)
                np.testing.assert_allclose(drawn[key], expected, rtol=0, atol=bound, err_msg=key)
