"""Weights and configs of checkpoints: how they are read and written, and what is refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict
from golden_models import (
    MESH,
    WEIGHTS,
    golden_calls,
    golden_config,
    golden_params,
    outputs_of,
    transformer,
)

from alload_jax.commands.model_source import find_source, save_transformer
from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.safetensor_files import INDEX
from alload_jax.models.families import family_of, parameter_count, read_model_config
from alload_jax.models.wan.family import FAMILY
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.models.weights import (
    load_weights,
    read_transformer,
    require_same_architecture,
    save_weights,
)
from alload_jax.sharding.mesh import MeshConfig, make_mesh
from alload_jax.training.parameters import ParametersConfig
from alload_jax.training.restore import described_model, given_parameters

T2V = transformer("wan/t2v")


def test_names_and_config_of_the_original_repository(tmp_path):
    config = WanConfig(num_layers=1, text=TextConfig(6, 3))
    keys = {tensor.key for tensor in FAMILY.tensors(config, "original")}
    block = "blocks.0."
    attention = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    linear = ["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0"]
    linear += ["time_embedding.2", "time_projection.1", "head.head"]
    linear += [block + part for part in (*attention, "norm3", "ffn.0", "ffn.2")]
    norms = [f"{kind}_attn.norm_{part}.weight" for kind in ("self", "cross") for part in "qk"]
    alone = ["head.modulation", *(block + part for part in ("modulation", *norms))]
    assert keys == {f"{n}.{part}" for n in linear for part in ("weight", "bias")} | set(alone)
    fields = {"_class_name": "WanModel", "dim": 1536, "eps": 1e-06, "ffn_dim": 8960}
    fields |= {"freq_dim": 256, "in_dim": 16, "model_type": "t2v", "num_heads": 12}
    fields |= {"num_layers": 30, "out_dim": 16, "text_len": 512}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(tmp_path / "config.json")
    assert parameter_count(config) == 1_418_996_800


def test_names_of_hunyuan_videos_repository():
    """As diffusers' converter lists them."""
    config = golden_config("hunyuan_video/both")
    keys = {tensor.key for tensor in family_of(config).tensors(config, "original")}
    refiner = [f"self_attn_{part}" for part in ("qkv", "proj")]
    refiner += ["norm1", "norm2", "mlp.fc1", "mlp.fc2", "adaLN_modulation.1"]
    streams = [f"attn_{part}" for part in ("q", "k", "v", "proj")] + ["mod.linear"]
    streams += ["mlp.fc1", "mlp.fc2"]
    affine = [f"final_layer.{part}" for part in ("linear", "adaLN_modulation.1")]
    affine += ["img_in.proj", "txt_in.input_embedder", "byt5_in.layernorm"]
    affine += [f"{e}.mlp.{n}" for e in ("time_in", "txt_in.t_embedder") for n in (0, 2)]
    affine += [f"txt_in.c_embedder.linear_{n}" for n in (1, 2)]
    affine += [f"byt5_in.fc{n}" for n in (1, 2, 3)] + [f"vision_in.proj.{n}" for n in (0, 1, 3, 4)]
    affine += [f"txt_in.individual_token_refiner.blocks.{n}.{part}"
               for n in range(config.refiner_layers) for part in refiner]  # fmt: skip
    alone, layers = {"cond_type_embedding.weight"}, range(config.num_layers)
    for block in (f"double_blocks.{n}.{stream}_" for n in layers for stream in ("img", "txt")):
        affine += [block + part for part in streams]
        alone |= {f"{block}attn_{part}_norm.weight" for part in "qk"}
    assert keys == {f"{n}.{part}" for n in affine for part in ("weight", "bias")} | alone


def test_weights_arrive_on_the_meshs_shardings():
    params = load_weights(T2V, golden_config("wan/t2v"), make_mesh(MeshConfig(data=4, fsdp=2)))
    kernel = params["blocks"]["feed_forward"]["hidden"]["kernel"]
    layers, inputs, outputs = kernel.shape
    assert kernel.addressable_shards[0].data.shape == (layers, inputs // 2, outputs)
    jax.tree.map(np.testing.assert_array_equal, params, golden_params("wan/t2v"))


def test_weights_may_be_in_a_folder_of_any_name(tmp_path):
    place = tmp_path / "checkpoints" / "wan"  # as ComfyUI and the runs of others have them
    shutil.copytree(T2V, place)
    assert described_model(place) == read_model_config(place / "config.json")
    assert find_source(place).config == described_model(T2V)


def test_bfloat16_files_are_half_as_large_and_know_how_long_their_texts_were(tmp_path):
    config, params = golden_config("wan/t2v", text=TextConfig(10, 7)), golden_params("wan/t2v")
    [file] = save_weights(tmp_path / "half", params, config, dtype="bfloat16")
    assert file.stat().st_size < 0.6 * (T2V / WEIGHTS).stat().st_size
    rounded = jax.tree.map(lambda p: np.asarray(p.astype(jnp.bfloat16), np.float32), params)
    back = load_weights(file, config, MESH)
    jax.tree.map(np.testing.assert_array_equal, back, rounded)
    assert read_transformer(tmp_path / "half").text == config.text
    assert read_transformer(T2V).text == TextConfig(10, 512)


def test_nothing_is_written_over_nor_left_by_a_failed_export(tmp_path, monkeypatch):
    config, params = golden_config("wan/t2v"), golden_params("wan/t2v")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "work").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "out.partial").mkdir()  # a user's own folder
    before = sorted(tmp_path.rglob("*"))
    for name in ("kept", "link"):
        with pytest.raises(InputError, match="exists already"):
            save_weights(tmp_path / name, params, config)

    def fail(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # as on a full disk
        patch.setattr(
            Path, "write_text", lambda *_: os.write(os.open("/dev/full", os.O_RDWR), b"x")
        )
        with pytest.raises(InputError, match=r"out: cannot be written \(.*No space.*; free disk"):
            save_weights(tmp_path / "out", params, config)
    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        save_weights(tmp_path / "out", params, config)
    for changes, words in (({"text": None}, "model.text is null"), ({"qk_norm": False}, "qk_norm")):
        with pytest.raises(InputError, match=words):  # which diffusers lacks
            save_weights(tmp_path / "out", {}, golden_config("wan/t2v", **changes))
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "kept" / "work").read_text() == "mine"


# ---------------------------------------------------------------- single files of others

ALONE = WanConfig(
    dim=128, ffn_dim=64, num_heads=1, num_layers=2, in_channels=4, freq_dim=32,
    text=TextConfig(96, 512),
)  # fmt: skip


def original_tensors():
    """Random weights by the names of Wan's repository."""
    rng = np.random.default_rng(0)
    wanted = family_of(ALONE).tensors(ALONE, "original")
    return {t.key: rng.normal(size=t.shape).astype(np.float32) for t in wanted}


def in_our_layout(tensors):
    found = {}
    for tensor in family_of(ALONE).tensors(ALONE, "original"):
        value = tensor.to_ours(tensors[tensor.key])
        stacked = found.setdefault(tensor.path, [])
        stacked.append(value if tensor.layer is not None else None)
        found[tensor.path] = stacked if tensor.layer is not None else value
    return {path: np.stack(v) if isinstance(v, list) else v for path, v in found.items()}


def write_raw(file, tensors):
    """safetensors of (dtype as it names them, array), for those that it does not write."""
    header, at = {}, 0
    for key, (dtype, value) in tensors.items():
        end = at + value.nbytes
        header[key] = {"dtype": dtype, "shape": value.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    content = b"".join(value.tobytes() for _, value in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


@pytest.mark.parametrize(
    ("ending", "per_output", "prefix"),
    [
        ("scale_weight", False, ""),
        ("weight_scale", True, "model.diffusion_model."),
        (None, False, ""),
    ],
)
def test_scaled_float8_files_are_read_and_describe_their_model(
    ending, per_output, prefix, tmp_path
):
    tensors, content, expected = original_tensors(), {}, {}
    for key, value in tensors.items():
        if not key.endswith("weight") or not key.startswith("blocks") or "norm" in key:
            content[prefix + key], expected[key] = ("F32", value), value
            continue
        axes = tuple(range(1, value.ndim)) if per_output else None
        scale = np.abs(value).max(axis=axes) / 448 if ending else np.float32(1)
        shaped = scale.reshape(-1, *(1 for _ in value.shape[1:])) if per_output else scale
        kind, dtype = ("F8_E4M3", "float8_e4m3fn") if ending else ("F8_E5M2", "float8_e5m2")
        narrow = (value / shaped).astype(dtype)
        if ending == "scale_weight" and "ffn.2" in key:  # not narrow, but scaled all the same
            kind, narrow = "F16", (value / shaped).astype(np.float16)
        content[prefix + key] = (kind, narrow)
        expected[key] = narrow.astype(np.float32) * shaped
        if ending:
            layer = prefix + key.removesuffix("weight")
            content[layer + ending] = ("F32", np.asarray(scale, np.float32))
            content[layer + "comfy_quant"] = ("U8", np.zeros(3, np.uint8))
    if ending == "scale_weight":
        content["scaled_fp8"] = ("F8_E4M3", np.zeros(2, jnp.float8_e4m3fn))
    file = tmp_path / "x.safetensors"
    write_raw(file, content)
    assert described_model(file) == ALONE
    found = flatten_dict(load_weights(file, ALONE, MESH), sep="/")
    for path, value in in_our_layout(expected).items():
        np.testing.assert_allclose(found[path], value, rtol=1e-6)
    source = find_source(file)  # as commands read it
    assert source.config == ALONE
    read = flatten_dict(source.values(MESH), sep="/")
    assert {path: value.tolist() for path, value in read.items()} == {
        path: value.tolist()
        for path, value in flatten_dict(load_weights(file, ALONE, MESH), sep="/").items()
    }
    wider = dataclasses.replace(ALONE, num_heads=2)
    with pytest.raises(InputError, match=r"x.safetensors: .*num_heads is 2, but 1 there"):
        given_parameters(file, wider, ParametersConfig(), MESH)
    if per_output:
        for key in (k for k in content if k.endswith(ending)):
            content[key] = ("F32", np.ones(7, np.float32))
        write_raw(file, content)
        with pytest.raises(InputError, match=r"needs one scale, or one for each output; name"):
            load_weights(file, ALONE, MESH)


def test_gguf_files_are_read_and_describe_their_model(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
    tensors, file = original_tensors(), tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(file, "wan")
    kinds, expected = gguf.GGMLQuantizationType, {}
    for key, value in tensors.items():
        shape = value.shape
        if len(shape) > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{key}", [int(n) for n in shape])
            value = value.reshape(shape[0], -1)
        kind = kinds.Q8_0 if "ffn" in key and value.ndim == 2 else kinds.BF16
        stored = gguf.quants.quantize(value, kind)
        writer.add_tensor(key, stored, raw_dtype=kind)
        expected[key] = gguf.quants.dequantize(stored, kind).reshape(shape)
        assert np.abs(expected[key] - tensors[key]).max() < 0.05
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = file.rename(tmp_path / "x.GGUF")
    assert described_model(file) == ALONE
    found = flatten_dict(load_weights(file, ALONE, MESH), sep="/")
    for path, value in in_our_layout(expected).items():
        np.testing.assert_allclose(found[path], value, rtol=1e-6)
    save_transformer(find_source(file), str(tmp_path / "merged"), "float32")
    merged = flatten_dict(load_weights(tmp_path / "merged", ALONE, MESH), sep="/")
    jax.tree.map(np.testing.assert_array_equal, merged, found)
    whole = file.read_bytes()
    for content in (b"", b"GGUF", whole[: len(whole) // 2], bytes(len(whole))):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"x\.GGUF: the package gguf cannot read it"):
            load_weights(file, ALONE, MESH)


def test_blocks_of_other_kinds_are_not_counted_and_strange_shapes_describe_no_model(tmp_path):
    tensors, file = original_tensors(), tmp_path / "x.safetensors"
    more = {"vace_blocks.0.self_attn.q.weight": tensors["blocks.0.self_attn.q.weight"]}
    safetensors.numpy.save_file(tensors | more, file)
    assert described_model(file) == ALONE
    flat = {"patch_embedding.weight": np.zeros(128, np.float32)}
    safetensors.numpy.save_file(tensors | flat, file)
    assert described_model(file) is None
    flat = {"text_embedding.0.weight": np.zeros(128, np.float32)}
    safetensors.numpy.save_file(tensors | flat, file)
    with pytest.raises(InputError, match=r"x.safetensors: has tensors of shapes that no model"):
        described_model(file)


# ---------------------------------------------------------------- what cannot be read


def replaced(old, new):
    return lambda folder, file: file.write_bytes(file.read_bytes().replace(old, new))


def with_index(text):
    return lambda folder, file: (folder / INDEX).write_text(text)


def with_tensors(change):
    def spoil(folder, file):
        golden = safetensors.numpy.load_file(T2V / WEIGHTS)
        change(golden)
        safetensors.numpy.save_file(golden, file)

    return spoil


def misname(golden):
    golden["proj_out.extra"] = golden.pop("proj_out.bias")
    golden["scale_shift_table"] = golden["scale_shift_table"][:, :1]


MISNAMED = (
    r"missing proj_out.bias; unexpected proj_out.extra; scale_shift_table has shape \(1, 1, 24"
)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d, f: f.rename(d / "model.pth"), r"model\.pth: is a pickle file.*torch\.save_file"),
        (lambda d, f: f.write_bytes(f.read_bytes()[:1000]), "not a valid safetensors file"),
        (with_index('{"weight_map": {"x": "a-00001-of-00002.safetensors"}}'), "lacks a-00001-of"),
        (with_index("{}"), "is not a valid safetensors index"),
        (with_index('{"weight_map": {"x": 3}}'), "names 3, which is not a file in its folder"),
        (with_index('{"weight_map": {"x": "/etc/passwd"}}'), "names '/etc/passwd'"),
        (
            lambda d, f: shutil.copy(f, d / "other.safetensors"),
            r"both diffusion_pyt.* and other\.saf",
        ),
        (lambda d, f: (d / "x.safetensors").mkdir(), "cannot be read .Is a directory."),
        (with_tensors(lambda t: t.update({"proj_out.bias": np.ones(16, int)})), "bias is I64"),
        (with_tensors(misname), MISNAMED),
        (replaced(b'"F32"', b'"F8_E4M3"'), "not a valid safetensors file"),
        (lambda folder, file: file.unlink(), "holds no safetensors"),
        (lambda folder, file: shutil.rmtree(folder), "no such file or folder"),
    ],
)
def test_damaged_checkpoints_are_one_line(spoil, words, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(T2V, folder)
    spoil(folder, folder / WEIGHTS)
    with pytest.raises(InputError, match=words) as raised:
        load_weights(folder, golden_config("wan/t2v"), MESH)
    assert "\n" not in str(raised.value)


CONFIGS = (transformer(f"{family}/t2v") / "config.json" for family in ("wan", "hunyuan_video"))
FIELDS, HUNYUAN_FIELDS = (json.loads(path.read_text()) for path in CONFIGS)
WRONG = {"num_attention_heads": "2", "num_layers": {}, "ffn_dim": None, "freq_dim": True}
WRONG |= {"text_dim": 2.0, "out_channels": "4", "eps": "a", "patch_size": [2, 2]}
WRONG |= {"cross_attn_norm": "yes"}


def test_config_files_that_are_none_or_hold_wrong_values_are_named(tmp_path):
    for content, words in (
        (None, "no such file"),
        ("{", "is not valid JSON"),
        ([], "holds list"),
        ({}, "_class_name is none"),
        ({"_class_name": "WanTransformer3DModel"}, "lacks 'num_attention_heads'"),
        *((FIELDS | {key: value}, f"config.json: {key} is ") for key, value in WRONG.items()),
        (FIELDS | {"patch_size": 2}, "config.json: patch_size is "),
        (HUNYUAN_FIELDS | {"use_meanflow": True}, "config.json: use_meanflow is true"),
        (HUNYUAN_FIELDS | {"qk_norm": None}, "config.json: qk_norm is None"),
        (HUNYUAN_FIELDS | {"num_layers": "2"}, "config.json: num_layers is '2'"),
        (HUNYUAN_FIELDS | {"rope_axes_dim": [8, 2]}, "config.json: .*three whole numbers"),
        (HUNYUAN_FIELDS | {"mlp_ratio": 0}, "config.json: mlp_ratio is 0"),
    ):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(InputError, match=words):
            read_model_config(tmp_path / "config.json")


def test_differences_of_architecture_and_images_that_a_model_does_not_take_are_named():
    ours, theirs = golden_config("wan/t2v"), golden_config("wan/t2v", num_layers=5, ffn_dim=3)
    words = "model.ffn_dim is 40, but 3 there; model.num_layers is 2, but 5 there"
    with pytest.raises(InputError, match=words):
        require_same_architecture(ours, theirs, T2V)
    longer = dataclasses.replace(ours, text=TextConfig(10, 9), num_classes=3, remat="full")
    require_same_architecture(longer, ours, T2V)
    for case, image, words in (("t2v", np.zeros((2, 5, 10)), "given"), ("flf2v", None, "missing")):
        call = golden_calls(f"wan/{case}")[0][0]
        with pytest.raises(ValueError, match=f"image is {words}, but model"):
            outputs_of(f"wan/{case}", [call._replace(arguments=(*call.arguments[:3], image))])


@pytest.mark.parametrize(("dim", "ffn_dim"), [(200, 464), (1664, 480), (1792, 976), (2048, 8192)])
def test_widths_survive_the_ratio_that_diffusers_keeps(dim, ffn_dim):
    changes = {"dim": dim, "ffn_dim": ffn_dim, "num_heads": 2, "rotary_dims": None}
    config = golden_config("hunyuan_video/t2v", glyph_hidden=2048, **changes)
    fields = family_of(config).export_fields(config)
    assert family_of(config).read_fields(fields).ffn_dim == ffn_dim
    shares = np.array(config.rotary_sizes) / config.head_dim  # in pairs of channels
    np.testing.assert_allclose(shares, [1 / 8, 7 / 16, 7 / 16], atol=0.04)


def test_what_diffusers_cannot_load_is_not_exported():
    for changes, words in (
        ({"glyphs": None}, "model.glyphs"),
        ({"patch_size": (1, 2, 1)}, "square"),
        ({}, "2048"),
    ):
        config = golden_config("hunyuan_video/t2v", **changes)
        with pytest.raises(InputError, match=words):
            family_of(config).export_fields(config)
