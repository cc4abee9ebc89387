"""HunyuanVideo against diffusers itself: the export loads without a word, and computes the same."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from random_models import random_params

torch = pytest.importorskip("torch", reason="needs PyTorch: install alload-jax[parity]")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers: install alload-jax[parity]")

from draw_hunyuan_video import call_model  # noqa: E402

from alload_jax.models.common.config import ImageConfig, TextConfig  # noqa: E402
from alload_jax.models.common.embedding import ConditionTokens  # noqa: E402
from alload_jax.models.common.lora import LoraConfig  # noqa: E402
from alload_jax.models.common.segments import segments_of  # noqa: E402
from alload_jax.models.families import (  # noqa: E402
    abstract_model,
    parameter_count,
    read_model_config,
)
from alload_jax.models.hunyuan_video.family import FAMILY  # noqa: E402
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig  # noqa: E402
from alload_jax.models.lora_files import adapters_of, write_lora  # noqa: E402
from alload_jax.models.weights import load_weights, save_weights  # noqa: E402
from alload_jax.sharding.mesh import MeshConfig, make_mesh  # noqa: E402

pytestmark = pytest.mark.parity


def shape(heads, axes, layers, **others):
    dim = heads * sum(axes)
    sizes = {"dim": dim, "num_heads": heads, "rotary_dims": axes, "num_layers": layers}
    return HunyuanVideoConfig(
        **{"ffn_dim": 4 * dim, "in_channels": 9, "out_channels": 4, "patch_size": (1, 1, 1)}
        | {"text": TextConfig(6, 8), "glyphs": TextConfig(5, 4), "image": ImageConfig(10)}
        | {"dtype": "float32"}
        | sizes
        | others
    )


CONFIGS = {
    "base": shape(2, (4, 6, 6), 3),
    "single": shape(1, (2, 4, 2), 1, refiner_layers=1, rotary_theta=100.0),
    "wide": shape(3, (4, 2, 4), 2, ffn_dim=45, in_channels=4, out_channels=None),
    "patches": shape(2, (2, 4, 2), 1, patch_size=(2, 2, 2), out_channels=3),
    "deep": shape(2, (4, 2, 2), 5, refiner_layers=3, residual_dtype="float32"),
}
"""Differences from diffusers by arithmetic alone: float32 throughout."""
CALLS = (((2, 6, 10), (8, 3), (0, 4), True), ((4, 2, 6), (1, 5), (2, 3), False))


def exported(config, folder, caplog, **options):
    """diffusers' model of our export; any warning about its keys fails."""
    params = random_params(config)
    save_weights(folder, params, config, **options)
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        model, info = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(
            folder, output_loading_info=True
        )
    assert not any(info.values())
    assert not [record.message for record in caplog.records]
    return params, model.eval()


def drawn(config, size, text, glyphs, with_image, seed=1):
    """Inputs of a call as diffusers takes them, in NumPy, and as ours does."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(2, *shape)).astype(np.float32)

    theirs = {
        "latents": normal(config.in_channels, *size),
        "timestep": np.asarray([3.5, 990.0], np.float32),
        "text": normal(8, config.text.dim),
        "text_length": np.asarray(text),
        "glyphs": normal(4, config.glyphs.dim),
        "glyphs_length": np.asarray(glyphs),
        "image": normal(7, config.image.dim) * with_image,
    }
    lengths = {"text": text, "glyphs": glyphs, "image": (7 * with_image,) * 2}
    condition = {}
    for name, length in lengths.items():
        table = np.stack([np.zeros(2, np.int32), np.asarray(length, np.int32)])[..., None]
        condition[name] = ConditionTokens(theirs[name], segments_of(table, theirs[name].shape[1]))
    latents = np.moveaxis(theirs["latents"], 1, -1)
    return theirs, (latents, theirs["timestep"], condition)


def close(found, expected, tolerance, least=0.0):
    """Relative to the norm, or to `least` if that is larger."""
    size = max(np.linalg.norm(expected), least)
    return np.linalg.norm(np.asarray(found) - expected) < tolerance * size


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_loads_without_a_warning_and_has_equal_outputs_and_gradients(
    name, tmp_path, caplog
):
    config = CONFIGS[name]
    params, theirs = exported(config, tmp_path / "out", caplog, shard_bytes=60_000)
    graph, total = abstract_model(config).graph, 0
    ours, expected = [], []
    for call in CALLS:
        inputs, arguments = drawn(config, *call)
        ours.append(arguments)
        output = call_model(theirs, {k: torch.from_numpy(v) for k, v in inputs.items()})
        expected.append(np.moveaxis(output.detach().numpy(), 1, -1))
        total = total + (output**2).sum()
    total.backward()

    def loss(params):
        model = nnx.merge(graph, params)
        outputs = [model(*arguments) for arguments in ours]
        return sum(jnp.sum(output**2) for output in outputs), outputs

    grads, outputs = jax.jit(jax.grad(loss, has_aux=True))(params)
    for found, output in zip(outputs, expected, strict=True):
        assert close(found, output, 1e-4)
    flat, named = flatten_dict(grads, sep="/"), dict(theirs.named_parameters())
    # Biases of the refiner's keys have no gradient but rounding.
    rounding = 1e-4 * max(np.linalg.norm(grad) for grad in flat.values())
    for tensor in FAMILY.tensors(config, "diffusers"):
        grad = named[tensor.key].grad
        wanted = np.zeros(tensor.shape, np.float32) if grad is None else grad.numpy()
        part = flat[tensor.path] if tensor.layer is None else flat[tensor.path][tensor.layer]
        assert close(tensor.to_theirs(np.asarray(part)), wanted, 1e-3, rounding), tensor.key


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_bit_exact(name, tmp_path, caplog):
    config = CONFIGS[name]
    params, theirs = exported(config, tmp_path / "out", caplog)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    found = dataclasses.replace(
        read_model_config(tmp_path / "theirs" / "config.json"),
        **{field: getattr(config, field) for field in ("dtype", "residual_dtype")},
        text=config.text,
        glyphs=config.glyphs,
    )
    assert found == config
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    back = load_weights(tmp_path / "theirs", config, mesh)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_the_published_model_has_diffusers_parameters():
    with torch.device("meta"):
        theirs = diffusers.HunyuanVideo15Transformer3DModel()
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in theirs.config.items()}
    config = FAMILY.read_fields(fields)
    assert parameter_count(config) == sum(p.numel() for p in theirs.parameters()) == 8_326_608_160
    ours = {tensor.key: tensor.shape for tensor in FAMILY.tensors(config, "diffusers")}
    assert ours == {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    exported = {k: v for k, v in FAMILY.export_fields(config).items() if not k.startswith("_")}
    assert exported == {k: v for k, v in fields.items() if not k.startswith("_")}


def test_diffusers_loads_adapters_and_computes_the_same(tmp_path, caplog):
    pytest.importorskip("peft", reason="needs PEFT: install alload-jax[parity]")
    config = dataclasses.replace(CONFIGS["base"], lora=LoraConfig(rank=3, alpha=5.0))
    params = random_params(config)
    save_weights(tmp_path / "base", params, dataclasses.replace(config, lora=None))
    theirs = diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path / "base").eval()
    file = tmp_path / "lora.safetensors"
    adapters = adapters_of(params, config.lora)
    assert write_lora(file, adapters, config, "diffusers") == 2 * len(adapters)
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        theirs.load_lora_adapter(str(file), prefix="transformer")
    assert not [record.message for record in caplog.records]
    inputs, arguments = drawn(config, *CALLS[0])
    tensors_of_call = {k: torch.from_numpy(v) for k, v in inputs.items()}
    with torch.no_grad():
        expected = np.moveaxis(call_model(theirs, tensors_of_call).numpy(), 1, -1)
        theirs.disable_lora()
        plain = np.moveaxis(call_model(theirs, tensors_of_call).numpy(), 1, -1)
    found = np.asarray(nnx.merge(abstract_model(config).graph, params)(*arguments))
    assert close(found, expected, 1e-4)
    assert not close(found, plain, 1e-2)
