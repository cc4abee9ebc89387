"""Against diffusers itself: the export loads there without a word, and computes the same."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from flax import nnx
from random_models import random_params

torch = pytest.importorskip("torch", reason="needs PyTorch: install alload-jax[parity]")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers: install alload-jax[parity]")

from alload_jax.config import read_config  # noqa: E402
from alload_jax.models.common.config import ImageConfig, TextConfig  # noqa: E402
from alload_jax.models.families import (  # noqa: E402
    abstract_model,
    parameter_count,
    read_model_config,
)
from alload_jax.models.wan.family import FAMILY  # noqa: E402
from alload_jax.models.wan.transformer import WanConfig  # noqa: E402
from alload_jax.models.weights import load_weights, save_weights  # noqa: E402
from alload_jax.sharding.mesh import MeshConfig, make_mesh  # noqa: E402

pytestmark = pytest.mark.parity

TEXT = TextConfig(dim=12, length=9)
SHAPE = {"in_channels": 4, "freq_dim": 32, "dtype": "float32"}
CONFIGS = {
    "t2v": WanConfig(dim=48, ffn_dim=100, num_heads=4, num_layers=3, text=TEXT, **SHAPE),
    "plain": WanConfig(
        dim=36, ffn_dim=50, num_heads=3, num_layers=2, text=TEXT, cross_norm=False, **SHAPE
    ),
    "patches": WanConfig(
        dim=32,
        ffn_dim=64,
        num_heads=2,
        num_layers=1,
        text=TextConfig(dim=5, length=3),
        patch_size=(2, 1, 2),
        out_channels=6,
        eps=1e-5,
        **SHAPE,
    ),
    "i2v": WanConfig(
        dim=24,
        ffn_dim=40,
        num_heads=2,
        num_layers=2,
        text=TextConfig(dim=6, length=512),  # diffusers splits image from text there
        image=ImageConfig(dim=10),
        out_channels=2,
        **SHAPE,
    ),
}
CONVERTED = pytest.importorskip("diffusers.loaders.single_file_utils")


def exported(config, folder, caplog, **options):
    """diffusers' model of our export; any warning about its keys fails."""
    params = random_params(config)
    save_weights(folder, params, config, **options)
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        model, info = diffusers.WanTransformer3DModel.from_pretrained(
            folder, output_loading_info=True
        )
    assert not any(info.values())
    assert not [record.message for record in caplog.records]
    return params, model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_loads_without_a_warning_and_computes_the_same(name, tmp_path, caplog):
    config = CONFIGS[name]
    params, theirs = exported(config, tmp_path / "out", caplog, shard_bytes=60_000)
    rng = np.random.default_rng(1)
    for size, timesteps in (((2, 4, 6), [3.5, 990.0]), ((4, 2, 8), [0.0, 500.0])):
        latents = rng.normal(size=(2, *size, 4)).astype(np.float32)
        text = rng.normal(size=(2, config.text.length, config.text.dim)).astype(np.float32)
        image = rng.normal(size=(2, 7, 10)).astype(np.float32) if config.image else None
        time = np.asarray(timesteps, np.float32)
        ours = nnx.merge(abstract_model(config).graph, params)(latents, time, text, image)
        with torch.no_grad():
            expected = theirs(
                torch.from_numpy(np.moveaxis(latents, -1, 1).copy()),
                torch.from_numpy(time),
                torch.from_numpy(text),
                None if image is None else torch.from_numpy(image),
                return_dict=False,
            )[0].numpy()
        expected = np.moveaxis(expected, 1, -1)
        assert np.linalg.norm(ours - expected) < 2e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_bit_exact(name, tmp_path, caplog):
    config = CONFIGS[name]
    params, theirs = exported(config, tmp_path / "out", caplog)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    found = dataclasses.replace(
        read_model_config(tmp_path / "theirs" / "config.json"), dtype="float32", text=config.text
    )
    assert found == config
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    back = load_weights(tmp_path / "theirs", config, mesh)
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize("name", CONFIGS)
def test_original_names_are_those_that_diffusers_converts(name):
    config = CONFIGS[name]
    ours = [(t.key, np.asarray(n)) for n, t in enumerate(FAMILY.tensors(config, "original"))]
    converted = CONVERTED.convert_wan_transformer_to_diffusers(dict(ours))
    expected = {t.key: n for n, t in enumerate(FAMILY.tensors(config, "diffusers"))}
    assert {key: int(value) for key, value in converted.items()} == expected


@pytest.mark.parametrize(
    "name", ["wan2_1_t2v_1_3b", "wan2_1_t2v_14b", "wan2_1_i2v_14b", "wan2_2_ti2v_5b"]
)
def test_wan_configs_have_diffusers_parameter_count(name):
    model = read_config(["--config", f"configs/{name}.yaml"]).model
    fields = {k: v for k, v in FAMILY.export_fields(model).items() if not k.startswith("_")}
    with torch.device("meta"):
        theirs = diffusers.WanTransformer3DModel(**fields)
    assert parameter_count(model) == sum(p.numel() for p in theirs.parameters())
