"""Both families of transformers against diffusers' own, by golden files; weights out and in."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from flax.traverse_util import flatten_dict
from golden_models import (
    HUNYUAN,
    HUNYUAN_13B,
    MESH,
    WAN,
    WEIGHTS,
    error_of,
    golden_calls,
    golden_config,
    golden_params,
    outputs_of,
    packed,
    transformer,
)

from alload_jax.models.families import abstract_model, family_of
from alload_jax.models.weights import load_weights, save_weights


def graded(case, calls, in_one_row=False, **changes):
    """Outputs and gradients of their products with the cotangents."""
    graph = abstract_model(golden_config(case, **changes)).graph
    rows = packed(case, calls) if in_one_row else None

    def total(params):
        model = nnx.merge(graph, params)
        if rows:
            found = model.forward_packed(*rows.arguments).velocity
            outputs = list(rows.latents(case, calls, found))
        else:
            outputs = [model(*call.arguments) for call in calls]
        return sum(jnp.sum(o * c.cotangent) for o, c in zip(outputs, calls, strict=True)), outputs

    (_, outputs), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(golden_params(case))
    return outputs, grads


GUIDED = "hunyuan_video_13b/guided"
ROWS = [(case, False) for case in WAN + HUNYUAN + HUNYUAN_13B]
ROWS += [(case, True) for case in ("wan/t2v", GUIDED, "wan/flf2v", "hunyuan_video/both")]
QUICK = [*ROWS[-2:], ("wan/t2v", False)]


@pytest.mark.parametrize(
    ("case", "in_one_row"),
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow) for row in ROWS],
)
def test_equals_diffusers_in_outputs_and_all_gradients(case, in_one_row):
    config, (calls, expected) = golden_config(case), golden_calls(case)
    outputs, grads = graded(case, calls, in_one_row)
    for output, call in zip(outputs, calls, strict=True):
        assert error_of(output, call.output) < 2e-5
    flat = jax.tree.map(np.asarray, flatten_dict(grads, sep="/"))
    wanted = family_of(config).tensors(config, "diffusers")
    assert {tensor.key for tensor in wanted} == set(expected)
    assert {tensor.path for tensor in wanted} == set(flat)
    for tensor in wanted:
        ours = flat[tensor.path] if tensor.layer is None else flat[tensor.path][tensor.layer]
        theirs = tensor.to_theirs(ours)
        assert error_of(theirs, expected[tensor.key]) < 1e-4, tensor.key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "scan"), [("full", True), ("attention", False), ("feed_forward_and_attention", True)]
)
def test_what_hunyuan_video_keeps_for_the_backward_pass_changes_no_gradient(remat, scan):
    calls = golden_calls(BOTH)[0][1:2]
    found, expected = (
        jax.tree.leaves(graded(BOTH, calls, **changes)[1])
        for changes in ({"remat": remat, "scan_layers": scan}, {})
    )
    for one, other in zip(found, expected, strict=True):
        assert error_of(one, np.asarray(other)) < 1e-5


@pytest.mark.parametrize("case", ["wan/t2v", "hunyuan_video/both"])
def test_a_float32_residual_rounds_less(case):
    call = golden_calls(case)[0][1]
    exact, compute = (
        error_of(*outputs_of(case, [call], dtype="bfloat16", residual_dtype=each), call.output)
        for each in ("float32", "compute")
    )
    assert exact < compute < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("case", WAN)
@pytest.mark.parametrize("residual_dtype", ["compute", "float32"])
def test_kernels_in_bfloat16_stay_near_diffusers(case, residual_dtype):
    """Within twice what bfloat16 alone makes: the same model without our kernels."""
    calls, _ = golden_calls(case)

    def errors(norm):
        changes = {"residual_dtype": residual_dtype, "norm": norm, "dtype": "bfloat16"}
        found = outputs_of(case, calls, **changes)
        return [error_of(each, c.output) for each, c in zip(found, calls, strict=True)]

    for kernel, plain in zip(errors("triton"), errors("xla"), strict=True):
        assert kernel < 2 * plain < 0.1


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("wan/t2v_plain_cross", GUIDED)]


@pytest.mark.parametrize("case", ["wan/flf2v", "hunyuan_video/both", *SLOW])
def test_weights_go_out_and_come_back_bit_for_bit(case, tmp_path, monkeypatch):
    config, params = golden_config(case), golden_params(case)
    golden = safetensors.numpy.load_file(transformer(case) / WEIGHTS)
    if case in HUNYUAN:  # the golden files' only difference from what diffusers can load
        width = "alload_jax.models.hunyuan_video.family._GLYPH_HIDDEN"
        monkeypatch.setattr(width, config.glyph_hidden)
    files = save_weights(tmp_path / "out", params, config, shard_bytes=40_000)
    assert len(files) > 1
    stored = {}
    for file in files:
        stored |= safetensors.numpy.load_file(file)
    assert stored.keys() == golden.keys()
    for key, value in golden.items():
        np.testing.assert_array_equal(stored[key], value, strict=True)
    folders = (tmp_path / "out", transformer(case))
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in folders)
    unlike = {"_diffusers_version", "task_type", "target_size"}
    unlike |= {"qk_norm"} if case in WAN else set()
    for fields in (ours, theirs):
        for name in unlike & fields.keys():
            del fields[name]
    assert ours == theirs
    family, written = family_of(config), ["out"]
    for naming in family.namings[1:]:  # those of the original repository, and of ComfyUI
        tensors, renamed = (family.tensors(config, names) for names in ("diffusers", naming)), {}
        for ours, theirs in zip(*tensors, strict=True):
            whole = renamed.setdefault(theirs.key, np.zeros(theirs.stored_shape, np.float32))
            whole[theirs.rows] = golden[ours.key]
        comfy = {f"model.diffusion_model.{key}": value for key, value in renamed.items()}
        for name, content in ((naming, renamed), (f"{naming}_comfy", comfy)):
            written.append(f"{name}.safetensors")
            safetensors.numpy.save_file(content, tmp_path / written[-1])
        save_weights(tmp_path / naming, params, config, naming=naming)
        written.append(naming)
        assert safetensors.numpy.load_file(tmp_path / naming / WEIGHTS).keys() == renamed.keys()
    for name in written:
        back = load_weights(tmp_path / name, config, MESH)
        jax.tree.map(np.testing.assert_array_equal, back, params)


BOTH = "hunyuan_video/both"


def test_padding_changes_no_bit_whatever_it_holds():
    call = golden_calls(BOTH)[0][1]
    *inputs, condition = call.arguments

    def with_padding(value):
        padded = {}
        for name, tokens in condition.items():
            padding = (tokens.segments.ids < 0)[..., None]
            padded[name] = tokens._replace(values=np.where(padding, value, tokens.values))
        return call._replace(arguments=(*inputs, padded))

    padded = [with_padding(np.float32(value)) for value in (0, 9)]
    zeros, others, clean = outputs_of(BOTH, [*padded, call])
    np.testing.assert_array_equal(zeros, others)
    np.testing.assert_allclose(clean, zeros, rtol=1e-5, atol=1e-6)


def test_a_sample_without_any_text_is_finite_with_all_its_gradients():
    graph = abstract_model(golden_config(BOTH)).graph
    *inputs, condition = golden_calls(BOTH)[0][0].arguments
    none = np.ones((len(inputs[0]), 1), bool)
    condition = {name: tokens.without(none) for name, tokens in condition.items()}

    def total(params):
        return jnp.sum(nnx.merge(graph, params)(*inputs, condition) ** 2)

    value, grads = jax.jit(jax.value_and_grad(total))(golden_params(BOTH))
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    # No token of a kind, no gradient.
    assert not np.any(grads["condition_embedding"]["kind"]["embedding"])
