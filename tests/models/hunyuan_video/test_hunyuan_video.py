"""HunyuanVideo's transformer against diffusers' own, by golden files; weights in and out."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from flax.traverse_util import flatten_dict
from hunyuan_video_golden import (
    CASES,
    GOLDEN,
    MESH,
    error_of,
    golden_calls,
    golden_config,
    golden_params,
)

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import abstract_model, read_model_config
from alload_jax.models.hunyuan_video.family import FAMILY
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.weights import load_weights, save_weights


def outputs_of(config, calls):
    """Each call by itself; those of one shape by one program."""
    graph = abstract_model(config).graph

    @jax.jit
    def run(params, latents, timestep, condition):
        return nnx.merge(graph, params)(latents, timestep, condition)

    params = golden_params("both")
    return [run(params, call.latents, call.timestep, call.condition) for call in calls]


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case == "both" else pytest.mark.slow) for case in CASES],
)
def test_equals_diffusers_in_outputs_and_all_gradients(case):
    config = golden_config(case)
    graph, params = abstract_model(config).graph, golden_params(case)
    calls, expected = golden_calls(case)

    def total(params):
        model = nnx.merge(graph, params)
        outputs = [model(c.latents, c.timestep, c.condition) for c in calls]
        return sum(jnp.sum(o * c.cotangent) for o, c in zip(outputs, calls, strict=True)), outputs

    (_, outputs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    for output, call in zip(outputs, calls, strict=True):
        assert error_of(output, call.output) < 2e-5
    flat = flatten_dict(grads, sep="/")
    wanted = FAMILY.tensors(config, "diffusers")
    assert {tensor.key for tensor in wanted} == set(expected)
    assert {tensor.path for tensor in wanted} == set(flat)
    for tensor in wanted:
        ours = np.asarray(
            flat[tensor.path] if tensor.layer is None else flat[tensor.path][tensor.layer]
        )
        assert error_of(tensor.to_theirs(ours), expected[tensor.key]) < 1e-4, tensor.key


def test_weights_go_out_and_come_back_bit_for_bit(tmp_path, monkeypatch):
    config, params = golden_config("both"), golden_params("both")
    # The golden files' only difference from what diffusers can load.
    monkeypatch.setattr("alload_jax.models.hunyuan_video.family._GLYPH_HIDDEN", config.glyph_hidden)
    files = save_weights(tmp_path / "out", params, config, shard_bytes=40_000)
    assert len(files) > 1
    stored = {}
    for file in files:
        stored |= safetensors.numpy.load_file(file)
    original = GOLDEN / "both" / "transformer"
    golden = safetensors.numpy.load_file(original / "diffusion_pytorch_model.safetensors")
    assert stored.keys() == golden.keys()
    for key, value in golden.items():
        np.testing.assert_array_equal(stored[key], value, strict=True)
    back = load_weights(tmp_path / "out", config, MESH)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", original)
    )
    for fields in (ours, theirs):
        for name in ("_diffusers_version", "task_type", "target_size"):
            fields.pop(name)
    assert ours == theirs


def test_padding_changes_no_bit_whatever_it_holds():
    config, call = golden_config("both"), golden_calls("both")[0][1]

    def with_padding(value):
        condition = {}
        for name, tokens in call.condition.items():
            padding = (tokens.segments.ids < 0)[..., None]
            condition[name] = tokens._replace(values=np.where(padding, value, tokens.values))
        return call._replace(condition=condition)

    padded = [with_padding(np.float32(value)) for value in (0, 9)]
    zeros, others, clean = outputs_of(config, [*padded, call])
    np.testing.assert_array_equal(zeros, others)
    np.testing.assert_allclose(clean, zeros, rtol=1e-5, atol=1e-6)


def test_a_sample_without_any_text_is_finite_with_all_its_gradients():
    graph, params = abstract_model(golden_config("both")).graph, golden_params("both")
    call = golden_calls("both")[0][0]
    none = np.ones((len(call.latents), 1), bool)
    condition = {name: tokens.without(none) for name, tokens in call.condition.items()}

    def total(params):
        return jnp.sum(nnx.merge(graph, params)(call.latents, call.timestep, condition) ** 2)

    value, grads = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    # No token of a kind, no gradient.
    assert not np.any(grads["condition_embedding"]["kind"]["embedding"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan"),
    [("full", True), ("attention", False), ("feed_forward_and_attention", True)],
)
def test_what_is_kept_for_the_backward_pass_does_not_change_gradients(remat, scan):
    call = golden_calls("both")[0][1]

    def grads(remat, scan):
        config = golden_config("both", remat_layers=(remat,), scan_layers=scan)
        graph = abstract_model(config).graph

        def total(params):
            output = nnx.merge(graph, params)(call.latents, call.timestep, call.condition)
            return jnp.sum(output * call.cotangent)

        return jax.tree.leaves(jax.jit(jax.grad(total))(golden_params("both")))

    for found, expected in zip(grads(remat, scan), grads("none", True), strict=True):
        assert error_of(found, np.asarray(expected)) < 1e-5


def test_a_float32_residual_rounds_less():
    call = golden_calls("both")[0][1]

    def rounding(residual_dtype):
        config = golden_config("both", dtype="bfloat16", residual_dtype=residual_dtype)
        return error_of(outputs_of(config, [call])[0], call.output)

    assert rounding("float32") < rounding("compute") < 0.1


def test_adapters_by_default_are_on_the_projections_of_both_streams():
    config = golden_config("both", lora=LoraConfig(rank=2))
    names = flatten_dict(abstract_model(config).params, sep="/")
    found = {name.removesuffix("/lora_up") for name in names if name.endswith("/lora_up")}
    linears = ("query", "key", "value", "out", "feed_forward/hidden", "feed_forward/out")
    streams = ("video", "condition")
    assert found == {f"blocks/{stream}/{name}" for stream in streams for name in linears}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 30}, "whole, even number"),
        ({"rotary_dims": (2, 2, 2)}, "rotary_dims is .2, 2, 2."),
        ({"rotary_dims": (3, 3, 2)}, "must be even"),
        ({"norm": "torch"}, "model.norm is 'torch'"),
        ({"refiner_layers": 0}, "model.refiner_layers is 0"),
        ({"text": None}, "without model.text"),
        ({"image": ImageConfig(4, 3)}, "model.image.positions is 3"),
    ],
)
def test_configs_that_cannot_be_meant_are_one_line(changes, words):
    with pytest.raises(InputError, match=words) as raised:
        golden_config("t2v", **changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_meanflow": True}, "use_meanflow is true"),
        ({"qk_norm": None}, "qk_norm is None"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        ({"rope_axes_dim": [8, 2]}, "three whole numbers"),
        ({"mlp_ratio": 0}, "mlp_ratio is 0"),
    ],
)
def test_models_that_are_not_supported_are_named(changes, words, tmp_path):
    fields = json.loads((GOLDEN / "t2v" / "transformer" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(InputError, match=f"config.json: .*{words}"):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(("dim", "ffn_dim"), [(200, 464), (1664, 480), (1792, 976), (2048, 8192)])
def test_widths_survive_the_ratio_that_diffusers_keeps(dim, ffn_dim):
    changes = {"dim": dim, "ffn_dim": ffn_dim, "num_heads": 2, "rotary_dims": None}
    config = golden_config("t2v", glyph_hidden=2048, **changes)
    fields = FAMILY.export_fields(config)
    assert FAMILY.read_fields(fields).ffn_dim == ffn_dim


CLASSES = HunyuanVideoConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=1, dtype="float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (golden_config("t2v", glyphs=None), "model.glyphs"),
        (golden_config("t2v", patch_size=(1, 2, 1)), "square"),
        (golden_config("t2v"), "2048"),
        (CLASSES, r"model\.text"),
    ],
)
def test_what_diffusers_cannot_load_is_not_exported(config, words):
    with pytest.raises(InputError, match=words):
        FAMILY.export_fields(config)


def test_a_model_of_classes_takes_them_as_any_family_does():
    assert CLASSES.condition_parts() == ()
    model = FAMILY.build(CLASSES, nnx.Rngs(0))
    found = model(jnp.ones((2, 3, 4, 2, 1)), jnp.ones(2), jnp.zeros((2, 1), jnp.int32))
    assert found.shape == (2, 3, 4, 2, 1)
