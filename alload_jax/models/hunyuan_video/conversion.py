"""Converts config.json of diffusers to our config, and exports ours."""

import math
from typing import Any

from alload_jax.errors import InputError
from alload_jax.models.common.config import ImageConfig, TextConfig
from alload_jax.models.hunyuan_video.config import HunyuanVideoConfig

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


def read_fields(fields: dict[str, Any]) -> HunyuanVideoConfig:
    """Reads the architecture from a config.json of diffusers.

    Raises:
      InputError: a field has the wrong type, or describes another model.
      KeyError: a field is missing.
    """
    _check_fields(fields)
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


def _check_fields(fields: dict[str, Any]) -> None:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31

    for key in _COUNTS:
        if not is_count(fields[key]):
            raise InputError(
                f"{key} is {fields[key]!r}; it must be a whole number above 0: download the file "
                "again"
            )
    for key in ("mlp_ratio", "rope_theta"):
        if not isinstance(fields[key], int | float) or not fields[key] > 0:
            raise InputError(
                f"{key} is {fields[key]!r}; it must be a number above 0: download the file again"
            )
    axes = fields["rope_axes_dim"]
    if not isinstance(axes, list) or [type(size) for size in axes] != [int] * 3:
        raise InputError(
            f"rope_axes_dim is {axes!r}; it must be three whole numbers: download the file again"
        )
    if fields["qk_norm"] != "rms_norm":
        raise InputError(f"qk_norm is {fields['qk_norm']!r}; only rms_norm is supported")
    if fields.get("use_meanflow"):
        raise InputError(
            "use_meanflow is true: models with a second timestep, such as those for "
            "super-resolution, are not supported; name another model"
        )


def export_fields(config: HunyuanVideoConfig) -> dict[str, Any]:
    """Returns the config.json with which diffusers' class loads such a model.

    Raises:
      InputError: diffusers does not support such a model.
    """
    text, glyphs, image = config.text, config.glyphs, config.image
    if text is None or glyphs is None or image is None:
        raise InputError(
            "model.text, model.glyphs or model.image is null: diffusers' HunyuanVideo has all "
            "three; only such models can be exported"
        )
    frames, height, width = config.patch_size
    if height != width:
        raise InputError(f"model.patch_size is {config.patch_size}: diffusers' patches are square")
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


def _ratio(config: HunyuanVideoConfig) -> float:
    """The ratio of the layers' widths from which readers get `ffn_dim` by rounding down."""
    ratio = config.ffn_dim / config.dim
    while int(config.dim * ratio) < config.ffn_dim:
        ratio = math.nextafter(ratio, math.inf)
    return ratio
