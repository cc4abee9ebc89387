"""HunyuanVideo's first model against diffusers: encoders, clips, names of weights and adapters."""

import re

import diffusers
import numpy as np
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_hunyuan_video_lora_to_diffusers
from diffusers.loaders.single_file_utils import convert_hunyuan_video_transformer_to_diffusers
from encoder_folders import random_frames
from hunyuan_video_folders import write_pipeline_13b
from safetensors.numpy import save_file
from test_sample_parity import clip_of, drawn, noise_of

from alload_jax import cli
from alload_jax.encoders.conditions import HunyuanVideo13bText
from alload_jax.encoders.vae import HunyuanVideo13bVae
from alload_jax.errors import run_command
from alload_jax.models.common.config import TextConfig
from alload_jax.models.hunyuan_video.family import FAMILY_13B
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.lora_files import Target, read_lora

pytestmark = pytest.mark.parity

WIDE = HunyuanVideo13bConfig(
    dim=3072, ffn_dim=64, num_heads=24, num_layers=1, single_layers=1, refiner_layers=1,
    text=TextConfig(4, 3), pooled_dim=5, embedded_guidance=1.0,
)  # fmt: skip
"""diffusers' converters take its width for granted."""
PROMPT, FRAMES, SIDE, STEPS = "a shop with a blue door", 5, 32, 3


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """The folder, its parts, and diffusers' pipeline of them."""
    folder = tmp_path_factory.mktemp("hunyuan_13b")
    parts = write_pipeline_13b(folder)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipe = diffusers.HunyuanVideoPipeline(**parts, scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return folder, parts, pipe


@pytest.mark.parametrize("text", ["", PROMPT, "the right of a blue circle – 猫 " * 9])
def test_texts_are_those_of_the_pipeline(pipeline, text):
    folder, _, pipe = pipeline
    ours = HunyuanVideo13bText(folder, 64)
    with torch.no_grad():
        states, pooled, valid = pipe.encode_prompt(text, max_sequence_length=64)
    found, count = ours.tokens(text), int(valid.sum())
    assert list(found) == ["text", "pooled"]
    assert {len(found["text"]), min(64, len(found["text"]))} == {count}
    np.testing.assert_allclose(found["text"], states[0, :count].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["pooled"], pooled.numpy(), rtol=1e-4, atol=1e-5)
    whole = HunyuanVideo13bText(folder, 4096).tokens(text)["text"]
    assert ours.surplus_tokens(text) == len(whole) - count


@pytest.mark.parametrize("frames", [1, 17, 25])
def test_latents_are_those_of_the_pipelines_vae(pipeline, frames):
    """Of more than 16 frames diffusers takes parts."""
    folder, parts, _ = pipeline
    ours, clip = HunyuanVideo13bVae(folder), random_frames(frames, 32, 24)
    latents = ours.latents(clip)
    assert latents.shape == ((frames - 1) // 4 + 1, 4, 3, 4)
    with torch.no_grad():
        pixels = torch.from_numpy(clip).permute(3, 0, 1, 2)[None] / 127.5 - 1
        mode = parts["vae"].encode(pixels).latent_dist.mode() * 0.5
        video = parts["vae"].decode(mode / 0.5).sample
    np.testing.assert_allclose(latents, clip_of(mode), rtol=1e-4, atol=1e-5)
    shown = ((clip_of(video) / 2 + 0.5).clip(0, 1) * 255).round()
    assert np.abs(ours.decode(latents) - shown).max() <= 1


def test_clips_are_those_of_the_pipeline(pipeline, tmp_path, capsys):
    folder, _, pipe = pipeline
    noise, latents = noise_of((2, SIDE // 8, SIDE // 8, 4))
    size = {"height": SIDE, "width": SIDE, "num_frames": FRAMES, "num_inference_steps": STEPS}
    usual = size | {"latents": latents, "output_type": "latent", "prompt": PROMPT}
    plain = clip_of(pipe(**usual).frames)
    assert np.abs(noise - plain).mean() > 0.05
    negative = {"negative_prompt": "blur", "true_cfg_scale": 2.0, "guidance_scale": 3.0}
    guided = clip_of(pipe(**usual, **negative).frames)
    assert np.abs(guided - plain).max() > 1e-2

    command = ["sample", "--checkpoint", f"{folder}/transformer", "--vae", str(folder)]
    command += ["--frames", str(FRAMES), "--height", str(SIDE), "--width", str(SIDE)]
    command += ["--steps", str(STEPS), "--sampler", "euler", "--seed", "7", "--dtype", "float32"]
    words = [*command, "--prompt", PROMPT, "--text-encoder", str(folder)]
    close = {"rtol": 1e-3, "atol": 1e-3}
    found = drawn(words, tmp_path / "a.safetensors")
    np.testing.assert_allclose(found, plain, **close)
    more = ["--negative-prompt", "blur", "--guidance", "2", "--embedded-guidance", "3"]
    np.testing.assert_allclose(drawn([*words, *more], tmp_path / "b.safetensors"), guided, **close)

    tokens = HunyuanVideo13bText(folder).tokens(PROMPT)
    save_file(tokens, tmp_path / "text.safetensors")
    embedded = [*command, "--prompt-embeds", str(tmp_path / "text.safetensors")]
    np.testing.assert_array_equal(drawn(embedded, tmp_path / "c.safetensors"), found)
    save_file({"text": tokens["text"]}, tmp_path / "text.safetensors")
    assert run_command(cli.main, [*embedded, "--out", str(tmp_path / "d.safetensors")]) == 2
    assert "has no tensor pooled, which the model takes too" in capsys.readouterr().err


def test_the_original_keys_are_those_that_diffusers_converts():
    """Weights of one column that number their rows."""
    original, others = (FAMILY_13B.tensors(WIDE, n) for n in ("original", "diffusers"))
    rows = {t.key: torch.arange(t.stored_shape[0])[:, None] for t in original}
    converted = convert_hunyuan_video_transformer_to_diffusers(rows)
    assert converted.keys() == {tensor.key for tensor in others}
    ours = {(tensor.path, tensor.layer): tensor for tensor in original}
    for tensor in others:
        wanted = ours[tensor.path, tensor.layer].rows
        np.testing.assert_array_equal(converted[tensor.key][:, 0], wanted)


def test_adapters_of_other_trainers_are_read_as_diffusers_reads_them(tmp_path):
    """One pair of matrices for all layers that are one there; it cannot read the refiner's."""
    rng, shapes = np.random.default_rng(0), {}
    for tensor in FAMILY_13B.tensors(WIDE, "original"):
        module, _, kind = tensor.key.rpartition(".")
        if kind == "weight" and re.match("(double|single)_blocks", module) and "norm" not in module:
            shapes[module] = tensor.stored_shape
    assert sum("linear" in module or "qkv" in module for module in shapes) > 4
    file = {}
    for module, (outputs, inputs) in shapes.items():
        sizes = {"lora_A": (2, inputs), "lora_B": (outputs, 2)}
        for name, size in sizes.items():
            key = f"diffusion_model.{module}.{name}.weight"
            file[key] = rng.normal(size=size).astype(np.float32)
    save_file(file, tmp_path / "x.safetensors")
    converted = {key: torch.from_numpy(value) for key, value in file.items()}
    converted = _convert_hunyuan_video_lora_to_diffusers(converted)
    found = read_lora(tmp_path / "x.safetensors", WIDE).adapters
    for tensor in FAMILY_13B.tensors(WIDE, "diffusers"):
        module = f"transformer.{tensor.key.removesuffix('.weight')}"
        if (down := converted.pop(f"{module}.lora_A.weight", None)) is not None:
            up = converted.pop(f"{module}.lora_B.weight")
            adapter = found.pop(Target(tensor.path, tensor.layer))
            product = adapter.scale * adapter.down @ adapter.up
            np.testing.assert_allclose(product.T, up @ down, rtol=1e-4, atol=1e-5)
    assert not found
    assert not converted
