"""Adapters against diffusers and PEFT: files load there without a word, and compute the same."""

import dataclasses
import logging

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from random_models import random_params

torch = pytest.importorskip("torch", reason="needs PyTorch: install alload-jax[parity]")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers: install alload-jax[parity]")
peft = pytest.importorskip("peft", reason="needs PEFT: install alload-jax[parity]")

from alload_jax.models.common.config import ImageConfig, TextConfig  # noqa: E402
from alload_jax.models.common.lora import LoraConfig  # noqa: E402
from alload_jax.models.families import abstract_model  # noqa: E402
from alload_jax.models.lora_files import (  # noqa: E402
    adapters_of,
    merge_file,
    read_lora,
    write_lora,
)
from alload_jax.models.wan.transformer import WanConfig  # noqa: E402
from alload_jax.models.weights import save_weights  # noqa: E402

pytestmark = pytest.mark.parity

SHAPE = {"in_channels": 4, "freq_dim": 32, "dtype": "float32"}
MODELS = {
    "t2v": WanConfig(
        dim=48, ffn_dim=100, num_heads=4, num_layers=3, text=TextConfig(12, 9), **SHAPE
    ),
    "i2v": WanConfig(
        dim=24,
        ffn_dim=40,
        num_heads=2,
        num_layers=2,
        text=TextConfig(6, 512),  # diffusers splits image from text there
        image=ImageConfig(10),
        **SHAPE,
    ),
}
LORAS = {
    "default": LoraConfig(rank=4),
    "alpha": LoraConfig(rank=3, alpha=7.0),
    "attention": LoraConfig(rank=2, alpha=1.0, targets=("attention/(query|value)$",)),
    "embeddings": LoraConfig(rank=2, targets=("^patch_embedding$", "time_embedding", "head/out")),
}


def inputs_of(config):
    rng = np.random.default_rng(1)
    latents = rng.normal(size=(2, 2, 4, 6, 4)).astype(np.float32)
    text = rng.normal(size=(2, config.text.length, config.text.dim)).astype(np.float32)
    image = rng.normal(size=(2, 7, 10)).astype(np.float32) if config.image else None
    return latents, np.asarray([3.5, 990.0], np.float32), text, image


def ours(config, params):
    return np.asarray(nnx.merge(abstract_model(config).graph, params)(*inputs_of(config)))


def theirs(model, config):
    latents, time, text, image = inputs_of(config)
    with torch.no_grad():
        found = model(
            torch.from_numpy(np.moveaxis(latents, -1, 1).copy()),
            torch.from_numpy(time),
            torch.from_numpy(text),
            None if image is None else torch.from_numpy(image),
            return_dict=False,
        )[0].numpy()
    return np.moveaxis(found, 1, -1)


def pipeline(config, params, folder):
    """diffusers' pipeline of the model without its adapters."""
    save_weights(folder, params, dataclasses.replace(config, lora=None))
    model = diffusers.WanTransformer3DModel.from_pretrained(folder).eval()
    scheduler = diffusers.UniPCMultistepScheduler()
    return diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=model
    )


def assert_close(found, expected):
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("keys", ["diffusers", "original"])
@pytest.mark.parametrize("name", LORAS)
@pytest.mark.parametrize("model", MODELS)
def test_diffusers_loads_a_file_without_a_warning_and_computes_the_same(
    model, name, keys, tmp_path, caplog
):
    if keys == "original" and name == "embeddings":
        pytest.skip("diffusers' conversion of original keys takes only the blocks and some others")
    config = dataclasses.replace(MODELS[model], lora=LORAS[name])
    params = random_params(config)
    file = tmp_path / "lora.safetensors"
    write_lora(file, adapters_of(params, config.lora), config, keys)
    pipe = pipeline(config, params, tmp_path / "base")
    plain = theirs(pipe.transformer, config)
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        pipe.load_lora_weights(str(file), adapter_name="mine")
    assert not [record.message for record in caplog.records]
    loaded = peft.get_peft_model_state_dict(pipe.transformer, adapter_name="mine")
    assert len(loaded) == 2 * len(adapters_of(params, config.lora))
    found = ours(config, params)
    assert_close(found, theirs(pipe.transformer, config))
    assert np.linalg.norm(found - plain) > 1e-2 * np.linalg.norm(plain)  # it has an effect


@pytest.mark.parametrize("model", MODELS)
def test_what_diffusers_saves_is_read(model, tmp_path):
    """With PEFT's settings in the metadata: alpha is not the rank."""
    config = MODELS[model]
    params = random_params(config)
    pipe = pipeline(config, params, tmp_path / "base")
    targets = ["to_q", "to_out.0", "ffn.net.0.proj"]
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    pipe.transformer.add_adapter(settings, adapter_name="theirs")
    expected = theirs(pipe.transformer, config)
    layers = peft.get_peft_model_state_dict(pipe.transformer, adapter_name="theirs")
    metadata = {"transformer_lora_adapter_metadata": settings.to_dict()}
    diffusers.WanPipeline.save_lora_weights(
        tmp_path / "saved", transformer_lora_layers=layers, **metadata
    )
    lora = read_lora(tmp_path / "saved", config)
    assert {adapter.scale for adapter in lora.adapters.values()} == {1.5}
    assert_close(ours(config, merge_file(params, lora)), expected)


def test_two_files_with_scales_are_what_diffusers_makes_of_them(tmp_path):
    config = dataclasses.replace(MODELS["t2v"], lora=LORAS["alpha"])
    base = random_params(config)
    pipe = pipeline(config, base, tmp_path / "base")
    plain = dataclasses.replace(config, lora=None)
    merged = {k: v for k, v in flatten_dict(base).items() if not k[-1].startswith("lora")}
    merged = unflatten_dict(merged)
    for n, scale in enumerate((0.7, -0.4)):
        file = tmp_path / f"{n}.safetensors"
        adapters = adapters_of(random_params(config, seed=n), config.lora)
        write_lora(file, adapters, config, ("diffusers", "original")[n])
        pipe.load_lora_weights(str(file), adapter_name=str(n))
        merged = merge_file(merged, read_lora(file, config), scale)
    pipe.set_adapters(["0", "1"], adapter_weights=[0.7, -0.4])
    assert_close(ours(plain, merged), theirs(pipe.transformer, plain))


def test_keys_of_musubi_tuner_are_read_as_diffusers_reads_them(tmp_path):
    config = dataclasses.replace(MODELS["t2v"], lora=LORAS["alpha"])
    params = random_params(config)
    file = tmp_path / "original.safetensors"
    write_lora(file, adapters_of(params, config.lora), config, "original")
    renamed = {}
    for key, value in safetensors.numpy.load_file(file).items():
        module, dot, what = key.removeprefix("diffusion_model.").partition(".lora_")
        if not dot:
            module, what = module.removesuffix(".alpha"), "alpha"
        ending = "alpha" if what == "alpha" else f"lora_{what}"
        renamed[f"lora_unet_{module.replace('.', '_')}.{ending}"] = value
    musubi = tmp_path / "musubi.safetensors"
    safetensors.numpy.save_file(renamed, musubi)
    pipe = pipeline(config, params, tmp_path / "base")
    pipe.load_lora_weights(str(musubi), adapter_name="mine")
    plain = {k: v for k, v in flatten_dict(params).items() if not k[-1].startswith("lora")}
    merged = merge_file(unflatten_dict(plain), read_lora(musubi, config))
    without = dataclasses.replace(config, lora=None)
    assert_close(ours(without, merged), theirs(pipe.transformer, without))
    assert_close(ours(without, merged), ours(config, params))
