"""HunyuanVideo as a model family.

The table follows diffusers' HunyuanVideo15Transformer3DModel (0.42.1).
"""

import math
from collections.abc import Iterator
from typing import Any

from flax import nnx
from typing_extensions import override

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.common.safetensor_files import Naming, Tensor, linear_tensors, norm_tensors
from alload_jax.models.families import SamplingDefaults, TransformerFamily, require_fields
from alload_jax.models.hunyuan_video.transformer import HunyuanVideoConfig, HunyuanVideoTransformer

DIFFUSERS_CLASS = "HunyuanVideo15Transformer3DModel"
_COUNTS = (
    *("num_attention_heads", "attention_head_dim", "num_layers", "num_refiner_layers"),
    *("in_channels", "out_channels", "patch_size", "patch_size_t"),
    *("text_embed_dim", "text_embed_2_dim", "image_embed_dim"),
)
_TEXT_LENGTH, _GLYPH_LENGTH = 1000, 256
"""Most tokens of both texts in diffusers' pipelines; its config does not contain them."""
_GLYPH_HIDDEN = 2048
_SIZE = 640
"""Default of `target_size`, for which pipelines choose a resolution; the model does not use it."""


def _ratio(config: HunyuanVideoConfig) -> float:
    """The ratio of the layers' widths from which readers get `ffn_dim` by rounding down."""
    ratio = config.ffn_dim / config.dim
    while int(config.dim * ratio) < config.ffn_dim:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


_STREAMS = (
    ("video", "norm1", "to_{}", "to_out.0", "norm_{}", "ff"),
    ("condition", "norm1_context", "add_{}_proj", "to_add_out", "norm_added_{}", "ff_context"),
)
"""Ours; diffusers' names of a stream's modulation, projections, output, norms, feed-forward."""
_FREQUENCIES = 256
_REFINER_RATIO = 4


def _outside_blocks(config: HunyuanVideoConfig) -> Iterator[Tensor]:
    dim, patch = config.dim, config.patch_size
    shape = (dim, config.in_channels, *patch)
    yield Tensor("x_embedder.proj.weight", shape, "patch_embedding/kernel", None, "patch")
    yield Tensor("x_embedder.proj.bias", (dim,), "patch_embedding/bias", None, "same")
    time = "time_embed.timestep_embedder"
    yield from linear_tensors(f"{time}.linear_1", "time_embedding/hidden", dim, _FREQUENCIES)
    yield from linear_tensors(f"{time}.linear_2", "time_embedding/out", dim, dim)
    yield from linear_tensors("norm_out.linear", "head/modulation", 2 * dim, dim)
    outputs = math.prod(patch) * config.latent_channels
    yield from linear_tensors("proj_out", "head/out", outputs, dim)


def _text(config: HunyuanVideoConfig) -> Iterator[Tensor]:
    if config.text is None:
        return
    dim, width, path = config.dim, config.text.dim, "condition_embedding/text"
    yield Tensor(
        "cond_type_embed.weight", (3, dim), "condition_embedding/kind/embedding", None, "same"
    )
    key = "context_embedder.time_text_embed"
    yield from linear_tensors(f"{key}.timestep_embedder.linear_1", f"{path}/time_hidden", dim, 256)
    yield from linear_tensors(f"{key}.timestep_embedder.linear_2", f"{path}/time_out", dim, dim)
    yield from linear_tensors(f"{key}.text_embedder.linear_1", f"{path}/mean_hidden", dim, width)
    yield from linear_tensors(f"{key}.text_embedder.linear_2", f"{path}/mean_out", dim, dim)
    yield from linear_tensors("context_embedder.proj_in", f"{path}/inner", dim, width)
    for layer in range(config.refiner_layers):
        key = f"context_embedder.token_refiner.refiner_blocks.{layer}"
        yield from _refiner_block(key, f"{path}/blocks", dim, layer)


def _refiner_block(key: str, path: str, dim: int, layer: int) -> Iterator[Tensor]:
    yield from norm_tensors(f"{key}.norm1", f"{path}/attention_norm", dim, layer)
    yield from norm_tensors(f"{key}.norm2", f"{path}/feed_forward_norm", dim, layer)
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("out.0", "out")):
        yield from linear_tensors(f"{key}.attn.to_{theirs}", f"{path}/{ours}", dim, dim, layer)
    hidden = _REFINER_RATIO * dim
    yield from linear_tensors(
        f"{key}.ff.net.0.proj", f"{path}/feed_forward/hidden", hidden, dim, layer
    )
    yield from linear_tensors(f"{key}.ff.net.2", f"{path}/feed_forward/out", dim, hidden, layer)
    yield from linear_tensors(f"{key}.norm_out.linear", f"{path}/gates", 2 * dim, dim, layer)


def _glyphs_and_image(config: HunyuanVideoConfig) -> Iterator[Tensor]:
    dim = config.dim
    if config.glyphs:
        key, path = "context_embedder_2", "condition_embedding/glyphs"
        width, hidden = config.glyphs.dim, config.glyph_hidden
        yield from norm_tensors(f"{key}.norm", f"{path}/norm", width)
        yield from linear_tensors(f"{key}.linear_1", f"{path}/inner", hidden, width)
        yield from linear_tensors(f"{key}.linear_2", f"{path}/hidden", hidden, hidden)
        yield from linear_tensors(f"{key}.linear_3", f"{path}/out", dim, hidden)
    if config.image:
        key, path, width = "image_embedder", "condition_embedding/image", config.image.dim
        yield from norm_tensors(f"{key}.norm_in", f"{path}/norm_in", width)
        yield from linear_tensors(f"{key}.linear_1", f"{path}/hidden", width, width)
        yield from linear_tensors(f"{key}.linear_2", f"{path}/out", dim, width)
        yield from norm_tensors(f"{key}.norm_out", f"{path}/norm_out", dim)


def _block(config: HunyuanVideoConfig, layer: int) -> Iterator[Tensor]:
    dim, hidden, key = config.dim, config.ffn_dim, f"transformer_blocks.{layer}"
    for ours, modulation, project, out, norm, feed_forward in _STREAMS:
        path = f"blocks/{ours}"
        yield from linear_tensors(
            f"{key}.{modulation}.linear", f"{path}/modulation", 6 * dim, dim, layer
        )
        for theirs, name in (("q", "query"), ("k", "key"), ("v", "value")):
            linear = f"{key}.attn.{project.format(theirs)}"
            yield from linear_tensors(linear, f"{path}/{name}", dim, dim, layer)
        yield from linear_tensors(f"{key}.attn.{out}", f"{path}/out", dim, dim, layer)
        for theirs, name in (("q", "query_norm"), ("k", "key_norm")):
            weight, scale = f"{key}.attn.{norm.format(theirs)}.weight", f"{path}/{name}/scale"
            yield Tensor(weight, (config.head_dim,), scale, layer, "same")
        inner, outer = f"{path}/feed_forward/hidden", f"{path}/feed_forward/out"
        yield from linear_tensors(f"{key}.{feed_forward}.net.0.proj", inner, hidden, dim, layer)
        yield from linear_tensors(f"{key}.{feed_forward}.net.2", outer, dim, hidden, layer)


class HunyuanVideoFamily(TransformerFamily):
    """HunyuanVideo 1.5's models for text and images to video; see `Family`."""

    name = "hunyuan_video"
    config = HunyuanVideoConfig
    folder_classes = (DIFFUSERS_CLASS,)
    namings = ("diffusers",)
    lora_targets = (r"^blocks/(video|condition)/(query|key|value|out|feed_forward)(/|$)",)

    @override
    def build(self, config: HunyuanVideoConfig, rngs: nnx.Rngs) -> HunyuanVideoTransformer:
        return HunyuanVideoTransformer(config, rngs=rngs)

    @override
    def sampling_defaults(self, config: HunyuanVideoConfig) -> SamplingDefaults:
        """Guidance and shift are those of the 720p models."""
        if config.latent_channels in (1, 3):
            return SamplingDefaults(6.0, 1.0, (1, 1, 1))
        return SamplingDefaults(6.0, 9.0, (4, 16, 16), 24.0)

    @override
    def tensors(self, config: HunyuanVideoConfig, naming: Naming) -> list[Tensor]:
        """Only diffusers' names are known."""
        if naming != "diffusers":
            raise InputError(
                "the names of HunyuanVideo's own repository are not known; choose diffusers'"
            )
        found = [*_outside_blocks(config), *_text(config), *_glyphs_and_image(config)]
        for layer in range(config.num_layers):
            found += _block(config, layer)
        return found

    @override
    def read_fields(self, fields: dict[str, Any]) -> HunyuanVideoConfig:
        """Reads a config.json of diffusers."""
        require_fields(fields, _COUNTS, "count")
        require_fields(fields, ("mlp_ratio", "rope_theta"), "positive")
        require_fields(fields, ["rope_axes_dim"], "triple")
        if fields["qk_norm"] != "rms_norm":
            raise InputError(f"qk_norm is {fields['qk_norm']!r}; only rms_norm is supported")
        if fields.get("use_meanflow"):
            raise InputError(
                "use_meanflow is true: models with a second timestep, such as those for "
                "super-resolution, are not supported; name another model"
            )
        heads, patch = fields["num_attention_heads"], fields["patch_size"]
        dim = heads * fields["attention_head_dim"]
        channels, out_channels = fields["in_channels"], fields["out_channels"]
        t, h, w = fields["rope_axes_dim"]
        return HunyuanVideoConfig(
            dim=dim,
            ffn_dim=int(dim * fields["mlp_ratio"]),
            num_heads=heads,
            num_layers=fields["num_layers"],
            refiner_layers=fields["num_refiner_layers"],
            in_channels=channels,
            out_channels=None if out_channels == channels else out_channels,
            patch_size=(fields["patch_size_t"], patch, patch),
            text=TextConfig(fields["text_embed_dim"], _TEXT_LENGTH),
            glyphs=TextConfig(fields["text_embed_2_dim"], _GLYPH_LENGTH),
            image=ImageConfig(fields["image_embed_dim"]),
            rotary_dims=(t, h, w),
            rotary_theta=float(fields["rope_theta"]),
        )

    @override
    def export_fields(self, config: HunyuanVideoConfig) -> dict[str, Any]:
        """Fields for diffusers' HunyuanVideo15Transformer3DModel."""
        text, glyphs, image = config.text, config.glyphs, config.image
        if text is None or glyphs is None or image is None:
            raise InputError(
                "model.text, model.glyphs or model.image is null: diffusers' HunyuanVideo has all "
                "three; only such models can be exported"
            )
        frames, height, width = config.patch_size
        if height != width:
            raise InputError(
                f"model.patch_size is {config.patch_size}: diffusers' patches are square"
            )
        if config.glyph_hidden != _GLYPH_HIDDEN:
            raise InputError(
                f"model.glyph_hidden is {config.glyph_hidden}: in diffusers it is {_GLYPH_HIDDEN}"
            )
        return {
            "_class_name": DIFFUSERS_CLASS,
            "_diffusers_version": "0.42.1",
            "attention_head_dim": config.head_dim,
            "image_embed_dim": image.dim,
            "in_channels": config.in_channels,
            "mlp_ratio": _ratio(config),
            "num_attention_heads": config.num_heads,
            "num_layers": config.num_layers,
            "num_refiner_layers": config.refiner_layers,
            "out_channels": config.latent_channels,
            "patch_size": height,
            "patch_size_t": frames,
            "qk_norm": "rms_norm",
            "rope_axes_dim": list(config.rotary_sizes),
            "rope_theta": config.rotary_theta,
            "target_size": _SIZE,
            "task_type": "i2v",
            "text_embed_2_dim": glyphs.dim,
            "text_embed_dim": text.dim,
            "use_meanflow": False,
        }


FAMILY = HunyuanVideoFamily()
