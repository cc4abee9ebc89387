"""Wan's transformer against diffusers' own, by golden files, and its weights in and out."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from flax.traverse_util import flatten_dict
from wan_golden import CASES, GOLDEN, golden_calls

from alload_jax.errors import InputError
from alload_jax.models.common.config import TextConfig
from alload_jax.models.common.safetensor_files import INDEX
from alload_jax.models.families import abstract_model, parameter_count, read_model_config
from alload_jax.models.wan.family import FAMILY
from alload_jax.models.wan.transformer import WanConfig
from alload_jax.models.weights import (
    load_weights,
    read_transformer,
    require_same_architecture,
    save_weights,
)
from alload_jax.sharding.mesh import MeshConfig, make_mesh

ONE_DEVICE = MeshConfig(data=1)


def golden_config(case, **changes):
    config = read_model_config(GOLDEN / case / "transformer" / "config.json")
    return dataclasses.replace(config, dtype="float32", **changes)


def golden_params(case, config):
    mesh = make_mesh(ONE_DEVICE, jax.devices()[:1])
    return load_weights(GOLDEN / case / "transformer", config, mesh)


def compiled(config, params):
    """The model as one program for each shape, in place of one for each operation."""
    graph = abstract_model(config).graph
    run = jax.jit(lambda params, *inputs: nnx.merge(graph, params)(*inputs))
    return functools.partial(run, params)


def error_of(value, expected):
    return np.linalg.norm(value - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "t2v" else pytest.mark.slow) for case in CASES],
)
def test_equals_diffusers_in_outputs_and_all_gradients(case):
    config = golden_config(case)
    graph, params = abstract_model(config).graph, golden_params(case, config)
    calls, expected = golden_calls(case)

    def total(params):
        model = nnx.merge(graph, params)
        outputs = [model(c.latents, c.timestep, c.text, c.image) for c in calls]
        return sum(jnp.sum(o * c.cotangent) for o, c in zip(outputs, calls, strict=True)), outputs

    (_, outputs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    for output, call in zip(outputs, calls, strict=True):
        assert error_of(np.asarray(output), call.output) < 2e-5
    flat = flatten_dict(grads, sep="/")
    wanted = FAMILY.tensors(config, "diffusers")
    assert {tensor.key for tensor in wanted} == set(expected)
    assert {tensor.path for tensor in wanted} == set(flat)
    for tensor in wanted:
        ours = np.asarray(
            flat[tensor.path] if tensor.layer is None else flat[tensor.path][tensor.layer]
        )
        assert error_of(tensor.to_theirs(ours), expected[tensor.key]) < 1e-4, tensor.key


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("residual_dtype", ["compute", "float32"])
def test_kernels_in_bfloat16_stay_near_diffusers(case, residual_dtype):
    """Within twice what bfloat16 alone makes: the same model without our kernels."""
    calls, _ = golden_calls(case)

    def errors(norm):
        config = golden_config(case, residual_dtype=residual_dtype, norm=norm)
        config = dataclasses.replace(config, dtype="bfloat16")
        run = compiled(config, golden_params(case, config))
        return [
            error_of(np.asarray(run(c.latents, c.timestep, c.text, c.image)), c.output)
            for c in calls
        ]

    for kernel, plain in zip(errors("triton"), errors("xla"), strict=True):
        assert kernel < 2 * plain < 0.1


def rounding(residual_dtype):
    """How far bfloat16 is from diffusers' float32."""
    config = dataclasses.replace(golden_config("t2v"), dtype="bfloat16")
    config = dataclasses.replace(config, residual_dtype=residual_dtype)
    run = compiled(config, golden_params("t2v", config))
    call = golden_calls("t2v")[0][1]
    return error_of(np.asarray(run(call.latents, call.timestep, call.text)), call.output)


def test_a_float32_residual_rounds_less():
    assert rounding("float32") < rounding("compute")


@pytest.mark.parametrize("case", CASES)
def test_goes_out_and_comes_back_bit_for_bit(case, tmp_path):
    config = golden_config(case)
    params = golden_params(case, config)
    files = save_weights(tmp_path / "out", params, config, shard_bytes=40_000)
    assert len(files) > 1
    original = GOLDEN / case / "transformer"
    stored = {}
    for file in files:
        stored |= safetensors.numpy.load_file(file)
    golden = safetensors.numpy.load_file(original / "diffusion_pytorch_model.safetensors")
    assert stored.keys() == golden.keys()
    for key, value in golden.items():
        np.testing.assert_array_equal(stored[key], value, strict=True)
    back = load_weights(tmp_path / "out", config, make_mesh(ONE_DEVICE, jax.devices()[:1]))
    jax.tree.map(np.testing.assert_array_equal, back, params)
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", original)
    )
    for fields in (ours, theirs):
        fields.pop("_diffusers_version")
        fields.pop("qk_norm")
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_the_originals_names_give_the_same_parameters(case, tmp_path):
    config = golden_config(case)
    golden = safetensors.numpy.load_file(
        GOLDEN / case / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    pairs = zip(
        FAMILY.tensors(config, "diffusers"), FAMILY.tensors(config, "original"), strict=True
    )
    renamed = {theirs.key: golden[ours.key] for ours, theirs in pairs}
    assert len(renamed) == len(golden)
    safetensors.numpy.save_file(renamed, tmp_path / "wan.safetensors")
    mesh = make_mesh(ONE_DEVICE, jax.devices()[:1])
    params = load_weights(tmp_path / "wan.safetensors", config, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, golden_params(case, config))


def test_names_of_the_original_repository():
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


def test_weights_arrive_on_the_meshs_shardings():
    config = golden_config("t2v")
    mesh = make_mesh(MeshConfig(data=4, fsdp=2))
    params = load_weights(GOLDEN / "t2v" / "transformer", config, mesh)
    kernel = params["blocks"]["feed_forward"]["hidden"]["kernel"]
    *rest, width = kernel.shape
    assert kernel.addressable_shards[0].data.shape == (*rest, width // 2)
    jax.tree.map(np.testing.assert_array_equal, params, golden_params("t2v", config))


def test_bfloat16_files_are_half_as_large_and_come_back_rounded(tmp_path):
    config = golden_config("t2v")
    params = golden_params("t2v", config)
    [file] = save_weights(tmp_path / "half", params, config, dtype="bfloat16")
    full = GOLDEN / "t2v" / "transformer" / file.name
    assert file.stat().st_size < 0.6 * full.stat().st_size
    back = load_weights(file, config, make_mesh(ONE_DEVICE, jax.devices()[:1]))
    jax.tree.map(
        lambda b, p: np.testing.assert_array_equal(b, p.astype(jnp.bfloat16).astype(jnp.float32)),
        back,
        params,
    )


def test_all_wrong_keys_are_named_at_once(tmp_path):
    golden = safetensors.numpy.load_file(
        GOLDEN / "t2v" / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    golden["proj_out.extra"] = golden.pop("proj_out.bias")
    golden["scale_shift_table"] = golden["scale_shift_table"][:, :1]
    safetensors.numpy.save_file(golden, tmp_path / "wan.safetensors")
    words = (
        r"missing proj_out.bias; unexpected proj_out.extra; scale_shift_table has shape \(1, 1, 24"
    )
    with pytest.raises(InputError, match=words):
        load_weights(
            tmp_path / "wan.safetensors",
            golden_config("t2v"),
            make_mesh(ONE_DEVICE, jax.devices()[:1]),
        )


def spoil_pickled(folder):
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "model.pth")


def spoil_torn(folder):
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def spoil_lost(folder):
    (folder / INDEX).write_text('{"weight_map": {"x": "a-00001-of-00002.safetensors"}}')


def spoil_index(folder):
    (folder / INDEX).write_text("{}")


def spoil_index_of_numbers(folder):
    (folder / INDEX).write_text('{"weight_map": {"x": 3}}')


def spoil_index_outside(folder):
    (folder / INDEX).write_text('{"weight_map": {"x": "/etc/passwd"}}')


def spoil_twice(folder):
    shutil.copy(folder / "diffusion_pytorch_model.safetensors", folder / "other.safetensors")


def spoil_folder(folder):
    (folder / "x.safetensors").mkdir()


def spoil_integers(folder):
    file = folder / "diffusion_pytorch_model.safetensors"
    golden = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(golden | {"proj_out.bias": np.ones(16, np.int64)}, file)


def spoil_float8(folder):
    file = folder / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F8_E4M3"'))


def spoil_missing(folder):
    shutil.rmtree(folder)


def spoil_empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_pickled, r"model\.pth: is a pickle file.*safetensors\.torch\.save_file"),
        (spoil_torn, "not a valid safetensors file"),
        (spoil_lost, "lacks a-00001-of-00002"),
        (spoil_index, "is not a valid safetensors index"),
        (spoil_index_of_numbers, "names 3, which is not a file in its folder"),
        (spoil_index_outside, "names '/etc/passwd'"),
        (spoil_twice, r"is in both diffusion_pytorch_model\.safetensors and other\.safetensors"),
        (spoil_folder, "cannot be read .Is a directory."),
        (spoil_integers, r"proj_out\.bias is I64, not float"),
        (spoil_float8, "not a valid safetensors file"),
        (spoil_empty, "holds no safetensors"),
        (spoil_missing, "no such file or folder"),
    ],
)
def test_damaged_checkpoints_are_one_line(spoil, words, tmp_path):
    shutil.copytree(GOLDEN / "t2v" / "transformer", tmp_path / "t")
    spoil(tmp_path / "t")
    with pytest.raises(InputError, match=words) as raised:
        load_weights(tmp_path / "t", golden_config("t2v"), make_mesh(ONE_DEVICE, jax.devices()[:1]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("{", "is not valid JSON"),
        ("[]", "holds list"),
        ("{}", "_class_name is none"),
        ('{"_class_name": "WanTransformer3DModel"}', "lacks 'num_attention_heads'"),
    ],
)
def test_config_files_that_are_none(text, words, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", "2"),
        ("num_layers", {}),
        ("ffn_dim", None),
        ("freq_dim", True),
        ("text_dim", 2.0),
        ("out_channels", "4"),
        ("eps", "a"),
        ("patch_size", [2, 2]),
        ("patch_size", 2),
        ("cross_attn_norm", "yes"),
    ],
)
def test_config_values_of_a_wrong_kind_are_named(key, value, tmp_path):
    fields = json.loads((GOLDEN / "t2v" / "transformer" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {key: value}))
    with pytest.raises(InputError, match=f"config.json: {key} is "):
        read_model_config(tmp_path / "config.json")


def test_comfyuis_prefix_is_known(tmp_path):
    golden = safetensors.numpy.load_file(
        GOLDEN / "t2v" / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    prefixed = {f"model.diffusion_model.{key}": value for key, value in golden.items()}
    safetensors.numpy.save_file(prefixed, tmp_path / "wan.safetensors")
    config = golden_config("t2v")
    mesh = make_mesh(ONE_DEVICE, jax.devices()[:1])
    params = load_weights(tmp_path / "wan.safetensors", config, mesh)
    jax.tree.map(np.testing.assert_array_equal, params, golden_params("t2v", config))


def test_an_export_knows_how_long_its_texts_were(tmp_path):
    config = golden_config("t2v", text=TextConfig(10, 7))
    save_weights(tmp_path / "out", golden_params("t2v", config), config)
    assert read_transformer(tmp_path / "out").text == config.text
    assert read_transformer(GOLDEN / "t2v" / "transformer").text == TextConfig(10, 512)


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    config = golden_config("t2v")
    params = golden_params("t2v", config)
    (tmp_path / "out.partial").mkdir()  # a user's own folder

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        save_weights(tmp_path / "out", params, config)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


def test_a_link_is_not_written_over(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    config = golden_config("t2v")
    with pytest.raises(InputError, match="exists already"):
        save_weights(tmp_path / "link", golden_params("t2v", config), config)


def test_the_originals_config_file(tmp_path):
    fields = {"_class_name": "WanModel", "dim": 1536, "eps": 1e-06, "ffn_dim": 8960}
    fields |= {"freq_dim": 256, "in_dim": 16, "model_type": "t2v", "num_heads": 12}
    fields |= {"num_layers": 30, "out_dim": 16, "text_len": 512}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(tmp_path / "config.json")
    assert parameter_count(config) == 1_418_996_800


def test_differences_of_architecture_are_all_named():
    ours, theirs = golden_config("t2v"), golden_config("t2v", num_layers=5, ffn_dim=3)
    words = "model.ffn_dim is 40, but 3 there; model.num_layers is 2, but 5 there"
    with pytest.raises(InputError, match=words):
        require_same_architecture(ours, theirs, GOLDEN)
    longer = dataclasses.replace(ours, text=TextConfig(10, 9), num_classes=3, remat="full")
    require_same_architecture(longer, ours, GOLDEN)


def test_an_existing_folder_is_not_written_over(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "work").write_text("mine")
    config = golden_config("t2v")
    with pytest.raises(InputError, match="exists already"):
        save_weights(tmp_path / "kept", golden_params("t2v", config), config)
    assert (tmp_path / "kept" / "work").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"text": None, "image": None}, "model.text is null"), ({"qk_norm": False}, "qk_norm")],
)
def test_what_diffusers_lacks_is_not_exported(changes, words, tmp_path):
    with pytest.raises(InputError, match=words):
        save_weights(tmp_path / "out", {}, golden_config("t2v", **changes))
    assert not (tmp_path / "out").exists()


def test_an_image_is_given_exactly_where_the_model_takes_one():
    config = golden_config("t2v")
    model = nnx.merge(abstract_model(config).graph, golden_params("t2v", config))
    call = golden_calls("t2v")[0][0]
    with pytest.raises(ValueError, match=r"image is given, but model\.image is None"):
        model(call.latents, call.timestep, call.text, np.zeros((2, 5, 10)))
