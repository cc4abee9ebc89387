"""HunyuanVideo's transformer: padding, what it may lack, and its config."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from golden_models import golden_calls, golden_config, golden_params, outputs_of, transformer

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig
from alload_jax.models.common.lora import LoraConfig
from alload_jax.models.families import abstract_model, read_model_config
from alload_jax.models.hunyuan_video.family import FAMILY
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig

BOTH, T2V = "hunyuan_video/both", "hunyuan_video/t2v"


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


def test_adapters_by_default_are_on_the_projections_of_both_streams():
    config = golden_config(BOTH, lora=LoraConfig(rank=2))
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
        golden_config(T2V, **changes)
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
    fields = json.loads((transformer(T2V) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(InputError, match=f"config.json: .*{words}"):
        read_model_config(tmp_path / "config.json")


@pytest.mark.parametrize(("dim", "ffn_dim"), [(200, 464), (1664, 480), (1792, 976), (2048, 8192)])
def test_widths_survive_the_ratio_that_diffusers_keeps(dim, ffn_dim):
    changes = {"dim": dim, "ffn_dim": ffn_dim, "num_heads": 2, "rotary_dims": None}
    config = golden_config(T2V, glyph_hidden=2048, **changes)
    fields = FAMILY.export_fields(config)
    assert FAMILY.read_fields(fields).ffn_dim == ffn_dim


CLASSES = HunyuanVideoConfig(dim=16, ffn_dim=24, num_heads=2, num_layers=1, dtype="float32")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (golden_config(T2V, glyphs=None), "model.glyphs"),
        (golden_config(T2V, patch_size=(1, 2, 1)), "square"),
        (golden_config(T2V), "2048"),
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
