"""Exports and adapters in diffusers itself: they load without a word, and compute the same."""

import dataclasses
import logging

import diffusers
import jax
import numpy as np
import peft
import pytest
import safetensors.numpy
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from draw_models import call_hunyuan, call_hunyuan_13b
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from alload_jax.config import read_config
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.embedding import ConditionTokens
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.common.segments import segments_of
from alload_jax.models.families import abstract_model, parameter_count, read_model_config
from alload_jax.models.hunyuan_video.family import FAMILY as HUNYUAN
from alload_jax.models.hunyuan_video.family import FAMILY_13B
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.lora_files import adapters_of, merge_file, read_lora, write_lora
from alload_jax.models.wan.family import FAMILY as WAN
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.models.weights import load_weights, save_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh

pytestmark = pytest.mark.parity

SIZES = {"dim": 24, "ffn_dim": 40, "num_heads": 2, "num_layers": 2}


def wan(**fields):
    shape = {"in_channels": 4, "freq_dim": 32, "dtype": "float32", "text": TextConfig(12, 9)}
    return WanConfig(**SIZES | shape | fields)


def hunyuan(heads, axes, layers, **fields):
    dim = heads * sum(axes)
    return HunyuanVideoConfig(
        **{"dim": dim, "num_heads": heads, "rotary_dims": axes, "num_layers": layers}
        | {"ffn_dim": 4 * dim, "in_channels": 9, "out_channels": 4, "patch_size": (1, 1, 1)}
        | {"text": TextConfig(6, 8), "glyphs": TextConfig(5, 4), "image": ImageConfig(10)}
        | {"dtype": "float32"}
        | fields
    )


def hunyuan_13b(**fields):
    shape = {"dim": 24, "ffn_dim": 60, "num_heads": 2, "num_layers": 2, "single_layers": 3}
    shape |= {"in_channels": 4, "patch_size": (1, 2, 2), "rotary_dims": (4, 4, 4)}
    text = {"text": TextConfig(6, 8), "pooled_dim": 5, "embedded_guidance": 1.0}
    return HunyuanVideo13bConfig(**shape | text | {"dtype": "float32"} | fields)


I2V = wan(text=TextConfig(6, 512), image=ImageConfig(10), out_channels=2)
"""Of 512 text tokens: diffusers splits the image from the text there."""
CONFIGS = {
    "t2v": wan(dim=48, ffn_dim=100, num_heads=4, num_layers=3),
    "plain": wan(dim=36, ffn_dim=50, num_heads=3, cross_norm=False),
    "patches": wan(num_layers=1, patch_size=(2, 1, 2), out_channels=6, eps=1e-5),
    "i2v": I2V,
    "hunyuan": hunyuan(2, (4, 6, 6), 3, residual_dtype="float32"),
    "hunyuan wide": hunyuan(3, (4, 2, 4), 2, ffn_dim=45, in_channels=4, out_channels=None),
    "hunyuan patches": hunyuan(
        2, (2, 4, 2), 1, patch_size=(2, 2, 2), out_channels=3, refiner_layers=1, rotary_theta=100.0
    ),
    "hunyuan 13b": hunyuan_13b(),
    "hunyuan 13b plain": hunyuan_13b(embedded_guidance=None, patch_size=(2, 1, 1)),
}
SIZE, TIMESTEPS = (2, 4, 6), np.asarray([3.5, 990.0], np.float32)


def random_params(config, seed=0):
    """Every parameter random: fresh ones leave out gates and the head."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        norm = "norm" in jax.tree_util.keystr(path) and "scale" in jax.tree_util.keystr(path)
        return np.asarray(rng.normal(0, 0.2, leaf.shape) + norm, np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_model(config).params)


def is_wan(config):
    return isinstance(config, WanConfig)


def is_13b(config):
    return isinstance(config, HunyuanVideo13bConfig)


def inputs_of(config):
    """Inputs of a call by diffusers' order of axes."""
    rng = np.random.default_rng(1)
    shapes = {"latents": (config.in_channels, *SIZE), "text": (config.text.length, config.text.dim)}
    if config.image:
        shapes["image"] = (7, config.image.dim)
    if is_13b(config):
        shapes["pooled"] = (config.pooled_dim,)
    elif not is_wan(config):
        shapes["glyphs"] = (4, config.glyphs.dim)
    drawn = {k: rng.normal(size=(2, *shape)).astype(np.float32) for k, shape in shapes.items()}
    lengths = {"text_length": np.asarray([8, 3]), "glyphs_length": np.asarray([0, 4])}
    return drawn | {"timestep": TIMESTEPS} | ({} if is_wan(config) else lengths)


def ours(config, params):
    inputs = inputs_of(config)
    condition = (inputs["text"], inputs.get("image"))
    if not is_wan(config):
        tokens, counts = {}, {"text": 8, "glyphs": 4, "image": 7}
        if is_13b(config):
            counts, inputs["pooled"] = {"text": 8, "pooled": 1}, inputs["pooled"][:, None]
        for name, count in counts.items():
            length = inputs.get(f"{name}_length", np.full(2, count)).astype(np.int32)
            table = np.stack([np.zeros(2, np.int32), length])[..., None]
            tokens[name] = ConditionTokens(inputs[name], segments_of(table, count))
        condition = (tokens,)
    graph, latents = abstract_model(config).graph, np.moveaxis(inputs["latents"], 1, -1)
    run = jax.jit(lambda params, *arguments: nnx.merge(graph, params)(*arguments))
    return np.asarray(run(params, latents, TIMESTEPS, *condition))


def theirs(model, config):
    inputs = {k: torch.from_numpy(v) for k, v in inputs_of(config).items()}
    with torch.no_grad():
        if is_wan(config):
            named = (inputs["latents"], inputs["timestep"], inputs["text"], inputs.get("image"))
            output = model(*named, return_dict=False)[0]
        else:
            output = (call_hunyuan_13b if is_13b(config) else call_hunyuan)(model, inputs)
    return np.moveaxis(output.numpy(), 1, -1)


def loaded(config, params, folder, **options):
    """Diffusers' model of our export of the base model; any key that does not fit fails."""
    save_weights(folder, params, dataclasses.replace(config, lora=None), **options)
    wanted = "Wan" if is_wan(config) else "HunyuanVideo15"
    wanted = "HunyuanVideo" if is_13b(config) else wanted
    kind = getattr(diffusers, f"{wanted}Transformer3DModel")
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


def pipeline(config, params, folder):
    scheduler = diffusers.UniPCMultistepScheduler()
    model = loaded(config, params, folder)
    return diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=model
    )


@pytest.fixture
def quiet(caplog):
    """Fails at any warning of diffusers."""
    diffusers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        yield
    assert not [record.message for record in caplog.records]


def distance(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_loads_computes_the_same_and_comes_back_bit_exact(name, tmp_path, quiet):
    config = CONFIGS[name]
    params = random_params(config)
    model = loaded(config, params, tmp_path / "out", shard_bytes=60_000)
    assert distance(ours(config, params), theirs(model, config)) < (
        2e-5 if is_wan(config) else 1e-4
    )
    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    unsaved = ("dtype", "text", *(() if is_wan(config) else ("residual_dtype", "glyphs")))
    found = dataclasses.replace(
        read_model_config(tmp_path / "theirs" / "config.json"),
        **{field: getattr(config, field) for field in unsaved},
    )
    assert found == config
    back = load_weights(tmp_path / "theirs", config, make_mesh(MeshConfig(), jax.devices()[:1]))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    if is_wan(config):
        keys = {t.key: np.asarray(n) for n, t in enumerate(WAN.tensors(config, "original"))}
        converted = convert_wan_transformer_to_diffusers(keys)
        expected = {t.key: n for n, t in enumerate(WAN.tensors(config, "diffusers"))}
        assert {key: int(value) for key, value in converted.items()} == expected


def test_published_models_have_diffusers_parameters():
    model = read_config(["--config", "configs/hunyuan_video_13b.yaml"]).model
    fields = {k: v for k, v in FAMILY_13B.export_fields(model).items() if not k.startswith("_")}
    with torch.device("meta"):
        of_diffusers = diffusers.HunyuanVideoTransformer3DModel()
    assert fields == {k: v for k, v in of_diffusers.config.items() if k in fields} | {
        "rope_axes_dim": [16, 56, 56]
    }
    found = {tensor.key: tensor.shape for tensor in FAMILY_13B.tensors(model, "diffusers")}
    assert found == {key: tuple(value.shape) for key, value in of_diffusers.state_dict().items()}
    original = {t.key: t.stored_shape for t in FAMILY_13B.tensors(model, "original")}
    read = FAMILY_13B.config_of_tensors(original)
    assert read == FAMILY_13B.read_fields(fields)
    assert read.architecture().items() <= model.architecture().items()
    for name in ("wan2_1_t2v_1_3b", "wan2_1_t2v_14b", "wan2_1_i2v_14b", "wan2_2_ti2v_5b"):
        model = read_config(["--config", f"configs/{name}.yaml"]).model
        fields = {k: v for k, v in WAN.export_fields(model).items() if not k.startswith("_")}
        with torch.device("meta"):
            of_diffusers = diffusers.WanTransformer3DModel(**fields)
        assert parameter_count(model) == sum(p.numel() for p in of_diffusers.parameters())
    with torch.device("meta"):
        of_diffusers = diffusers.HunyuanVideo15Transformer3DModel()
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in of_diffusers.config.items()}
    config = HUNYUAN.read_fields(fields)
    assert parameter_count(config) == 8_326_608_160
    found = {tensor.key: tensor.shape for tensor in HUNYUAN.tensors(config, "diffusers")}
    assert found == {key: tuple(value.shape) for key, value in of_diffusers.state_dict().items()}
    exported = {k: v for k, v in HUNYUAN.export_fields(config).items() if not k.startswith("_")}
    assert exported == {k: v for k, v in fields.items() if not k.startswith("_")}


# ---------------------------------------------------------------- adapters

ALPHA = LoraConfig(rank=3, alpha=7.0)
ATTENTION = LoraConfig(rank=2, alpha=1.0, targets=("attention/(query|value)$",))
EMBEDDINGS = LoraConfig(rank=2, targets=("^patch_embedding$", "time_embedding", "head/out"))


def without_adapters(params):
    flat = flatten_dict(params)
    return unflatten_dict({k: v for k, v in flat.items() if not k[-1].startswith("lora")})


@pytest.mark.parametrize(
    ("base", "lora", "keys"),
    [
        ("t2v", LoraConfig(rank=4), "original"),
        ("t2v", ATTENTION, "diffusers"),
        ("t2v", EMBEDDINGS, "diffusers"),  # it converts other keys of the blocks alone
        ("i2v", ALPHA, "diffusers"),
        ("i2v", ALPHA, "original"),
        ("hunyuan", ALPHA, "diffusers"),
        ("hunyuan 13b", ALPHA, "diffusers"),
        ("t2v", dataclasses.replace(ALPHA, dora=True), "diffusers"),
        ("hunyuan", dataclasses.replace(ALPHA, dora=True), "diffusers"),
    ],
)
def test_a_file_of_adapters_loads_and_computes_the_same(base, lora, keys, tmp_path, quiet):
    config = dataclasses.replace(CONFIGS[base], lora=lora)
    params = random_params(config)
    file, adapters = tmp_path / "lora.safetensors", adapters_of(params, lora)
    write_lora(file, adapters, config, keys)
    model = loaded(config, params, tmp_path / "base")
    plain = theirs(model, config)
    if is_wan(config):
        pipe = diffusers.WanPipeline(None, None, None, diffusers.UniPCMultistepScheduler(), model)
        pipe.load_lora_weights(str(file), adapter_name="mine")
    else:
        model.load_lora_adapter(str(file), prefix="transformer", adapter_name="mine")
    state = peft.get_peft_model_state_dict(model, adapter_name="mine")
    assert len(state) == (3 if lora.dora else 2) * len(adapters)
    found = ours(config, params)
    assert distance(found, theirs(model, config)) < 1e-4
    assert distance(found, plain) > 1e-2  # it has an effect


def test_what_diffusers_saves_is_read(tmp_path):
    """With PEFT's settings in the metadata: alpha is not the rank."""
    config = I2V
    params = random_params(config)
    pipe = pipeline(config, params, tmp_path / "base")
    targets = ["to_q", "to_out.0", "ffn.net.0.proj"]
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    pipe.transformer.add_adapter(settings, adapter_name="theirs")
    layers = peft.get_peft_model_state_dict(pipe.transformer, adapter_name="theirs")
    metadata = {"transformer_lora_adapter_metadata": settings.to_dict()}
    diffusers.WanPipeline.save_lora_weights(
        tmp_path / "saved", transformer_lora_layers=layers, **metadata
    )
    lora = read_lora(tmp_path / "saved", config)
    assert {adapter.scale for adapter in lora.adapters.values()} == {1.5}
    merged = merge_file(params, lora)
    assert distance(ours(config, merged), theirs(pipe.transformer, config)) < 1e-4


def test_two_files_with_scales_are_what_diffusers_makes_of_them(tmp_path):
    """One has the keys of musubi-tuner."""
    plain = CONFIGS["t2v"]
    config = dataclasses.replace(plain, lora=ALPHA)
    base = random_params(config)
    pipe, merged = pipeline(config, base, tmp_path / "base"), without_adapters(base)
    for name, keys, scale in (("a", "diffusers", 0.7), ("b", "original", -0.4)):
        file = tmp_path / f"{name}.safetensors"
        params = random_params(config, seed=len(keys))
        write_lora(file, adapters_of(params, config.lora), config, keys)
        if keys == "original":
            as_musubi(file)
        pipe.load_lora_weights(str(file), adapter_name=name)
        merged = merge_file(merged, read_lora(file, config), scale)
    pipe.set_adapters(["a", "b"], adapter_weights=[0.7, -0.4])
    assert distance(ours(plain, merged), theirs(pipe.transformer, plain)) < 1e-4


def as_musubi(file):
    renamed = {}
    for key, value in safetensors.numpy.load_file(file).items():
        module, dot, what = key.removeprefix("diffusion_model.").partition(".lora_")
        if not dot:
            module, what = module.removesuffix(".alpha"), "alpha"
        ending = "alpha" if what == "alpha" else f"lora_{what}"
        renamed[f"lora_unet_{module.replace('.', '_')}.{ending}"] = value
    safetensors.numpy.save_file(renamed, file)
