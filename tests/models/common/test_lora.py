"""Adapters of linear layers, the sums of what is exported, and how parameters are stored."""

import contextlib
import dataclasses
import hashlib
import json
import random
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.lora import (
    LORA_PATTERN,
    LoraConfig,
    LoraGroup,
    LoraLinear,
    dropout_keys,
    output_lengths,
)
from alload_jax.models.common.safetensor_files import CONFIG_SHA256, SHA256, check_sum
from alload_jax.models.common.stored import Float8Kernel, quantise, readable, stored_tree
from alload_jax.models.families import (
    abstract_model,
    build_model,
    config_from_fields,
    split_model,
    training_graph,
)
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.lora_files import (
    BASE_NOTE,
    Adapter,
    LoraFile,
    Target,
    adapters_of,
    given_adapters,
    merge_adapters,
    merge_file,
    read_lora,
    write_lora,
)
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.models.weights import load_weights, read_transformer, save_weights
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.checkpoint_files import checksum
from alload_jax.training.restore import _with_magnitudes

PLAIN = WanConfig(
    dim=16, ffn_dim=24, num_heads=2, num_layers=3, in_channels=2, freq_dim=8,
    text=TextConfig(6, 4), dtype="float32",
)  # fmt: skip


def with_lora(**fields):
    return dataclasses.replace(PLAIN, lora=LoraConfig(**fields))


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    shapes = abstract_model(config).params
    return jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)


def output(config, params):
    rng = np.random.default_rng(1)
    latents = rng.normal(size=(2, 1, 4, 4, 2)).astype(np.float32)
    text = rng.normal(size=(2, 4, 6)).astype(np.float32)
    time = np.asarray([3.5, 990.0], np.float32)
    run = jax.jit(lambda p: nnx.merge(abstract_model(config).graph, p)(latents, time, text))
    return np.asarray(run(params))


def test_a_new_model_with_adapters_has_the_weights_of_one_without():
    small = dataclasses.replace(PLAIN, num_layers=1)
    configs = small, dataclasses.replace(small, lora=LoraConfig(rank=5))
    models = (split_model(build_model(each, nnx.Rngs(3))) for each in configs)
    base, ours = (flatten_dict(model.params, sep="/") for model in models)
    for name, value in base.items():
        np.testing.assert_array_equal(ours[name], value)
    new = ours.keys() - base.keys()
    assert new == {name for name in ours if re.search(LORA_PATTERN, name)}
    assert len(new) == 2 * 10  # query, key, value and out twice, and two of the feed-forward layer
    for name in new:
        assert bool(jnp.any(ours[name] != 0)) == name.endswith("lora_down")


@pytest.mark.parametrize("dora", [False, True])
def test_the_output_is_that_of_merged_kernels(dora):
    """With a rank and a scale of their own for some of the layers."""
    targets = ("self_attention/query$", "patch_embedding", "head")
    groups = (LoraGroup(("^head/out",), 3, 7.0), LoraGroup(("head", "patch"), 1))
    config = with_lora(rank=2, alpha=5.0, targets=targets, groups=groups, dora=dora)
    assert config_from_fields(json.loads(json.dumps(config.architecture()))).lora == config.lora
    scales = {"head/out/": 7 / 3, "patch_embedding/": 1.0}
    params = random_params(config)
    expected = {}
    flat = {k: np.asarray(v, np.float64) for k, v in flatten_dict(params, sep="/").items()}
    for name, value in flat.items():
        layer = name.removesuffix("kernel")
        if f"{layer}lora_down" in flat and name.endswith("kernel"):
            scale = scales.get(layer, 5 / 2)
            value = value + scale * flat[f"{layer}lora_down"] @ flat[f"{layer}lora_up"]
            if dora:
                value *= (flat[f"{layer}lora_magnitude"] / np.linalg.norm(value, axis=-2))[
                    ..., None, :
                ]
        if "lora_" not in name:
            expected[name] = value.astype(np.float32)
    assert len(flat) == len(expected) + (9 if dora else 6)
    expected = unflatten_dict(expected, sep="/")
    assert flat["head/out/lora_down"].shape[-1] == 3
    found = merge_adapters(params, config.lora)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    base = {k: v for k, v in flatten_dict(params).items() if not k[-1].startswith("lora_")}
    file = LoraFile(Path(), adapters_of(params, config.lora), {}, None, [])
    again = merge_file(unflatten_dict(base), file)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, expected)
    np.testing.assert_allclose(output(config, params), output(PLAIN, expected), atol=2e-5)


def test_a_new_model_with_dora_computes_what_the_kernels_do():
    """Its lengths are theirs, and have a gradient; merged at half it is half of the way there."""
    config = with_lora(rank=2, dora=True)
    params = random_params(PLAIN)
    values = flatten_dict(random_params(config) | {}, sep="/")
    values |= flatten_dict(params, sep="/")
    for name in values:
        if name.endswith("lora_magnitude"):
            values[name] = np.full_like(values[name], np.nan)
        elif name.endswith("lora_up"):
            values[name] = np.zeros_like(values[name])
    begun = _with_magnitudes(unflatten_dict(values, sep="/"), config)
    np.testing.assert_allclose(output(config, begun), output(PLAIN, params), atol=2e-5)
    name = "blocks/feed_forward/hidden"
    lengths = np.linalg.norm(values[f"{name}/kernel"], axis=-2)
    found = flatten_dict(begun, sep="/")[f"{name}/lora_magnitude"]
    np.testing.assert_allclose(found, lengths, rtol=1e-6)
    drawn = split_model(build_model(config, nnx.Rngs(0))).params
    jax.tree.map(np.testing.assert_allclose, _with_magnitudes(drawn, config), drawn)

    layer = LoraLinear(
        nnx.Linear(5, 3, rngs=nnx.Rngs(0)), config.lora, training=True, rngs=nnx.Rngs(1)
    )
    layer.lora_up[...] = jnp.ones_like(layer.lora_up[...])
    x = jnp.ones((2, 5))
    graph, state = nnx.split(layer)
    gradient = jax.grad(lambda s: nnx.merge(graph, s)(x).sum())(state)
    change = layer.lora_down[...] @ layer.lora_up[...]
    direction = (layer.kernel[...] + change) / output_lengths(layer.kernel[...] + change)
    np.testing.assert_allclose(gradient.lora_magnitude[...], x.sum(0) @ direction, rtol=1e-4)

    adapters = adapters_of(random_params(config), config.lora)
    file = LoraFile(Path(), adapters, {}, None, [])
    whole, half = (flatten_dict(merge_file(params, file, factor)) for factor in (1.0, 0.5))
    for path, value in flatten_dict(params).items():
        np.testing.assert_allclose(half[path], (value + whole[path]) / 2, rtol=1e-4, atol=1e-5)


def test_wrong_settings_are_refused():
    for fields, words in (
        ({"alpha": float("inf")}, r"model.lora.alpha is inf"),
        ({"targets": ("(",)}, "is not a regular expression"),
        ({"groups": (LoraGroup(("^head",), 2),)}, r"groups: '\^head' matches no layer that has an"),
        ({"targets": ("to_q",)}, r"'to_q' matches no linear layer; names are.*blocks/"),
    ):
        with pytest.raises(InputError, match=words):
            abstract_model(with_lora(**fields))


def test_dropout_differs_by_layer_and_batch_and_keeps_the_mean():
    config = with_lora(rank=4, dropout=0.4, targets=("feed_forward/hidden",))
    graph, shapes = training_graph(config)
    params = random_params(config)
    drawn = [dropout_keys(shapes, jax.random.key(n)) for n in range(100)]
    layers = np.asarray(flatten_dict(drawn[0], sep="/")["blocks/feed_forward/hidden/dropout_key"])
    assert len({tuple(layer) for layer in layers}) == 3
    x = jnp.ones((8, 16))

    def apply(keys):
        values = unflatten_dict(flatten_dict(params) | flatten_dict(keys))
        blocks, state = nnx.split(nnx.merge(graph, values).blocks)
        first = nnx.merge(blocks, jax.tree.map(lambda part: part[0], state))
        return first.feed_forward.hidden(x)

    run = jax.jit(apply)
    found = np.stack([run(keys) for keys in drawn])
    assert not np.array_equal(found[0], found[1])
    np.testing.assert_array_equal(run(drawn[0]), found[0])
    flat = flatten_dict(params, sep="/")
    name = "blocks/feed_forward/hidden"
    kernel, bias = flat[f"{name}/kernel"][0], flat[f"{name}/bias"][0]
    exact = x @ (kernel + flat[f"{name}/lora_down"][0] @ flat[f"{name}/lora_up"][0]) + bias
    spread = found.std(axis=(0, 1)) / np.sqrt(found.shape[0] * found.shape[1])
    assert np.all(np.abs(found.mean(axis=(0, 1)) - exact[0]) < 5 * spread + 1e-6)


# ---------------------------------------------------------------- files


def assert_same(found, expected):
    """Whether adapters change weights alike."""
    assert found.keys() == expected.keys()
    for target, adapter in expected.items():
        theirs, ours = (each.scale * each.down @ each.up for each in (found[target], adapter))
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
        np.testing.assert_equal(found[target].magnitude, adapter.magnitude)


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ("diffusers", {"rank": 3}),
        ("original", {"rank": 2, "alpha": 5.0, "targets": ("key$",)}),
        ("comfyui", {"rank": 2}),
        ("diffusers", {"rank": 3, "alpha": 1.0, "dora": True}),
        ("original", {"rank": 2, "alpha": 5.0, "dora": True}),
    ],
)
def test_a_file_comes_back_as_it_was(fields, keys, tmp_path):
    config = with_lora(**fields)
    params = random_params(config)
    adapters = adapters_of(params, config.lora)
    file = tmp_path / "new" / "folder" / "x.safetensors"
    count = write_lora(file, adapters, config, keys, text_length=4)
    assert count == ((2 if keys == "diffusers" else 3) + config.lora.dora) * len(adapters)
    found = read_lora(file, PLAIN)
    assert found.text_length == 4
    assert_same(found.adapters, adapters)
    merged = merge_adapters(params, config.lora)
    base = {k: v for k, v in flatten_dict(params).items() if not k[-1].startswith("lora_")}
    again = merge_file(unflatten_dict(base), found)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), again, merged)
    back = flatten_dict(given_adapters(read_lora(file, config), config), sep="/")
    flat = flatten_dict(params, sep="/")
    for down in (name for name in flat if "lora_down" in name):
        up = down.replace("down", "up")
        product = flat[down] @ flat[up]
        np.testing.assert_allclose(back[down] @ back[up], product, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "targets", "layers"),
    [
        ("original", (), {"img_attn_q", "img_attn_k", "img_attn_v"}),
        ("comfyui", (), {"img_attn_qkv"}),
        ("comfyui", ("video/(query|value|out)",), {"img_attn_qkv"}),
        ("comfyui", ("video/(query|key|value)", "dora"), {"img_attn_qkv"}),
        ("original", ("text/blocks/(query|key|value|gates)",), {"self_attn_qkv"}),
    ],
)
def test_hunyuan_videos_own_keys_and_comfyuis_come_back_as_they_were(
    keys, targets, layers, tmp_path
):
    plain = HunyuanVideoConfig(
        dim=12, ffn_dim=20, num_heads=2, num_layers=2, in_channels=3, rotary_dims=(2, 2, 2),
        text=TextConfig(6, 4), glyphs=TextConfig(5, 3), image=ImageConfig(7), refiner_layers=1,
    )  # fmt: skip
    lora = LoraConfig(rank=2, alpha=3.0, targets=targets[:1], dora="dora" in targets)
    config = dataclasses.replace(plain, lora=lora)
    adapters = {  # whose first output does nothing
        target: dataclasses.replace(each, up=each.up * (np.arange(each.up.shape[-1]) > 0))
        for target, each in adapters_of(random_params(config), config.lora).items()
    }
    file = tmp_path / "x.safetensors"
    write_lora(file, adapters, config, keys)
    names = set(safetensors.numpy.load_file(file))
    blocks = r"diffusion_model\.(txt_in\.individual_token_refiner\.blocks|double_blocks)\.\d\."
    layer = r"((img|txt|self)_(attn_\w+|mlp\.fc[12])|adaLN_modulation\.1)"
    what = r"(alpha|dora_scale|lora_(up|down)\.weight)"
    assert all(re.fullmatch(rf"{blocks}{layer}\.{what}", name) for name in names)
    found = {m[1] for m in (re.search(r"\.((img|self)_attn_[qkv]+)\.", n) for n in names) if m}
    assert found == layers
    if layers == {"img_attn_qkv"}:  # all that a layer for three may hold, and one that does nothing
        both = safetensors.numpy.load_file(file)
        stem = "diffusion_model.double_blocks.1.img_attn_qkv."
        both |= {f"{stem}diff_b": np.arange(36, dtype=np.float32)}
        both[f"{stem}lora_up.weight"][12:24] = 0
        safetensors.numpy.save_file(both, tmp_path / "both.safetensors")
        read = read_lora(tmp_path / "both.safetensors", plain)
        for n, part in enumerate(("query", "key", "value")):
            bias = read.differences[Target(f"blocks/video/{part}/bias", 1)]()
            np.testing.assert_array_equal(bias, np.arange(12 * n, 12 * n + 12))
        with_length = read.adapters[Target("blocks/video/key/kernel", 1)] if lora.dora else None
        assert with_length is None or with_length.magnitude is not None
        if lora.dora:
            target = Target("blocks/video/key/kernel", 1)
            partly = adapters | {target: dataclasses.replace(adapters[target], magnitude=None)}
            with pytest.raises(InputError, match="with DoRA all of them need one"):
                write_lora(tmp_path / "partly.safetensors", partly, config, keys)
        both |= {f"{stem}lokr_w{n}": np.ones((6, 6), np.float32) for n in (1, 2)}
        safetensors.numpy.save_file(both, tmp_path / "both.safetensors")
        with pytest.raises(InputError, match="img_attn_qkv has LoKr for several layers at once"):
            read_lora(tmp_path / "both.safetensors", plain)
    musubi = {
        re.sub(
            r"\.(?=.*\.(alpha|dora|lora))", "_", n.replace("diffusion_model.", "lora_unet_", 1)
        ): v
        for n, v in safetensors.numpy.load_file(file).items()
    }
    other = tmp_path / "musubi.safetensors"
    safetensors.numpy.save_file(musubi, other)
    for place in (file, other):
        back = read_lora(place, plain).adapters
        assert_same(back, adapters)
        assert {adapter.rank for adapter in back.values()} == {2}


def test_adapters_of_a_single_stream_are_one_for_layers_that_are_one_there(tmp_path):
    plain = HunyuanVideo13bConfig(
        dim=12, ffn_dim=20, num_heads=2, num_layers=2, single_layers=2, rotary_dims=(2, 2, 2),
        text=TextConfig(6, 4), refiner_layers=1,
    )  # fmt: skip
    default = dataclasses.replace(plain, lora=LoraConfig(rank=2, alpha=3.0))
    others = ("single_blocks/(query|feed_forward/hidden)$", "head/modulation", "refiner|text/inner")
    some = dataclasses.replace(plain, lora=LoraConfig(rank=2, targets=others))
    for config in (default, some):
        adapters = adapters_of(random_params(config), config.lora)
        for keys in ("original", "comfyui", "diffusers"):
            file = tmp_path / f"{keys}.safetensors"
            write_lora(file, adapters, config, keys, force=True)
            names = {name.split(".lora_")[0] for name in safetensors.numpy.load_file(file)}
            assert ("diffusion_model.single_blocks.1.linear1" in names) == (keys != "diffusers")
            assert_same(read_lora(file, plain).adapters, adapters)
    both = safetensors.numpy.load_file(tmp_path / "original.safetensors")
    key = "diffusion_model.single_blocks.0.linear1.lora_up.weight"
    safetensors.numpy.save_file(both | {key: both[key][1:]}, tmp_path / "wrong.safetensors")
    with pytest.raises(InputError, match=r"linear1: up has shape \(55, 4\), not 56"):
        read_lora(tmp_path / "wrong.safetensors", plain)


def test_what_the_model_lacks_is_left_out_where_that_is_asked_for(tmp_path):
    """An image-to-video model's adapter for one of text."""
    file = tmp_path / "x.safetensors"
    image = PAIR | {k.replace("attn1.to_q", "attn2.add_k_proj"): v for k, v in PAIR.items()}
    image |= {k.replace("transformer.blocks", "lora_te.layers"): v for k, v in PAIR.items()}
    safetensors.numpy.save_file(image, file)
    with pytest.raises(
        InputError, match=r"add_k_proj has no weight in the .* --skip-unknown leaves out"
    ):
        read_lora(file, PLAIN)
    found = read_lora(file, PLAIN, skip_unknown=True)
    assert list(found.adapters) == [Target("blocks/self_attention/query/kernel", 0)]
    layers = {line.split()[0] for line in found.skipped}
    assert layers == {"blocks.0.attn2.add_k_proj", "lora_te.layers.0.attn1.to_q"}
    safetensors.numpy.save_file({k: v for k, v in image.items() if "add_k" in k}, file)
    with pytest.raises(InputError, match="holds nothing for this model"):
        read_lora(file, PLAIN, skip_unknown=True)


@pytest.mark.parametrize(
    ("parts", "alpha", "scale"),
    [
        ({"w1": (2, 4), "w2": (8, 4)}, 3.0, 1.0),
        ({"w1": (2, 4), "w2_a": (8, 3), "w2_b": (3, 4)}, 6.0, 2.0),
        ({"w1_a": (2, 5), "w1_b": (5, 4), "w2": (8, 4)}, 1.0, 0.2),
        ({"w1_a": (2, 5), "w1_b": (5, 4), "w2_a": (8, 2), "w2_b": (2, 4)}, None, 1.0),
    ],
)
def test_lokr_by_its_definition(parts, alpha, scale, tmp_path):
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in parts.items()}
    content = {f"lora_unet_blocks_1_self_attn_q.lokr_{name}": v for name, v in drawn.items()}
    if alpha is not None:
        content["lora_unet_blocks_1_self_attn_q.alpha"] = np.asarray(alpha, np.float32)
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(content, file)
    for name in {"w1", "w2"} - drawn.keys():
        drawn[name] = drawn[f"{name}_a"] @ drawn[f"{name}_b"]
    expected = scale * np.einsum("ij,kl->ikjl", drawn["w1"], drawn["w2"]).reshape(16, 16).T
    params = random_params(PLAIN)
    found = merge_file(params, read_lora(file, PLAIN))["blocks"]["self_attention"]["query"]
    change = np.asarray(found["kernel"]) - params["blocks"]["self_attention"]["query"]["kernel"]
    np.testing.assert_allclose(change[1], expected, rtol=1e-4, atol=1e-5)
    assert not change[[0, 2]].any()


def test_differences_of_weights_and_biases_are_merged(tmp_path):
    rng = np.random.default_rng(0)
    shapes = {"1.self_attn.q.diff": (16, 16), "1.self_attn.q.diff_b": 16, "2.norm3.diff": 16}
    values = {f"diffusion_model.blocks.{key}": rng.normal(size=n) for key, n in shapes.items()}
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file({k: v.astype(np.float32) for k, v in values.items()}, file)
    params = random_params(PLAIN)
    found = merge_file(params, read_lora(file, PLAIN), 0.5)
    query = found["blocks"]["self_attention"]["query"]
    changes = dict(zip(("q", "b", "n"), values.values(), strict=True))
    for name, change in (("kernel", changes["q"].T), ("bias", changes["b"])):
        before = params["blocks"]["self_attention"]["query"][name]
        np.testing.assert_allclose(query[name][1] - before[1], 0.5 * change, atol=1e-6)
        np.testing.assert_array_equal(query[name][2], before[2])
    norm = found["blocks"]["cross_norm"]["scale"][2] - params["blocks"]["cross_norm"]["scale"][2]
    np.testing.assert_allclose(norm, 0.5 * changes["n"], atol=1e-6)
    with pytest.raises(InputError, match="which are no adapters; merge it"):
        given_adapters(read_lora(file, with_lora()), with_lora())


ZEROS = np.zeros((2, 16), np.float32)
QUERY, OTHERS = "transformer.blocks.0.attn1.to_q", "lora_unet_blocks_0_self_attn_q"
PAIR = {f"{QUERY}.lora_A.weight": ZEROS, f"{QUERY}.lora_B.weight": ZEROS.T.copy()}
NORM = "transformer.blocks.0.norm2.lora_{}.weight"
SIDES = dict(zip(("down", "up"), PAIR.values(), strict=True))


def float8_file():
    header = {
        key: {"dtype": "F8_E4M3", "shape": list(value.shape), "data_offsets": [32 * n, 32 * n + 32]}
        for n, (key, value) in enumerate(PAIR.items())
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def test_files_that_do_not_fit_are_refused_in_one_line(tmp_path):
    for content, words in (
        ({}, "holds no tensors"),
        (float8_file(), "is F8_E4M3, not float 16 to 64"),
        ({f"{QUERY}.lora_A.weight": ZEROS}, "only one of the two"),
        (
            {k.replace("s.0", f"s.{n}"): v for k, v in PAIR.items() for n in "6789"},
            "has no weight in the .* and 1 more; name",
        ),
        (PAIR | {f"{QUERY}.hada_w1_a": ZEROS}, "of no known kind"),
        (PAIR | {f"{QUERY}.dora_scale": ZEROS[:1]}, r"of shape \(1, 16\), but only .* 16 outputs"),
        ({f"{QUERY}.dora_scale": ZEROS.T.copy()}, "only one of the two"),
        ({f"{OTHERS}.lokr_w1": ZEROS}, "lokr_w2 must be a matrix, or lokr_w2"),
        ({f"{OTHERS}.{part}": ZEROS for part in ("lokr_w1", "dora_scale")}, "LoKr with magnitudes"),
        (dict(zip(PAIR, (ZEROS[:0], ZEROS[:0].T.copy()), strict=True)), "has a rank of 0"),
        (PAIR | {f"{QUERY}.alpha": np.ones(2, "f4")}, "has 2 values of al"),
        ({f"{OTHERS}.lokr_w{n}": ZEROS for n in (1, 2)}, r"shape \(4, 256\), not \(16, 16\)"),
        ({k: np.zeros((2, 2), np.float32) for k in PAIR}, r"shape \(2, 2\), not \(2, 16\)"),
        (PAIR | {f"{QUERY}.alpha": np.float32([np.nan])}, "not finite"),
        ({k: np.full_like(v, np.inf) for k, v in PAIR.items()}, "has values that are not finite"),
        ({k: v.astype(np.int32) for k, v in PAIR.items()}, "is I32, not float 16 to 64"),
        ({NORM.format("A"): ZEROS[0, :2], NORM.format("B"): ZEROS.T.copy()}, "has adapters of sh"),
        (PAIR | {k.replace("transformer", "diffusion_model"): v for k, v in PAIR.items()}, "twice"),
        (PAIR | {f"{OTHERS}.lora_{k}.weight": v for k, v in SIDES.items()}, "same layer as an"),
        ({k.replace("transformer", "text_encoder"): v for k, v in PAIR.items()}, "text encoder"),
    ):
        file = tmp_path / "x.safetensors"
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            safetensors.numpy.save_file(content, file)
        with pytest.raises(InputError, match=words) as error:
            read_lora(file, PLAIN)
        assert "\n" not in str(error.value)
        assert str(file) in str(error.value)


def test_a_folder_stands_for_its_lora_and_a_file_there_stays(tmp_path):
    file = tmp_path / "mine.safetensors"
    safetensors.numpy.save_file(PAIR, file)
    adapters = read_lora(tmp_path, PLAIN).adapters
    assert list(adapters) == [Target("blocks/self_attention/query/kernel", 0)]
    with pytest.raises(InputError, match=r"mine\.safetensors: exists"):
        write_lora(file, adapters, PLAIN, "diffusers")
    safetensors.numpy.save_file(
        PAIR | {f"{QUERY}.alpha": np.array(4, "f4")}, tmp_path / "other.safetensors"
    )
    with pytest.raises(InputError, match="holds 2 safetensors files; name the LoRA file"):
        read_lora(tmp_path, PLAIN)
    (tmp_path / "other.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (found,) = read_lora(tmp_path, PLAIN).adapters.values()
    assert found.scale == 2.0  # its alpha over its rank


def test_an_adapter_of_the_patch_embedding_is_a_convolution(tmp_path):
    rng, key = np.random.default_rng(0), "transformer.patch_embedding.lora_{}.weight"
    down = rng.normal(size=(2, PLAIN.in_channels, *PLAIN.patch_size)).astype(np.float32)
    up = rng.normal(size=(16, 2, 1, 1, 1)).astype(np.float32)
    file, content = tmp_path / "x.safetensors", {key.format("A"): down, key.format("B"): up}
    safetensors.numpy.save_file(content, file)
    adapters = read_lora(file, PLAIN).adapters
    assert [each.up.tolist() for each in adapters.values()] == [up[..., 0, 0, 0].T.tolist()]
    write_lora(file, adapters, PLAIN, "diffusers", force=True)
    np.testing.assert_equal(safetensors.numpy.load_file(file), content)
    safetensors.numpy.save_file({key.format("A"): down, key.format("B"): up[..., 0]}, file)
    with pytest.raises(InputError, match=r"up has shape \(16, 2, 1, 1\), not \(16, 2, 1, 1, 1\)"):
        read_lora(file, PLAIN)


def test_adapters_that_a_model_lacks_or_of_another_rank_are_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(PAIR, file)
    read = read_lora(file, PLAIN)
    assert read.text_length is None
    with pytest.raises(InputError, match="groups: rank is 0"):
        LoraGroup(("a",), 0)
    with pytest.raises(InputError, match=r"model\.lora\.rank is 4; set it to 2"):
        given_adapters(read, with_lora(rank=4))
    with pytest.raises(InputError, match=r"has no magnitudes \(DoRA\); set model.lora.dora to fa"):
        given_adapters(read, with_lora(rank=2, dora=True))
    config = with_lora(rank=2, targets=("feed_forward",))
    with pytest.raises(InputError, match=r"self_attention/query, which model\.lora.targets leaves"):
        given_adapters(read, config)
    # Layers that the file lacks can still learn.
    query = given_adapters(read, with_lora(rank=2))["blocks"]["self_attention"]["query"]
    assert (query["lora_down"][1:] != 0).all()
    assert 0.2 < np.abs(query["lora_down"][1:]).max() <= 16**-0.5  # as a new adapter's
    assert not query["lora_up"].any()
    nameless = {Target("other/kernel", None): Adapter(ZEROS.T, ZEROS, 1.0)}
    with pytest.raises(InputError, match="no keys of diffusers for that layer"):
        write_lora(tmp_path / "y.safetensors", nameless, PLAIN, "diffusers")
    assert list(tmp_path.iterdir()) == [file]


# ---------------------------------------------------------------- sums of exported files

MESH = make_mesh(MeshConfig(), jax.devices()[:1])
SMALL = dataclasses.replace(PLAIN, num_layers=1)


@pytest.fixture
def export(tmp_path):
    save_weights(tmp_path / "export", random_params(SMALL), SMALL, shard_bytes=8_000)
    return tmp_path / "export"


@pytest.fixture
def adapters(tmp_path):
    config = dataclasses.replace(SMALL, lora=LoraConfig(rank=2))
    found = adapters_of(random_params(config), config.lora)
    write_lora(tmp_path / "lora.safetensors", found, config, "diffusers", base="x", text_length=4)
    return tmp_path / "lora.safetensors"


def content_of(place):
    """What is read of an exported folder, or of a file of adapters."""
    if place.is_dir():
        config = read_transformer(place)
        return config, jax.tree.leaves(load_weights(place, config, MESH))
    lora = read_lora(place, SMALL)
    parts = [(each.down, each.up, each.scale) for each in lora.adapters.values()]
    return (list(lora.adapters), lora.text_length), jax.tree.leaves(parts)


def test_no_flipped_bit_of_an_export_is_silent(export, adapters):
    """Each alone, most of them in headers."""
    chance = random.Random(0)
    for place, count in ((export, 40), (adapters, 80)):
        files = sorted(export.iterdir()) if place is export else [adapters]
        healthy, values = content_of(place)
        for _ in range(count):
            file = chance.choice(files)
            bits = 8 * file.stat().st_size
            bit = chance.randrange(bits if chance.random() < 0.3 else min(bits, 8 * 1500))
            good = file.read_bytes()
            damaged = bytearray(good)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
            with contextlib.suppress(InputError):
                now, found = content_of(place)
                assert now == healthy, f"bit {bit} of {file.name}"
                jax.tree.map(np.testing.assert_array_equal, found, values)
            file.write_bytes(good)


def test_the_sums_are_those_of_the_bytes(export, adapters):
    for file in (adapters, *export.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="numpy") as handle:
            notes = handle.metadata()
        assert notes["format"] == "pt"  # which diffusers asks for
        blank = file.read_bytes().replace(notes[SHA256].encode(), b"0" * 64)
        assert hashlib.sha256(blank).hexdigest() == notes[SHA256]
        if file != adapters:
            theirs = hashlib.sha256((export / "config.json").read_bytes()).hexdigest()
            assert notes[CONFIG_SHA256] == theirs
        else:
            assert notes[BASE_NOTE] == "x"


def test_a_sum_is_of_one_file_also_where_another_takes_its_place(adapters, monkeypatch):
    opened, safe_open = Path.open, safetensors.safe_open

    def open_once(path, *args):
        content = opened(path, *args)
        path.unlink()
        path.touch()
        return content

    def open_header(*args, **options):
        handle = safe_open(*args, **options)
        monkeypatch.setattr(Path, "open", open_once)
        return handle

    monkeypatch.setattr(safetensors, "safe_open", open_header)
    check_sum(adapters)


def test_a_changed_config_is_named_and_a_file_alone_needs_none(export, tmp_path):
    place = export / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"eps": 0.1}))
    with pytest.raises(InputError, match=r"config\.json: is damaged or was changed: its SHA-256"):
        content_of(export)
    # As ComfyUI and users move it.
    save_weights(tmp_path / "whole", random_params(SMALL), SMALL)
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    load_weights(shutil.copy(file, tmp_path / "alone.safetensors"), SMALL, MESH)


# ---------------------------------------------------------------- frozen parameters


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_float8_errs_by_at_most_a_sixteenth_of_a_number(size):
    kernel = (size * np.random.default_rng(0).standard_t(2, size=(2, 90, 5))).astype(np.float32)
    kernel[0, :, 3] = 0
    stored = quantise(jnp.asarray(kernel))
    assert stored["values"].dtype == ml_dtypes.float8_e4m3fn
    found = np.asarray(Float8Kernel(**stored)[...], np.float64)
    exact = kernel.astype(np.float64)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    # Three bits of mantissa; below 2⁻⁶ of the scale numbers are 2⁻⁹ apart.
    assert np.all(np.abs(found - exact) <= np.maximum(np.abs(exact) / 16, largest / 448 / 1023))
    assert not found[0, :, 3].any()


def test_only_the_kernels_of_blocks_are_float8_and_the_model_reads_them():
    params = random_params(PLAIN)
    stored = stored_tree(params, lambda _: "float8")
    flat = flatten_dict(stored, sep="/")
    eight = {name for name, value in flat.items() if value.dtype == ml_dtypes.float8_e4m3fn}
    kernels = {k for k in flatten_dict(params, sep="/") if k.startswith("blocks") and "kernel" in k}
    assert {name.removesuffix("/values") for name in eight} == kernels
    dense = jax.tree.map(
        lambda value: value[...].astype(jnp.float32),
        readable(stored),
        is_leaf=lambda part: isinstance(part, Float8Kernel),
    )
    found, expected = output(PLAIN, readable(stored)), output(PLAIN, dense)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    exact = output(PLAIN, params)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_checksum_sees_every_bit_and_place(dtype):
    rng = np.random.default_rng(0)
    value = rng.normal(size=(4, 6)).astype(getattr(ml_dtypes, dtype, np.float32))
    before = checksum({"a": jnp.asarray(value)})
    assert checksum({"a": jnp.asarray(value.reshape(6, 4))}) == before  # alike in memory
    assert checksum({"a": jnp.asarray(value[::-1].copy())}) != before
    for bit in range(8 * value.itemsize):
        changed = value.copy()
        bits = changed.view(f"uint{8 * value.itemsize}")
        bits[rng.integers(4), rng.integers(6)] ^= bits.dtype.type(1 << bit)
        assert checksum({"a": jnp.asarray(changed)}) != before
