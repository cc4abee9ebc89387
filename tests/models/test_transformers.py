"""Transformers: what they keep for the gradient, and their settings; golden files hold values."""

import dataclasses
import functools
from collections import Counter
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.cudnn import cudnn_rows
from alload_jax.models.common.layers import rematerialise
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.common.parts import patchify
from alload_jax.models.common.sparse_attention.config import SparseAttentionConfig
from alload_jax.models.families import FAMILIES, abstract_model, family_of
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig
from alload_jax.models.hunyuan_video.transformer_13b import HunyuanVideo13bConfig
from alload_jax.models.wan.transformer import WanConfig, WanTransformer
from alload_jax.planning.remat import RematPolicy

CONFIG = WanConfig(
    dim=24, ffn_dim=40, num_heads=2, num_layers=2, in_channels=2, freq_dim=16, dtype="float32"
)


@functools.cache
def randomised(config, seed=0):
    """The model with every parameter random: fresh ones leave out gates and the head."""
    graph, shapes = abstract_model(config)[:2]
    rng = np.random.default_rng(seed)
    return graph, jax.tree.map(
        lambda leaf: (rng.normal(0, 0.3, leaf.shape) + (leaf.ndim < 3) * 0.1).astype(np.float32),
        shapes,
    )


def inputs(config, batch, size, seed=1):
    rng = np.random.default_rng(seed)
    latents = jnp.asarray(rng.normal(size=(batch, *size, config.in_channels)), jnp.float32)
    timestep = jnp.asarray(rng.uniform(0, 1000, batch), jnp.float32)
    labels = jnp.asarray(rng.integers(0, config.num_classes + 1, (batch, 2)), jnp.int32)
    return latents, timestep, labels


def run(graph, params, *arguments):
    """In one program, not in one for each operation."""
    return jax.jit(lambda params, *given: nnx.merge(graph, params)(*given))(params, *arguments)


def squares(config, size, seed=1):
    """A loss as a function of the parameters, and those."""
    graph, params = randomised(config)
    arguments = inputs(config, 2, size, seed)
    return lambda params: jnp.sum(nnx.merge(graph, params)(*arguments) ** 2), params


def test_a_model_of_the_data_has_the_velocity_that_leads_to_them():
    graph, params = randomised(CONFIG)
    predicts_data, _ = randomised(dataclasses.replace(CONFIG, prediction="data"))
    latents, _, labels = inputs(CONFIG, 3, (2, 4, 4))
    timestep, sigma = jnp.asarray([1000.0, 300, 10]), np.asarray([1, 0.3, 0.05])
    data = run(graph, params, latents, timestep, labels)
    velocity = run(predicts_data, params, latents, timestep, labels)
    expected = np.asarray(latents - data) / sigma[:, None, None, None, None]
    np.testing.assert_allclose(velocity, expected, rtol=1e-4, atol=1e-4)


def test_a_model_tells_equal_tokens_apart_only_by_an_embedding_of_their_positions():
    for told in (False, True):
        graph, params = randomised(dataclasses.replace(CONFIG, position_embedding=told))
        _, timestep, labels = inputs(CONFIG, 1, (1, 2, 2))
        velocity = run(graph, params, np.ones((1, 3, 4, 4, 2), np.float32), timestep, labels)
        tokens = patchify(np.asarray(velocity), CONFIG.patch_size)[0]
        assert (np.ptp(tokens, axis=0).min() > 0.01) == told
        assert told or np.ptp(tokens, axis=0).max() < 1e-4


@pytest.mark.parametrize("field", [{"prediction": "data"}, {"position_embedding": True}])
def test_what_diffusers_lacks_is_not_exported(field):
    config = dataclasses.replace(CONFIG, text=TextConfig(8, 4), **field)
    with pytest.raises(InputError, match=rf"model\.{next(iter(field))} is "):
        family_of(config).export_fields(config)


@functools.cache
def gradient(remat, scan=True):
    config = dataclasses.replace(CONFIG, remat_layers=remat, scan_layers=scan)
    loss, params = squares(config, (2, 4, 4))
    return jax.jit(jax.grad(loss))(params)


QUICK = [
    (("full", "matmuls_and_attention"), True),
    (("offload_feed_forward_and_attention",), True),
    (("norms_matmuls_and_attention", "full"), False),
]
OTHERS = [((each,), True) for each in get_args(RematPolicy) if each != "none"]


@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        *QUICK,
        *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS if each not in QUICK),
    ],
)
def test_rematerialisation_changes_no_gradient(remat, scan):
    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max())

    jax.tree.map(same, gradient(("none",)), gradient(remat, scan))


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["full", "attention", "feed_forward_and_attention"])
def test_offloading_changes_no_bit_of_a_gradient_on_a_gpu(kept):
    offloaded = "offload" if kept == "full" else f"offload_{kept}"
    jax.tree.map(np.testing.assert_array_equal, gradient((kept,)), gradient((offloaded,)))


LADDER = [("full",), ("attention",), ("attention", "feed_forward_and_attention")]
LADDER += [("feed_forward_and_attention",), ("matmuls_and_attention",)]
LADDER += [("norms_matmuls_and_attention",), ("none",)]


@pytest.mark.parametrize(("scan", "ladder"), [(True, LADDER), (False, LADDER[::3])])
def test_rematerialisation_keeps_less_the_more_it_recomputes(scan, ladder):
    def kept(remat):
        config = dataclasses.replace(CONFIG, remat_layers=remat, scan_layers=scan)
        loss, params = squares(config, (4, 8, 8))
        _, backward = jax.eval_shape(lambda p: jax.vjp(loss, p), params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    found = [kept(remat) for remat in ladder]
    assert found == sorted(set(found))


def test_offloading_moves_what_blocks_keep_to_the_host():
    def moved(remat):
        loss, params = squares(dataclasses.replace(CONFIG, remat=remat), (4, 8, 8))
        lowered = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("cuda",))
        text = lowered.as_text().splitlines()
        to_host = [line for line in text if 'xla_buffer_placement = "pinned' in line]
        return Counter(line.rpartition("-> ")[2].partition(" ")[0] for line in to_host)

    rows, tokens, heads = 2, 4 * 4 * 4, CONFIG.num_heads
    stream = f"tensor<{rows}x{tokens}x{CONFIG.dim}xf32>"
    of_attention = f"tensor<{rows}x{tokens}x{heads}x{CONFIG.dim // heads}xf32>"
    assert not moved("attention")
    assert moved("offload") == {stream: 1}
    assert moved("offload_attention") == {stream: 1, of_attention: 2}
    assert moved("offload_feed_forward_and_attention") == {stream: 2, of_attention: 2}


@pytest.mark.parametrize("keys", [512, 8191, 8192])
def test_fused_attention_goes_to_the_host_where_its_keys_are_many(keys):
    parts = [jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (256, keys, keys)]

    def kept(policy):
        run = rematerialise(lambda *p: cudnn_rows(*p) * 1, policy, in_loop=False)
        saved = jax.eval_shape(lambda *p: jax.vjp(run, *p)[1], *parts)
        return sum(leaf.shape == parts[0].shape for leaf in jax.tree.leaves(saved)) - 1

    found = [kept(policy) for policy in ("attention", "offload_attention", "full")]
    assert found == [1, keys >= 8192, 0]


def test_a_fresh_model_predicts_zero():
    config = dataclasses.replace(CONFIG, num_layers=1)
    fresh = jax.jit(lambda *given: WanTransformer(config, rngs=nnx.Rngs(0))(*given))
    assert not np.asarray(fresh(*inputs(CONFIG, 2, (1, 4, 4)))).any()


CLASSES = HunyuanVideoConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=1, dtype="float32")
TEXT = dataclasses.replace(CLASSES, text=TextConfig(6, 3), glyphs=TextConfig(5, 2))
SINGLE = HunyuanVideo13bConfig(dim=16, num_heads=2, num_layers=1, text=TextConfig(6, 3))


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (CONFIG, {"dim": 30, "num_heads": 4}, "dim / num_heads"),
        (CONFIG, {"dim": 12, "num_heads": 4}, "dim / num_heads"),
        (CONFIG, {"patch_size": (1, 0, 2)}, "model.patch_size"),
        (CONFIG, {"freq_dim": 3}, "model.freq_dim is 3"),
        (CONFIG, {"image": ImageConfig(4)}, "model.image is set without model.text"),
        (CONFIG, {"num_layers": 4, "remat_layers": ("full",) * 3}, "remat_layers has 3 policies"),
        (CONFIG, {"remat": "full", "remat_layers": ("full",)}, "give one"),
        (CONFIG, {"norm": "torch"}, "model.norm is 'torch'"),
        (CONFIG, {"prediction": "noise"}, "model.prediction"),
        (CONFIG, {"prediction": "data", "out_channels": 1}, "model.prediction"),
        (TEXT, {"dim": 30, "num_heads": 2}, "whole, even number"),
        (TEXT, {"rotary_dims": (2, 2, 2)}, "rotary_dims is .2, 2, 2."),
        (TEXT, {"rotary_dims": (3, 3, 2)}, "must be even"),
        (TEXT, {"text": None}, "without model.text"),
        (TEXT, {"image": ImageConfig(4, 3)}, "model.image.positions is 3"),
        (SINGLE, {"pooled_dim": 3, "text": None}, "model.pooled_dim is set without model.text"),
        (SINGLE, {"glyphs": TextConfig(5, 2)}, "model.glyphs is set, which hunyuan_video_13b lack"),
        (SINGLE, {"sparse_attention": SparseAttentionConfig()}, "sparse_attention is set, which"),
        (SINGLE, {"num_layers": 3, "remat_layers": ("full",) * 3}, "does not divide model.single"),
    ],
)
def test_impossible_settings_are_one_line(config, change, words):
    with pytest.raises(InputError, match=words) as raised:
        dataclasses.replace(config, **change)
    assert "\n" not in str(raised.value)


def test_adapters_by_default_are_on_the_projections_of_both_streams():
    config = dataclasses.replace(TEXT, lora=LoraConfig(rank=2))
    names = flatten_dict(abstract_model(config).params, sep="/")
    found = {name.removesuffix("/lora_up") for name in names if name.endswith("/lora_up")}
    linears = ("query", "key", "value", "out", "feed_forward/hidden", "feed_forward/out")
    streams = ("video", "condition")
    assert found == {f"blocks/{stream}/{name}" for stream in streams for name in linears}
    names = abstract_model(dataclasses.replace(SINGLE, lora=LoraConfig(rank=2))).params
    single = flatten_dict(names, sep="/").keys()
    found |= {f"single_blocks/{name}" for name in linears if name != "out"}
    assert {name.removesuffix("/lora_up") for name in single if name.endswith("lora_up")} == found


@pytest.mark.parametrize("config", [CLASSES, dataclasses.replace(SINGLE, text=None)])
def test_a_model_of_classes_takes_them_as_any_family_does(config):
    assert config.condition_parts() == ()
    with pytest.raises(InputError, match=r"model\.text"):
        family_of(config).export_fields(config)
    given = jnp.ones((2, 3, 4, 2, 1)), jnp.ones(2), jnp.zeros((2, 1), jnp.int32)
    found = jax.eval_shape(lambda: family_of(config).build(config, nnx.Rngs(0))(*given))
    assert found.shape == (2, 3, 4, 2, 1)


class FakeGpu:
    device_kind, platform = "a GPU", "gpu"

    def __init__(self, capability):
        self.compute_capability = capability


def test_what_keeps_a_model_from_packed_rows_is_named(monkeypatch):
    for changes, capability, reason in (
        ({}, "9.0", ""),
        ({}, "8.0", "compute capability 9.0, and this GPU has 8.0"),
        ({}, "gfx942", "needs an NVIDIA GPU"),
        ({"attention": "xla"}, "9.0", "model.attention is xla"),
        ({"dtype": "float32"}, "9.0", "dtype is float32"),
        ({"dim": 256}, "8.0", ""),
        ({"dim": 128, "attention": "triton"}, "9.0", ""),
        ({"dim": 128, "attention": "cudnn"}, "8.6", "compute capability 9.0, and this GPU has 8.6"),
        ({"dim": 128}, "7.5", "compute capability 7.5"),
        ({"dim": 24}, "9.0", "head_dim is 12, not a multiple of 8 up to 256"),
        ({"dim": 512}, "9.0", ""),
        ({"dim": 528}, "9.0", "head_dim is 264, not a multiple of 8 up to 256"),
        ({"dim": 272}, "8.0", "head_dim is 136, not a multiple of 8 up to 128"),
    ):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        gpus = [FakeGpu(capability)]
        monkeypatch.setattr(jax, "devices", lambda *_, gpus=gpus: gpus)
        config = dataclasses.replace(CONFIG, **{"dim": 32, "dtype": "bfloat16"} | changes)
        found = family_of(config).packing_unsupported_reason(config)
        assert reason in found if reason else found == ""


def test_frozen_bfloat16_parameters_compute_in_float32():
    """As `parameters.frozen_dtype` leaves them: only their rounding is lost."""
    graph, params = randomised(CONFIG)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(np.float32), low)
    run = jax.jit(lambda params: nnx.merge(graph, params)(*inputs(CONFIG, 2, (2, 4, 4))))
    np.testing.assert_allclose(run(low), run(rounded), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES.names())
def test_a_field_that_older_configs_lack_means_what_it_is_by_default(family):
    config = FAMILIES.get(family).config
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    assert config.later_fields == {name: defaults[name] for name in config.later_fields}


def test_the_null_condition_keeps_the_image_and_a_scale_of_guidance_changes_no_parameter():
    text = TextConfig(8, 8)
    parts = HunyuanVideoConfig(text=text, glyphs=text, image=ImageConfig(8)).condition_parts()
    assert {part.name: part.dropped for part in parts} == {"text": 1, "glyphs": 1, "image": 0}
    for scale, expected in ((6.0, 1.0), (None, None)):
        config = HunyuanVideo13bConfig(embedded_guidance=scale)
        assert config.architecture()["embedded_guidance"] == expected
